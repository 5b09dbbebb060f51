"""Writes a random NAG checkpoint of a given shape: speed does not depend on what weights say.

    python make_random_nag.py FOLDER [--blocks 30] [--hidden 576] [--heads 9] [--kv-heads 3]
                                     [--inner 1536] [--vocab 49152] [--context 10240] [--omit]

The defaults make 135 M parameters (162 M with the two tables). There is no tokenizer: whoever uses
it brings token ids. Nor are there tiers: bench_batching calibrates them on random tokens. Needs
torch.
"""

import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "reference"))
import nag  # noqa: E402

DIRECTIONS = 16
OPTIONS = {
    "blocks": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "inner": 1536, "vocab": 49152,
    "context": 10240,
}


def table(rows, width):
    """Centred rows of RMS 1."""
    weight = torch.randn(rows, width)
    weight -= weight.mean(-1, keepdim=True)
    return (weight / nag.rms(weight)).bfloat16()


def matrix(out, width):
    return (torch.randn(out, width) * width**-0.5).bfloat16()


def gate(name, hidden, sublayer):
    """As training starts: models/train."""
    return {
        name + "directions.weight": torch.randn(DIRECTIONS, hidden) * hidden**-0.5,
        name + "directions.bias": torch.zeros(DIRECTIONS),
        name + "mix_logits": torch.zeros(DIRECTIONS),
        name + "beta": torch.ones(1),
        name + "alpha": torch.full((1,), sublayer**-0.5),
    }


def make_tensors(shape):
    d, inner = shape.hidden, shape.inner
    kv = shape.kv_heads * (d // shape.heads)
    tensors = {
        "model.embed_tokens.weight": table(shape.vocab, d),
        "lm_head.weight": table(shape.vocab, d),
        "model.log_gain": torch.full((1,), 2.3),
    }
    for i in range(shape.blocks):
        name = f"model.layers.{i}."
        for part, out, width in (
            ("self_attn.q_proj", d, d), ("self_attn.k_proj", kv, d), ("self_attn.v_proj", kv, d),
            ("self_attn.o_proj", d, d), ("mlp.gate_proj", inner, d), ("mlp.up_proj", inner, d),
            ("mlp.down_proj", d, inner),
        ):  # fmt: skip
            tensors[f"{name}{part}.weight"] = matrix(out, width)
        tensors |= gate(name + "attn_nag.", d, 2 * i + 1) | gate(name + "mlp_nag.", d, 2 * i + 2)
    return tensors


def config_json(shape):
    return {
        "model_type": "nag", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "num_hidden_layers": shape.blocks, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads,
        "intermediate_size": shape.inner, "hidden_act": "silu", "rope_theta": 10000.0,
        "max_position_embeddings": shape.context, "qk_norm": "after_rope", "qk_scale": 1.2,
        "nag_directions": DIRECTIONS, "nag_head": "cosine_scale", "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    for name, value in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--omit", action="store_true", help="kv_policy omit")
    shape = parser.parse_args()
    torch.manual_seed(0)
    shape.folder.mkdir(parents=True, exist_ok=True)
    (shape.folder / "config.json").write_text(json.dumps(config_json(shape), indent=2))
    full = {"name": "full", "target_skip": 0, "theta": [0] * (2 * shape.blocks)}
    depth = {"format": 1, "kv_policy": "omit" if shape.omit else "compute", "tiers": [full]}
    (shape.folder / "depth.json").write_text(json.dumps({**depth, "default": "full"}))
    nag.write_safetensors(shape.folder / "model.safetensors", make_tensors(shape))


if __name__ == "__main__":
    main()
