"""Writes the golden files: small random checkpoints and what the reference computes for them.

    python make_golden.py                                  all of golden/ (the files are committed)
    python make_golden.py --model FOLDER [--tokenizer FILE]   golden/NAME/expected.safetensors alone

What the files hold is written in README.md. Everything is computed in float64 from the weights as
they are stored, and saved as float32. The thresholds of the tier "half" lie in gaps between the
mixes that occur, so that float32 arithmetic takes the same decisions.
"""

import argparse
import json
import math
import pathlib
import shutil

import torch

import nag

HERE = pathlib.Path(__file__).parent
LENGTH = 40  # crosses two borders of 16-token KV blocks
GREEDY = 12  # tokens of the greedy continuation

# Together the cases cover every setting. `types` are the matrices' and the gates' types on disk.
SMALL = {
    "vocab": 64, "hidden": 32, "blocks": 2, "heads": 4, "kv_heads": 4, "head_size": 8, "inner": 48,
}
CASES = {
    "mha-silu": {**SMALL, "directions": 16},
    "gqa-relu2": {
        **SMALL, "vocab": 96, "hidden": 48, "blocks": 3, "heads": 6, "kv_heads": 2, "inner": 80,
        "act": "relu2", "qk_norm": "after_rope", "qk_scale": 1.2, "rope_theta": 100000.0,
        "directions": 32, "types": ("BF16", "BF16"),
    },
    "mqa-gelu-omit": {
        **SMALL, "vocab": 80, "hidden": 40, "blocks": 3, "kv_heads": 1, "head_size": 16,
        "inner": 64, "act": "gelu", "qk_norm": "before_rope", "qk_scale": 0.9, "head": "rmsnorm",
        "directions": 1, "types": ("F16", "F16"), "kv_policy": "omit",
    },
    "sharded-omit": {
        **SMALL, "vocab": 72, "hidden": 36, "blocks": 4, "kv_heads": 2, "head_size": 12,
        "qk_norm": "after_rope", "qk_scale": 1.5, "directions": 16, "types": ("BF16", "F32"),
        "kv_policy": "omit", "shards": 3,
    },
    "odd-shapes": {
        **SMALL, "vocab": 67, "hidden": 37, "heads": 3, "kv_heads": 1, "head_size": 10,
        "inner": 53, "qk_norm": "before_rope", "head": "rmsnorm", "directions": 5,
        "rope_theta": 500.0,
    },
    "with-tokenizer": {
        **SMALL, "vocab": 300, "kv_heads": 1, "qk_norm": "after_rope", "qk_scale": 1.2,
        "directions": 16, "types": ("BF16", "F32"), "tokenizer": True,
    },
    "no-depth": {
        **SMALL, "act": "relu2", "qk_norm": "before_rope", "directions": 1, "depth": False,
    },
}
DEFAULTS = {
    "act": "silu", "qk_norm": "none", "qk_scale": 1.0, "rope_theta": 10000.0,
    "head": "cosine_scale", "types": ("F32", "F32"), "kv_policy": "compute", "shards": 0,
    "tokenizer": False, "depth": True,
}
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def config_json(case):
    special = {"bos_token_id": 0, "eos_token_id": 0} if case["tokenizer"] else {}
    return {
        "architectures": ["NagForCausalLM"],
        "model_type": "nag",
        "vocab_size": case["vocab"],
        "hidden_size": case["hidden"],
        "num_hidden_layers": case["blocks"],
        "num_attention_heads": case["heads"],
        "num_key_value_heads": case["kv_heads"],
        "head_dim": case["head_size"],
        "intermediate_size": case["inner"],
        "hidden_act": case["act"],
        "rope_theta": case["rope_theta"],
        "max_position_embeddings": 128,
        "qk_norm": case["qk_norm"],
        "qk_scale": case["qk_scale"],
        "nag_directions": case["directions"],
        "nag_head": case["head"],
        **special,
    }


# ---- A random checkpoint ------------------------------------------------------------------------


