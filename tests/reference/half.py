"""How far the reference itself is off with its branches and its head in bf16 or f16.

    python half.py     one line per golden case and type, at full depth

State and gates stay in float32. What a backend with such weights may be off by is judged by this.
"""

import pathlib

import torch

import nag
from make_golden import CASES

GOLDEN = pathlib.Path(__file__).parent / "golden"


class Half(nag.Model):
    """The same model, with the branches and the head in `half`."""

    def __init__(self, folder, half):
        model = nag.load(folder)
        depth = {"kv_policy": model.kv_policy, "tiers": []}
        super().__init__(model.config, model.weights, depth, half)
        self.half = half
        for name in self.weights:
            if "_proj." in name or "lm_head" in name:
                self.weights[name] = self.weights[name].to(half)

    def attention(self, block, r, rows, run, position, cache):
        return super().attention(block, r.to(self.half), rows, run, position, cache).float()

    def mlp(self, block, r):
        return super().mlp(block, r.to(self.half)).float()

    def head(self, r, s):
        w = self.weights["lm_head.weight"].T
        if self.config.head == "cosine_scale":
            return s.exp().unsqueeze(-1) / self.config.hidden * (r.to(self.half) @ w).float()
        return ((self.unit(r) * self.weights["model.norm.weight"]).to(self.half) @ w).float()


def main():
    for name in CASES:
        expected = nag.read_safetensors(GOLDEN / name / "expected.safetensors")
        want = expected["logits.full"]
        for half in (torch.bfloat16, torch.float16):
            off = Half(GOLDEN / name, half).forward(expected["tokens"]).logits - want
            rows = off.norm(dim=-1) / want.norm(dim=-1)
            print(f"{name:16}{str(half)[6:]:10}all {off.norm() / want.norm():.4f}", end="  ")
            print(f"worst row {rows.max():.4f} ({rows.argmax()})")


if __name__ == "__main__":
    main()
