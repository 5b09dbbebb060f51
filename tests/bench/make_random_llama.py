"""Writes one random Llama of a given shape twice: as a Hugging Face folder and as GGUF files.

    python make_random_llama.py FOLDER [--blocks 30] [--hidden 576] [--heads 9] [--kv-heads 3]
                                       [--inner 1536] [--vocab 49152] [--context 2048]

Makes FOLDER/hf (bf16), FOLDER/bf16.gguf and FOLDER/q8_0.gguf: the same numbers, so that two servers
can be measured on the same work; speed does not depend on what weights say. The defaults are 134.5 M
parameters with tied embeddings. The tokenizer knows the 256 bytes, one merge and fillers. Needs numpy.
"""

import argparse
import json
import pathlib
import struct

import numpy

ROPE_THETA, EPSILON = 10000.0, 1e-5
OPTIONS = {
    "blocks": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "inner": 1536, "vocab": 49152,
    "context": 2048,
}


def to_bf16(x):
    """Nearest, ties to even, as uint16."""
    bits = x.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def from_bf16(x):
    return (x.astype(numpy.uint32) << 16).view(numpy.float32)


# ---- The model ----------------------------------------------------------------------------------


def make_weights(shape):
    """bf16 tensors by their names in a folder; norms are ones."""
    random = numpy.random.default_rng(1)
    d, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads

    def matrix(out, width):
        return to_bf16(random.standard_normal((out, width), numpy.float32) * width**-0.5)

    ones = to_bf16(numpy.ones(d))
    weights = {"model.embed_tokens.weight": matrix(shape.vocab, d), "model.norm.weight": ones}
    for i in range(shape.blocks):
        name = f"model.layers.{i}."
        for part, out, width in (
            ("self_attn.q_proj", d, d), ("self_attn.k_proj", kv, d), ("self_attn.v_proj", kv, d),
            ("self_attn.o_proj", d, d), ("mlp.gate_proj", shape.inner, d),
            ("mlp.up_proj", shape.inner, d), ("mlp.down_proj", d, shape.inner),
        ):
            weights[f"{name}{part}.weight"] = matrix(out, width)
        weights[name + "input_layernorm.weight"] = ones
        weights[name + "post_attention_layernorm.weight"] = ones
    return weights


def make_tokens(vocab):
    """Bytes as GPT-2 writes them, one merge, fillers, and the end of text last."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(b) if b in printable else chr(next(others)) for b in range(256)] + ["ab"]
    tokens += [f"<filler{i}>" for i in range(vocab - len(tokens) - 1)]
    return [*tokens, "<|end|>"]


# ---- Hugging Face -------------------------------------------------------------------------------


def write_folder(folder, shape, weights, tokens):
    folder.mkdir(parents=True, exist_ok=True)
    end = shape.vocab - 1
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.inner, "hidden_act": "silu", "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA, "max_position_embeddings": shape.context,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": end,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": end, "content": tokens[end], "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": ["a b"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    header, at = {}, 0
    for name, x in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in weights.values():
            file.write(x.tobytes())


# ---- GGUF (ggml's docs/gguf.md) -----------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
F32, Q8_0, BF16 = 0, 8, 30
ALIGNMENT = 32


def gguf_name(name):
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    block, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{block}.{GGUF_NAMES[part]}.weight"


def gguf_rows(name, x, shape):
    """GGUF has rotated pairs of Q and K side by side, a folder has halves."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
    if not heads:
        return x
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def to_q8_0(x):
    """Groups of 32: an f16 scale, then codes."""
    groups = from_bf16(x).reshape(-1, 32)
    scale = (abs(groups).max(1) / 127).astype(numpy.float32)
    inverse = numpy.where(scale > 0, 1 / numpy.where(scale > 0, scale, 1), 0)
    codes = numpy.rint(groups * inverse[:, None]).astype(numpy.int8)
    out = numpy.empty((len(groups), 34), numpy.uint8)
    out[:, :2] = scale.astype(numpy.float16).view(numpy.uint8).reshape(-1, 2)
    out[:, 2:] = codes.view(numpy.uint8)
    return out


def gguf_text(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value):
    if isinstance(value, list):
        inner = [gguf_value(item) for item in value]
        kind = inner[0][:4]
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(
            item[4:] for item in inner)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def write_gguf(path, shape, weights, tokens, kind):
    end = shape.vocab - 1
    metadata = {
        "general.architecture": "llama", "general.name": "random",
        "general.file_type": {BF16: 32, Q8_0: 7}[kind], "general.alignment": ALIGNMENT,
        "llama.context_length": shape.context, "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.blocks, "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": EPSILON, "llama.rope.freq_base": ROPE_THETA,
        "llama.rope.dimension_count": shape.hidden // shape.heads,
        "llama.vocab_size": shape.vocab, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
    }
    head, infos, data, at = b"", b"", [], 0
    for key, value in metadata.items():
        head += gguf_text(key) + gguf_value(value)
    types = [1] * end + [3]  # normal ones, and a control token; int32
    head += gguf_text("tokenizer.ggml.token_type") + struct.pack(
        f"<IIQ{len(types)}i", 9, 5, len(types), *types)
    for name, x in weights.items():
        rows = gguf_rows(name, x, shape)
        this = F32 if rows.ndim == 1 else kind
        stored = {F32: from_bf16, Q8_0: to_q8_0, BF16: lambda x: x}[this](rows)
        infos += gguf_text(gguf_name(name)) + struct.pack(
            f"<I{rows.ndim}QIQ", rows.ndim, *reversed(rows.shape), this, at)
        data.append(stored.tobytes() + b"\0" * (-stored.nbytes % ALIGNMENT))
        at += len(data[-1])
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(metadata) + 1) + head + infos
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % ALIGNMENT))
        file.writelines(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    for name, default in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    shape = parser.parse_args()
    weights, tokens = make_weights(shape), make_tokens(shape.vocab)
    write_folder(shape.folder / "hf", shape, weights, tokens)
    write_gguf(shape.folder / "bf16.gguf", shape, weights, tokens, BF16)
    write_gguf(shape.folder / "q8_0.gguf", shape, weights, tokens, Q8_0)


if __name__ == "__main__":
    main()
