"""Converts a model in llama2.c's version-0 format into a folder that we load.

    python convert_llama2c.py --model stories260K.bin --tokenizer tok512.bin --out FOLDER

The model file is seven int32 (width, inner width, layers, heads, key/value heads, entries, context;
entries below zero: the head is a matrix of its own), then fp32 matrices, each for all layers. Its
RoPE turns neighbouring rows of Q and K against each other; ours turns halves, so the rows of each
head are put in that order. The vocabulary is the largest piece's length, then for every piece its
score, its length and its bytes; 0 to 2 are <unk>, <s> and </s>, then come 256 bytes.
"""

import argparse
import json
import pathlib
import struct

import numpy as np
from safetensors.numpy import save_file

HEADER = struct.Struct("<7i")
FIRST_PIECE = 259


def split_halves(matrix, head_size):
    """Rows of interleaved pairs to rows of two halves, head by head."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(rows // head_size, head_size // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def read_model(path):
    data = path.read_bytes()
    width, inner, layers, heads, kv_heads, vocab, context = HEADER.unpack_from(data)
    tied, vocab, head_size = vocab > 0, abs(vocab), width // heads
    values = np.frombuffer(data, "<f4", offset=HEADER.size)
    at = 0

    def take(*shape):
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count : at].reshape(shape)

    kv = kv_heads * head_size
    table = take(vocab, width)
    parts = {  # in the file's order
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": take(layers, width, width),
        "self_attn.k_proj": take(layers, kv, width),
        "self_attn.v_proj": take(layers, kv, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, inner, width),
        "mlp.down_proj": take(layers, width, inner),
        "mlp.up_proj": take(layers, inner, width),
    }
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": take(width)}
    take(2, context, head_size // 2)  # the rotary tables, which follow from the shape
    if not tied:
        tensors["lm_head.weight"] = take(vocab, width)
    for name, all_layers in parts.items():
        for layer, matrix in enumerate(all_layers):
            if name.endswith(("q_proj", "k_proj")):
                matrix = split_halves(matrix, head_size)
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(matrix)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config, tensors


def read_pieces(path, count):
    data = path.read_bytes()
    at, pieces, scores = 4, [], []
    for _ in range(count):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        pieces.append(data[at : at + length].decode())
        scores.append(score)
        at += length
    return pieces, scores


def tokenizer_json(pieces, scores):
    """Pieces of llama2.c have spaces; names have the mark. Byte pieces are named alike in both."""
    names = ["<unk>", "<s>", "</s>"]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    names += [piece.replace(" ", "\u2581") for piece in pieces[FIRST_PIECE:]]
    ids = {name: i for i, name in enumerate(names)}
    merges = []
    for i in sorted(range(FIRST_PIECE, len(names)), key=lambda i: -scores[i]):
        name = names[i]
        parts = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        merges += [list(pair) for pair in parts if pair[0] in ids and pair[1] in ids]
    mark, space = {"String": "\u2581"}, {"String": " "}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": names[i], "special": True, "normalized": False, "lstrip": False,
             "rstrip": False, "single_word": False} for i in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": space, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": mark, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>",
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": ids, "merges": merges},
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(arguments)
    config, tensors = read_model(args.model)
    pieces, scores = read_pieces(args.tokenizer, config["vocab_size"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = json.dumps(tokenizer_json(pieces, scores), ensure_ascii=False, indent=1)
    (args.out / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    count = sum(tensor.size for tensor in tensors.values())
    print(f"{config['num_hidden_layers']} blocks, {count} parameters, {args.out}")


if __name__ == "__main__":
    main()