def random_weights(case, generator):
    """Gates far enough from their middle that mix spreads over (0, 1); matrices that keep RMS 1."""

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)

    def matrix(rows, columns):
        return normal(rows, columns, scale=columns**-0.5)

    d, count = case["hidden"], case["directions"]
    q, k = case["heads"] * case["head_size"], case["kv_heads"] * case["head_size"]
    weights = {
        "model.embed_tokens.weight": centred(normal(case["vocab"], d, scale=0.7)),
        "model.log_gain": torch.tensor([math.log(4.0)]),
        "lm_head.weight": normal(case["vocab"], d),
    }
    if case["head"] == "cosine_scale":
        head = centred(weights["lm_head.weight"])
        weights["lm_head.weight"] = head / nag.rms(head)
    else:
        weights["model.norm.weight"] = 1 + normal(d, scale=0.2)
        weights["lm_head.weight"] /= math.sqrt(d) / 3
    for block in range(case["blocks"]):
        layer = f"model.layers.{block}."
        for name, rows, columns in (("q", q, d), ("k", k, d), ("v", k, d), ("o", d, q)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, columns)
        if case["act"] == "silu":
            weights[layer + "mlp.gate_proj.weight"] = matrix(case["inner"], d)
        weights[layer + "mlp.up_proj.weight"] = matrix(case["inner"], d)
        weights[layer + "mlp.down_proj.weight"] = matrix(d, case["inner"])
        for number, kind in enumerate(("attn", "mlp")):
            gate, sign = f"{layer}{kind}_nag.", (-1) ** (block + number)
            common = normal(1, d)  # what the lanes share keeps their mean from settling at 1/2
            weights[gate + "directions.weight"] = (1.5 * common + normal(count, d)) / math.sqrt(d)
            weights[gate + "directions.bias"] = normal(count, scale=0.5)
            weights[gate + "mix_logits"] = normal(count)
            weights[gate + "beta"] = (0.3 * normal(1)).exp()
            weights[gate + "alpha"] = sign * (0.6 + normal(1, scale=0.1).abs())
    return weights


def centred(rows):
    return rows - rows.mean(-1, keepdim=True)


def write_checkpoint(folder, case, weights):
    matrices, gates = (TYPES[name] for name in case["types"])
    stored = {
        name: tensor.to(gates if "_nag." in name or tensor.dim() == 1 else matrices)
        for name, tensor in weights.items()
    }
    write_json(folder / "config.json", config_json(case))
    if not case["shards"]:
        nag.write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
        return
    files, total = {}, case["shards"]
    for place, name in enumerate(sorted(stored)):
        files[name] = f"model-{1 + place * total // len(stored):05}-of-{total:05}.safetensors"
    for file in sorted(set(files.values())):
        part = {name: stored[name] for name in stored if files[name] == file}
        nag.write_safetensors(folder / file, part, {"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, size):
    """A byte-level BPE of `size` entries: the end of text, the 256 bytes, and merges of letters."""
    # The usual map of bytes to characters: those that are printable stay what they are.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    symbols = {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(moved)}}
    vocabulary = ["<|endoftext|>"] + [symbols[byte] for byte in range(256)]
    space = symbols[32]
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("l", "l"), ("e", "d"), ("o", "u")]
    merges += [(space, letter) for letter in "tasiwchbofmd"]
    merges += [(vowel, letter) for vowel in "aeiou" for letter in "nrstl"]
    merges = merges[: size - len(vocabulary)]
    vocabulary += ["".join(pair) for pair in merges]
    assert len(vocabulary) == len(set(vocabulary)) == size
    levels = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True,
    }
    special = {
        "id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False, "special": True,
    }
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {text: number for number, text in enumerate(vocabulary)},
        "merges": [" ".join(pair) for pair in merges],
    }
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
        "normalizer": None, "pre_tokenizer": levels, "post_processor": None, "decoder": levels,
        "model": model,
    })
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>", "add_bos_token": False,
    })


def half_thresholds(model, tokens):
    """Thresholds that skip about half of the rows, one sub-layer after the other: each changes what
    the later ones see. The middle of the widest gap between the sorted mixes is far from every mix.
    """
    theta = [0.0] * (2 * model.config.blocks)
    for sublayer in range(len(theta)):
        mix = model.forward(tokens, theta).mix[sublayer].unique()  # sorted
        first, end = len(mix) // 3, 2 * len(mix) // 3
        gaps = mix[first + 1 : end + 1] - mix[first:end]
        widest = first + int(gaps.argmax())
        theta[sublayer] = float((0.5 * (mix[widest] + mix[widest + 1])).float())
    return theta


def depth_json(case, theta):
    def tier(name, skip, thresholds):
        return {"name": name, "target_skip": skip, "theta": thresholds}

    tiers = [
        tier("full", 0.0, [0.0] * len(theta)),
        tier("half", 0.5, theta),
        tier("none", 1.0, [1.5] * len(theta)),
    ]
    return {"format": 1, "kv_policy": case["kv_policy"], "tiers": tiers, "default": "full"}


def make_case(folder, case, seed):
    case = {**DEFAULTS, **case}
    generator = torch.Generator().manual_seed(seed)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_checkpoint(folder, case, random_weights(case, generator))
    if case["tokenizer"]:
        write_tokenizer(folder, case["vocab"])
    model = nag.load(folder, torch.float64)
    tokens = torch.randint(1, case["vocab"], (LENGTH,), generator=generator)
    if case["depth"]:
        model.kv_policy = case["kv_policy"]  # depth.json, which says so, is made here
        write_json(folder / "depth.json", depth_json(case, half_thresholds(model, tokens)))
        model = nag.load(folder, torch.float64)
    expected = {"tokens": tokens.int()}
    for tier in model.tiers:
        result = model.forward(tokens, tier)
        expected[f"logits.{tier}"] = result.logits.float()
        expected[f"mix.{tier}"] = result.mix.float()
        expected[f"run.{tier}"] = result.run.to(torch.uint8)
        expected[f"s.{tier}"] = result.s.float()
        expected[f"greedy.{tier}"] = torch.tensor(model.generate(tokens, GREEDY, tier)).int()
        report(folder.name, tier, model, result)
    nag.write_safetensors(folder / "expected.safetensors", expected)


