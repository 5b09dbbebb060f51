"""Text in, tokens out: trains the byte-level BPE and writes the token files that train.py reads.

    python prepare.py --train a.txt [b.txt ...] --heldout h.txt --out DIR [--vocab 4096]

Documents inside a file are separated by a form feed. Everything is written into DIR:
tokenizer.json, tokenizer_config.json, train.u16 and heldout.u16 (little-endian uint16 ids).
"""

import argparse
import json
import pathlib
import time

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# Words with their leading space, single digits, runs of punctuation, line breaks, spaces: the
# pattern of the GPT-4 and Qwen families, with one digit at a time.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_documents(paths):
    for path in paths:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        for document in text.split("\f"):
            document = document.strip("\n")
            if document:
                yield document


def train_tokenizer(documents, vocab_size, sample_bytes):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # An even share of every document, so that no single book decides the merges.
    share = max(1, sample_bytes // max(1, len(documents)))
    tokenizer.train_from_iterator((d[:share] for d in documents), trainer)
    return tokenizer


def encode(tokenizer, documents, path):
    end = tokenizer.token_to_id(END_OF_TEXT)
    started, total = time.time(), 0
    with open(path, "wb") as out:
        for start in range(0, len(documents), 8):
            for encoding in tokenizer.encode_batch(documents[start : start + 8]):
                ids = np.asarray([end] + encoding.ids, dtype="<u2")
                out.write(ids.tobytes())
                total += len(ids)
            print(f"\r{path.name}: {total / 1e6:.1f} M tokens, {time.time() - started:.0f} s", end="", flush=True)
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True, help="text files to train on")
    parser.add_argument("--heldout", nargs="+", required=True, help="text files kept for measuring")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sample-bytes", type=int, default=24_000_000, help="text that the BPE learns from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    documents = list(read_documents(args.train))
    print(f"{len(documents)} training documents; learning {args.vocab} entries", flush=True)
    tokenizer = train_tokenizer(documents, args.vocab, args.sample_bytes)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    encode(tokenizer, documents, args.out / "train.u16")
    encode(tokenizer, list(read_documents(args.heldout)), args.out / "heldout.u16")


if __name__ == "__main__":
    main()
