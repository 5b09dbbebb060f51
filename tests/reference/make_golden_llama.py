"""Writes golden/llama/: tiny random checkpoints of ordinary model families and what Hugging Face
`transformers` computes for them in fp32.

    python make_golden_llama.py

Needs torch and transformers (`pip install transformers`), which the tests do not. Each folder holds
config.json, model.safetensors and expected.safetensors:

    tokens   I32 [40]     the prompt; it crosses two borders of 16-token KV blocks
    logits   F32 [40, V]  of every position
    greedy   I32 [12]     greedy continuation of the whole prompt
"""

import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file

OUT = pathlib.Path(__file__).parent / "golden" / "llama"
LENGTH, GREEDY = 40, 12
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}
CASES = {
    # odd shapes, every bias, an epsilon that shows
    "biases": ("llama", {
        "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3,
        "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    # the older spelling of the same settings is written below
    "scaled": ("llama", {
        "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "linear": ("llama", {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "mistral": ("mistral", {
        "head_dim": 12, "num_key_value_heads": 1, "sliding_window": None, "bfloat16": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "shards": True}),
    "qwen3": ("qwen3", {"head_dim": 10, "attention_bias": True}),
    "qwen3-tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
OLD_SPELLING = ("scaled", "qwen2")


def random_model(kind, settings):
    settings = {**SHAPE, **settings}
    bfloat16 = settings.pop("bfloat16", False)
    settings.pop("shards", None)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(kind) + settings["hidden_size"])
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name:
                value.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                value.copy_(0.3 * noise)
            else:
                value.copy_(noise * (1.0 if "embed" in name else value.shape[-1] ** -0.5))
            if bfloat16:
                value.copy_(value.bfloat16().float())
    return model.eval(), bfloat16


def write_config(folder, old_spelling):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("transformers_version", None)
    if old_spelling:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type") != "default":
            config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    path = folder / "generation_config.json"
    ends = config["eos_token_id"]
    ends = [ends, ends + 3] if folder.name == "qwen3" else ends
    path.write_text(json.dumps({"eos_token_id": ends}) + "\n")


@torch.no_grad()
def expected(model):
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab, (1, LENGTH), generator=generator)
    logits = model(tokens).logits[0]
    longer = tokens
    for _ in range(GREEDY):
        best = model(longer).logits[0, -1].argmax()
        longer = torch.cat((longer, best.reshape(1, 1)), 1)
    return {
        "tokens": tokens[0].to(torch.int32),
        "logits": logits.float().contiguous(),
        "greedy": longer[0, LENGTH:].to(torch.int32).contiguous(),
    }


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    for name, (kind, settings) in CASES.items():
        model, bfloat16 = random_model(kind, settings)
        folder = OUT / name
        size = "24KB" if settings.get("shards") else "1GB"
        answers = expected(model)
        if bfloat16:
            model = model.bfloat16()
        model.save_pretrained(folder, max_shard_size=size)
        write_config(folder, name in OLD_SPELLING)
        save_file(answers, folder / "expected.safetensors")
        count = sum(p.numel() for p in model.parameters())
        print(f"{name}: {kind}, {count} parameters, {sorted(f.name for f in folder.iterdir())}")


if __name__ == "__main__":
    main()
