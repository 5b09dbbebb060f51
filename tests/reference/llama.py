"""Ordinary Llama-family models in plain PyTorch, one line per formula, for files whose weights no
other oracle reads: GGUF, by the `gguf` package's dequantisation.

    python llama.py FILE.gguf --tokens 1,2,3          the best next tokens
    python llama.py FILE.gguf --ids ids.txt [--window 512]   perplexity of white-space-separated ids
"""

import argparse
import math
import pathlib

import gguf
import numpy as np
import torch
import torch.nn.functional as F


def read_gguf(path):
    """-> settings, {name: float tensor}."""
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    arch = values["general.architecture"]
    weights = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[tensor.name] = torch.from_numpy(np.array(data, np.float32).reshape(shape))
    heads = values[f"{arch}.attention.head_count"]
    hidden = values[f"{arch}.embedding_length"]
    return {
        "blocks": values[f"{arch}.block_count"],
        "heads": heads,
        "kv_heads": values.get(f"{arch}.attention.head_count_kv", heads),
        "head_size": values.get(f"{arch}.attention.key_length", hidden // heads),
        "epsilon": values[f"{arch}.attention.layer_norm_rms_epsilon"],
        "theta": values.get(f"{arch}.rope.freq_base", 10000.0),
        "interleaved": arch == "llama",
    }, weights


def rms_norm(x, gain, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gain


def rotate(x, settings):
    """x [T, heads, D]; neighbours turn against each other, or the first half against the second."""
    size = settings["head_size"]
    pair = torch.arange(size // 2, dtype=torch.float64)
    angle = torch.arange(len(x))[:, None] * settings["theta"] ** (-2 * pair / size)
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    if settings["interleaved"]:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.no_grad()
def forward(settings, weights, tokens):
    """Logits [T, V]."""
    heads, kv_heads, epsilon = settings["heads"], settings["kv_heads"], settings["epsilon"]
    count = len(tokens)
    mask = torch.full((count, count), -math.inf, dtype=weights["output_norm.weight"].dtype).triu(1)
    x = weights["token_embd.weight"][tokens]

    def linear(y, name):
        return F.linear(y, weights[name + ".weight"], weights.get(name + ".bias"))

    for i in range(settings["blocks"]):
        block = f"blk.{i}."
        y = rms_norm(x, weights[block + "attn_norm.weight"], epsilon)
        q = linear(y, block + "attn_q").view(count, heads, -1)
        k = linear(y, block + "attn_k").view(count, kv_heads, -1)
        v = linear(y, block + "attn_v").view(count, kv_heads, -1)
        if block + "attn_q_norm.weight" in weights:
            q = rms_norm(q, weights[block + "attn_q_norm.weight"], epsilon)
            k = rms_norm(k, weights[block + "attn_k_norm.weight"], epsilon)
        q, k = rotate(q, settings), rotate(k, settings)
        k = k.repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(settings["head_size"]) + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x = x + linear(mixed, block + "attn_output")
        y = rms_norm(x, weights[block + "ffn_norm.weight"], epsilon)
        x = x + linear(F.silu(linear(y, block + "ffn_gate")) * linear(y, block + "ffn_up"),
                       block + "ffn_down")
    x = rms_norm(x, weights["output_norm.weight"], epsilon)
    return F.linear(x, weights.get("output.weight", weights["token_embd.weight"]))


def perplexity(settings, weights, tokens, window):
    loss, count = 0.0, 0
    for start in range(0, len(tokens), window):
        part = torch.tensor(tokens[start : start + window])
        if len(part) < 2:
            continue
        logits = forward(settings, weights, part)[:-1]
        loss += F.cross_entropy(logits, part[1:], reduction="sum").item()
        count += len(part) - 1
    return math.exp(loss / count)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--tokens", help="ids, separated by commas")
    parser.add_argument("--ids", type=pathlib.Path)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    settings, weights = read_gguf(args.file)
    if args.tokens:
        logits = forward(settings, weights, torch.tensor([int(t) for t in args.tokens.split(",")]))
        best = logits[-1].topk(8)
        print(" ".join(f"{i}:{v:.4f}" for i, v in zip(best.indices.tolist(), best.values.tolist())))
    if args.ids:
        tokens = [int(word) for word in args.ids.read_text().split()]
        print(f"{perplexity(settings, weights, tokens, args.window):.5f}")


if __name__ == "__main__":
    main()
