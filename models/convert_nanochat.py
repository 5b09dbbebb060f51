"""Converts a checkpoint of the third-party replication "nag-nanochat" into a folder that we load.

    python convert_nanochat.py --state model_N.pt --meta meta_N.json --out FOLDER
    python convert_nanochat.py --state model.safetensors --heads 5 --out FOLDER

What that layout says, and what becomes of it:
- transformer.wte: rows centred during training, then rounded. Centred again here, which changes
  nothing but that rounding. Rows that pad the vocabulary are cut off, with --meta or --vocab.
- lm_head: rows centred with RMS 1 during training; done again here for the same reason.
- g_log_encode is added to the log-norm of the embedding: our log_gain as it is.
- *_branch.m_down: directions and bias; coef goes through a softmax: our mix_logits as they are.
- *_branch.beta is stored before a softplus; ours is stored after it.
- attn: RoPE (base 100 000, split halves), then RMS norm of q and k, then each times 1.2. It rotates
  by minus the angle: (x1 cos + x2 sin, x2 cos - x1 sin). Our rotation of swapped halves is the same
  with its result swapped, and swapping both q and k leaves every score alone; so the two halves of
  each head's rows of c_q and c_k change places.
- attention windows: a layer marked S in window_pattern looks back a quarter of the context only. We
  attend to everything, which is the same as long as the context is no longer than that window: with
  such layers, max_position_embeddings becomes the short window. Without --meta every layer is
  taken for a long one.
- ReLU^2 MLP, no biases; the number of heads cannot be read off the tensors.

Its tokenizer is not a tokenizer.json and is not converted. Without a depth.json the folder has the
tier "full" alone; `fathom calibrate` makes others.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

ROPE_BASE, QK_SCALE = 100000.0, 1.2
DEFAULT_CONTEXT = 2048


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=pathlib.Path, required=True, help=".pt or .safetensors")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--meta", type=pathlib.Path, help="JSON with model_config")
    parser.add_argument("--heads", type=int, help="query heads; needed without --meta")
    parser.add_argument("--vocab", type=int, help="entries before padding")
    parser.add_argument("--context", type=int, help="trained sequence length")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="of matrices and tables; gates are always float32")
    return parser.parse_args(arguments)


def read_state(path):
    """The state dict, without the prefixes that compiling and distributing put before names."""
    if path.suffix == ".safetensors":
        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = state.get("model", state)
    clean = {}
    for name, tensor in state.items():
        for prefix in ("_orig_mod.", "module."):
            name = name[len(prefix) :] if name.startswith(prefix) else name
        clean[name] = tensor.float()
    return clean


def read_settings(args):
    """model_config of the meta file, under the arguments that were given."""
    given = json.loads(args.meta.read_text())["model_config"] if args.meta else {}
    heads = args.heads or given.get("n_head")
    if not heads:
        raise SystemExit("the number of query heads is not in the tensors: give --heads or --meta")
    context = args.context or given.get("sequence_len", DEFAULT_CONTEXT)
    # The last layer's window is the whole context, whatever the pattern says of it.
    pattern = given.get("window_pattern", "L").upper()
    layers = given.get("n_layer", len(pattern) + 1)
    if any(pattern[i % len(pattern)] == "S" for i in range(layers - 1)):
        context = min(context, 128 * -(-context // 4 // 128))
    return heads, args.vocab or given.get("vocab_size"), context


def centred(rows):
    return rows - rows.mean(-1, keepdim=True)


def unit_rms(rows):
    return rows / rows.pow(2).mean(-1, keepdim=True).sqrt()


def swap_halves(matrix, head_size):
    """Exchanges the halves of each head's rows: the other sense of rotation."""
    first, second = matrix.reshape(-1, 2, head_size // 2, matrix.shape[-1]).unbind(1)
    return torch.stack((second, first), 1).reshape(matrix.shape)


def convert(state, heads, vocab, context, dtype):
    """-> values of config.json, tensors. Refuses a state dict with anything not understood."""
    state = dict(state)
    table = state.pop("transformer.wte.weight")
    vocab, hidden = vocab or len(table), table.shape[1]
    head_size = hidden // heads
    blocks = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("transformer.h."))
    key_rows, _ = state["transformer.h.0.attn.c_k.weight"].shape
    inner, _ = state["transformer.h.0.mlp.c_fc.weight"].shape
    directions, _ = state["transformer.h.0.attn_branch.m_down.weight"].shape
    tensors = {
        "model.embed_tokens.weight": centred(table[:vocab]).to(dtype),
        "lm_head.weight": unit_rms(centred(state.pop("lm_head.weight")[:vocab])).to(dtype),
        "model.log_gain": state.pop("g_log_encode").reshape(1),
    }
    for i in range(blocks):
        source, layer = f"transformer.h.{i}.", f"model.layers.{i}."
        for name in ("q", "k", "v", "proj"):
            matrix = state.pop(f"{source}attn.c_{name}.weight")
            matrix = swap_halves(matrix, head_size) if name in ("q", "k") else matrix
            place = "o" if name == "proj" else name
            tensors[f"{layer}self_attn.{place}_proj.weight"] = matrix.to(dtype)
        tensors[layer + "mlp.up_proj.weight"] = state.pop(source + "mlp.c_fc.weight").to(dtype)
        tensors[layer + "mlp.down_proj.weight"] = state.pop(source + "mlp.c_proj.weight").to(dtype)
        for kind in ("attn", "mlp"):
            branch, nag = f"{source}{kind}_branch.", f"{layer}{kind}_nag."
            tensors[nag + "directions.weight"] = state.pop(branch + "m_down.weight")
            tensors[nag + "directions.bias"] = state.pop(branch + "m_down.bias")
            tensors[nag + "mix_logits"] = state.pop(branch + "coef")
            tensors[nag + "beta"] = F.softplus(state.pop(branch + "beta")).reshape(1)
            tensors[nag + "alpha"] = state.pop(branch + "alpha").reshape(1)
    if state:
        raise SystemExit(f"tensors that this layout does not have: {', '.join(sorted(state))}")
    config = {
        "architectures": ["NagForCausalLM"],
        "model_type": "nag",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": key_rows // head_size,
        "head_dim": head_size,
        "intermediate_size": inner,
        "hidden_act": "relu2",
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": context,
        "qk_norm": "after_rope",
        "qk_scale": QK_SCALE,
        "nag_directions": directions,
        "nag_head": "cosine_scale",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).split(".")[-1],
    }
    return config, {name: tensor.contiguous() for name, tensor in tensors.items()}


def main(arguments=None):
    args = parse_arguments(arguments)
    settings = read_settings(args)
    config, tensors = convert(read_state(args.state), *settings, getattr(torch, args.dtype))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{config['num_hidden_layers']} blocks, {count / 1e6:.1f} M parameters, {args.out}")


if __name__ == "__main__":
    main()
