"""Writes golden/gguf/: two tiny GGUF models of random weights with their tokenizers, and what
llama.py computes for them.

    python make_golden_gguf.py        needs torch, safetensors and gguf

NAME.gguf, NAME.safetensors: tokens I32 [40], logits F32 [40, V].
"""

import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

import llama

HERE = pathlib.Path(__file__).parent
OUT = HERE / "golden" / "gguf"
LENGTH = 40
TYPES = gguf.GGMLQuantizationType
CONTROL, USER, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2


def q6_k(rows, columns, generator):
    """Random blocks: the package unpacks this type but does not pack it."""
    blocks = generator.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
    blocks[..., 192:208] = generator.integers(1, 60, blocks[..., 192:208].shape)
    blocks[..., 208:] = np.frombuffer(np.float16(0.0004).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def add(writer, name, shape, kind, generator):
    if kind == TYPES.Q6_K:
        writer.add_tensor(name, q6_k(*shape, generator), raw_dtype=kind)
        return
    scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
    values = generator.standard_normal(shape).astype(np.float32) * scale
    if "norm" in name:
        values += 1
    if kind == TYPES.F32:
        writer.add_tensor(name, values)
    else:
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)


def add_model(writer, arch, vocab, hidden, inner, heads, kv_heads, size, kinds, generator, biases):
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    add(writer, "token_embd.weight", (vocab, hidden), kinds["embd"], generator)
    add(writer, "output_norm.weight", (hidden,), TYPES.F32, generator)
    for i in range(2):
        block = f"blk.{i}."
        for name, rows, columns in (
            ("attn_q", heads * size, hidden), ("attn_k", kv_heads * size, hidden),
            ("attn_v", kv_heads * size, hidden), ("attn_output", hidden, heads * size),
            ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner),
        ):
            add(writer, f"{block}{name}.weight", (rows, columns), kinds[name], generator)
            if biases and name in ("attn_q", "attn_k", "attn_v"):
                add(writer, f"{block}{name}.bias", (rows,), TYPES.F32, generator)
        for name in ("attn_norm", "ffn_norm"):
            add(writer, f"{block}{name}.weight", (hidden,), TYPES.F32, generator)


def add_pieces(writer, data):
    """SentencePiece-style, with scores: of pieces that merge, in the order of their merges."""
    vocab = data["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    scores, kinds = [0.0] * len(names), [NORMAL] * len(names)
    seen = set()
    for left, right in data["model"]["merges"]:
        if left + right not in seen:
            seen.add(left + right)
            scores[vocab[left + right]] = -float(len(seen))
    for i, name in enumerate(names):
        if name.startswith("<0x"):
            kinds[i] = BYTE
        elif i < 3:
            kinds[i] = UNKNOWN if i == 0 else CONTROL
        elif name not in seen:
            scores[i] = -1e6
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return len(names)


def add_bytes(writer, data):
    vocab = dict(data["model"]["vocab"])
    added = {token["content"]: token for token in data["added_tokens"]}
    vocab.update({name: token["id"] for name, token in added.items()})
    names = sorted(vocab, key=vocab.get)
    kinds = [NORMAL if name not in added else CONTROL if added[name]["special"] else USER
             for name in names]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{% for message in messages %}{% endfor %}")
    return len(names)


def finish(writer, name):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    settings, weights = llama.read_gguf(OUT / f"{name}.gguf")
    vocab = len(weights["token_embd.weight"])
    tokens = torch.randint(vocab, (LENGTH,), generator=torch.Generator().manual_seed(3))
    weights = {key: value.double() for key, value in weights.items()}
    logits = llama.forward(settings, weights, tokens).float()
    save_file({"tokens": tokens.to(torch.int32), "logits": logits.contiguous()},
              OUT / f"{name}.safetensors")
    print(name, (OUT / f"{name}.gguf").stat().st_size, "bytes")


def read_tokenizer(name):
    return json.loads((HERE / "tokenizer" / name / "tokenizer.json").read_text(encoding="utf-8"))


def main():
    OUT.mkdir(exist_ok=True, parents=True)
    generator = np.random.default_rng(5)
    writer = gguf.GGUFWriter(OUT / "pieces.gguf", "llama")
    vocab = add_pieces(writer, read_tokenizer("pieces"))
    kinds = {"embd": TYPES.Q8_0, "attn_q": TYPES.Q6_K, "attn_k": TYPES.Q4_0, "attn_v": TYPES.Q4_1,
             "attn_output": TYPES.Q8_0, "ffn_gate": TYPES.Q4_0, "ffn_up": TYPES.Q6_K,
             "ffn_down": TYPES.F16}
    add_model(writer, "llama", vocab, 256, 32, 4, 2, 8, kinds, generator, False)
    finish(writer, "pieces")
    writer = gguf.GGUFWriter(OUT / "bytes.gguf", "qwen2")
    vocab = add_bytes(writer, read_tokenizer("split"))
    kinds = {"embd": TYPES.BF16, "attn_q": TYPES.F16, "attn_k": TYPES.F16, "attn_v": TYPES.BF16,
             "attn_output": TYPES.F32, "ffn_gate": TYPES.F32, "ffn_up": TYPES.Q4_1,
             "ffn_down": TYPES.Q8_0}
    add_model(writer, "qwen2", vocab, 32, 64, 4, 2, 8, kinds, generator, True)
    finish(writer, "bytes")


if __name__ == "__main__":
    main()
