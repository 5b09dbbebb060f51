"""Turns a checkpoint of train.py into a folder that the server loads.

    python export.py --checkpoint OUT/last.pt --out FOLDER [--tokenizer DIR]

Matrices and tables are written in bf16. What decides which sub-layers
run (the gates) and the log-gain stay in fp32: a rounded direction would move decisions. The tables
are written as they are used: rows of the embedding centred, rows of the head centred with RMS 1.
depth.json gets a tier per skip rate of the training, from the thresholds that training ended with;
`fathom calibrate` replaces it by measured ones. DIR is where prepare.py wrote the tokenizer.
Needs torch 2: older ones cannot read last.pt without running what a pickle says.
"""

import argparse
import json
import pathlib
import shutil

import torch
import torch.nn.functional as F
from safetensors.torch import save

TIERS = {0.10: "high", 0.25: "balanced", 0.40: "fast"}
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
NEVER = 2.0  # a threshold that no mix reaches: mix is below 1


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="last.pt")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="folder with tokenizer.json")
    return parser.parse_args(arguments)


def config_json(config):
    """`config` holds the fields of model.Config, whose names are those of config.json."""
    return {
        "architectures": ["NagForCausalLM"],
        "model_type": "nag",
        **config,
        "hidden_act": "silu",
        "qk_norm": "after_rope",
        "nag_head": "cosine_scale",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def centred(rows):
    return rows - rows.mean(-1, keepdim=True)


def unit_rms(rows):
    return rows / rows.pow(2).mean(-1, keepdim=True).sqrt()


def export_tensors(state, blocks):
    """The trainer's state dict under the names of a checkpoint folder; every tensor is consumed."""
    state = {name: tensor.float() for name, tensor in state.items()}
    tensors = {
        "model.embed_tokens.weight": centred(state.pop("embed")).bfloat16(),
        "lm_head.weight": unit_rms(centred(state.pop("head"))).bfloat16(),
        "model.log_gain": state.pop("log_gain"),
    }
    for i in range(blocks):
        source, layer = f"blocks.{i}.", f"model.layers.{i}."
        for room, names in (("self_attn", ATTENTION), ("mlp", MLP)):
            for name in names:
                matrix = state.pop(source + name)
                tensors[f"{layer}{room}.{name}_proj.weight"] = matrix.bfloat16()
        for kind in ("attn", "mlp"):
            gate, nag = f"{source}{kind}_gate.", f"{layer}{kind}_nag."
            tensors[nag + "directions.weight"] = state.pop(gate + "directions")
            tensors[nag + "directions.bias"] = state.pop(gate + "bias")
            tensors[nag + "mix_logits"] = state.pop(gate + "mix_logits")
            tensors[nag + "beta"] = F.softplus(state.pop(gate + "raw_beta"))
            tensors[nag + "alpha"] = state.pop(gate + "alpha")
    if state:
        raise SystemExit(f"tensors without a place: {', '.join(sorted(state))}")
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def thresholds(tensors, blocks, tau):
    """|g| = |alpha| mix^beta is below tau where mix is below (tau / |alpha|)^(1 / beta)."""
    theta = []
    for i in range(blocks):
        for kind in ("attn", "mlp"):
            nag = f"model.layers.{i}.{kind}_nag."
            alpha, beta = abs(tensors[nag + "alpha"].item()), tensors[nag + "beta"].item()
            theta.append((tau / alpha) ** (1 / beta) if tau < alpha else NEVER)
    return theta


def depth_json(tensors, blocks, tau):
    tiers = [{"name": "full", "target_skip": 0.0, "theta": [0.0] * (2 * blocks)}]
    for rate, name in TIERS.items():
        if rate in tau:
            theta = thresholds(tensors, blocks, tau[rate])
            tiers.append({"name": name, "target_skip": rate, "theta": theta})
    return {"format": 1, "kv_policy": "compute", "tiers": tiers, "default": "full"}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(arguments=None):
    args = parse_arguments(arguments)
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    config, blocks = state["config"], state["config"]["num_hidden_layers"]
    tensors = export_tensors(state["model"], blocks)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "config.json", config_json(config))
    write_json(args.out / "depth.json", depth_json(tensors, blocks, state["tau"]))
    (args.out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    if args.tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(args.tokenizer / name, args.out / name)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"step {state['step']}: {count / 1e6:.2f} M parameters, {args.out}")


if __name__ == "__main__":
    main()