def report(name, tier, model, result):
    margin = margins(model, tier, result).min().item()
    skip = 1 - result.run.double()
    print(
        f"{name:16} {tier:9} attn_skip {skip[0::2].mean():.2f}  mlp_skip {skip[1::2].mean():.2f}"
        f"  least |mix - theta| {margin:.1e}"
    )


def margins(model, tier, result):
    """Least distance of a row's mix to a threshold: what a decision can bear. -> [T]"""
    theta = torch.tensor(model.tiers[tier], dtype=torch.float64).unsqueeze(-1)
    return (result.mix - theta).abs().amin(0)


# ---- What a real checkpoint computes ------------------------------------------------------------

PROMPTS = (
    "The captain had been at sea for thirty years, and in all that time he had never once"
    " trusted a calm morning. He stood by the rail with his glass and looked to the west,"
    ' where the sky was the colour of old silver. "It will blow before night," he said. '
    "The mate, who was a young man and wished to please, answered that the wind had been "
    "fair since Tuesday. The captain did not turn round. He had learned to measure the "
    "depth of the water before he praised the weather, and he called for the lead and the"
    ' line. "By the mark, seven," cried the sailor at the bow, and then, a little later, '
    '"By the deep, four!"',
    "A fathom is a measure of depth: six feet, or the length of rope between the two "
    "hands of a man who holds his arms out wide. To fathom a thing is therefore to "
    "embrace it, and only afterwards to know how deep it is. In the year 1872 the ship "
    "Challenger sailed with 144 miles of rope on board; she sounded the ocean at 362 "
    "places, and at one of them the weight fell for more than an hour before it touched "
    "the ground. What lives there? Nobody could say. The sailors, who had to wind the "
    "rope in again by hand and by steam, did not ask; but the naturalists sat up all "
    "night with a lamp and a bucket of cold mud.",
)
PROMPT_LENGTH = 96
LAST = 8  # positions whose logits are kept whole
BEST = 8  # best tokens of the other positions


def make_model_golden(source, tokenizer_file):
    """Two prompts at every tier; of the windows of a text, the one with the widest margin."""
    from tokenizers import Tokenizer

    model = nag.load(source, torch.float64)
    tokenizer = Tokenizer.from_file(str(tokenizer_file or source / "tokenizer.json"))
    expected = {}
    for number, prompt in enumerate(PROMPTS):
        tokens = widest_window(model, tokenizer.encode(prompt, add_special_tokens=False).ids)
        expected[f"tokens.{number}"] = torch.tensor(tokens).int()
        for tier in model.tiers:
            result, key = model.forward(tokens, tier), f"{tier}.{number}"
            best = result.logits.topk(BEST)
            expected[f"logits.{key}"] = result.logits[-LAST:].float()
            expected[f"best_logits.{key}"] = best.values.float()
            expected[f"best_tokens.{key}"] = best.indices.int()
            expected[f"mix.{key}"] = result.mix.float()
            expected[f"run.{key}"] = result.run.to(torch.uint8)
            expected[f"s.{key}"] = result.s.float()
            expected[f"greedy.{key}"] = torch.tensor(model.generate(tokens, GREEDY, tier)).int()
            report(f"{source.name}.{number}", tier, model, result)
    folder = HERE / "golden" / source.name
    folder.mkdir(parents=True, exist_ok=True)
    nag.write_safetensors(folder / "expected.safetensors", expected)


def widest_window(model, ids):
    if len(ids) < PROMPT_LENGTH:
        raise SystemExit(f"the prompt has {len(ids)} tokens, fewer than {PROMPT_LENGTH}")
    starts = range(min(16, len(ids) - PROMPT_LENGTH + 1))
    tiers = [tier for tier in model.tiers if tier != "full"]

    def margin(window):
        rows = (margins(model, tier, model.forward(window, tier)) for tier in tiers)
        return min((row.min().item() for row in rows), default=1.0)

    return max((ids[start : start + PROMPT_LENGTH] for start in starts), key=margin)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="folder, such as models/fathom-tiny")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="default: the model's")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model:
        make_model_golden(args.model.resolve(), args.tokenizer)
        return
    for seed, (name, case) in enumerate(CASES.items()):
        make_case(HERE / "golden" / name, case, seed)


if __name__ == "__main__":
    main()
