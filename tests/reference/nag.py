"""The reference: a NAG model with per-token skip decisions in plain PyTorch, one line per formula.

    python nag.py --perplexity FOLDER TEXT [--window 512] [--max-tokens N] [--tier full]

Everything else that computes this model (the CPU and CUDA kernels, the trainer) is compared with
this file. It is written to be read, not to be fast: every row runs every branch and is then masked,
or, with gather=True, only the running rows do; both must agree. Formulas: arXiv 2606.16112,
equation numbers in brackets. Shapes: T rows, d hidden, N blocks, 2N sub-layers, C directions,
H query heads, G key/value heads, D head size, S cached positions, V vocabulary. The conventions
that the paper leaves open are listed in README.md. Needs torch (1.13 or newer) and numpy.
"""

import argparse
import json
import math
import pathlib
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

NORM_EPSILON = 1e-6  # under the root of the Q/K norm and of the final RMSNorm; floor of ||f_perp||

# ---- Files --------------------------------------------------------------------------------------

DTYPES = {
    "F64": (torch.float64, "<f8"),
    "F32": (torch.float32, "<f4"),
    "F16": (torch.float16, "<f2"),
    "I64": (torch.int64, "<i8"),
    "I32": (torch.int32, "<i4"),
    "U8": (torch.uint8, "|u1"),
}


def read_safetensors(path):
    """All tensors of a file, in the type they are stored in."""
    raw = pathlib.Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        first, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            bits = np.frombuffer(raw[first:end], "<u2").astype(np.uint32) << 16
            tensor = torch.from_numpy(bits.view(np.float32)).bfloat16()
        else:
            values = np.frombuffer(raw[first:end], DTYPES[entry["dtype"]][1])
            tensor = torch.from_numpy(values.copy())
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors, metadata=None):
    names = {dtype: name for name, (dtype, _) in DTYPES.items()}
    header, blobs, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        if tensor.dtype == torch.bfloat16:
            kind, blob = "BF16", tensor.view(torch.int16).numpy().astype("<i2").tobytes()
        else:
            kind = names[tensor.dtype]
            blob = tensor.numpy().astype(DTYPES[kind][1]).tobytes()
        span = [offset, offset + len(blob)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": span}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def read_weights(folder):
    """Tensors of model.safetensors, or of the shards that the index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    tensors = {}
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        tensors.update(read_safetensors(folder / shard))
    return tensors


class Config:
    """config.json, with the defaults resolved."""

    def __init__(self, values):
        if values.get("model_type") != "nag":
            raise ValueError(f"model_type is {values.get('model_type')!r}, not 'nag'")
        self.vocab = values["vocab_size"]
        self.hidden = values["hidden_size"]
        self.blocks = values["num_hidden_layers"]
        self.heads = values["num_attention_heads"]
        self.kv_heads = values.get("num_key_value_heads", self.heads)
        self.head_size = values.get("head_dim", self.hidden // self.heads)
        self.inner = values["intermediate_size"]
        self.directions = values["nag_directions"]
        self.rope_theta = values.get("rope_theta", 10000.0)
        self.qk_scale = values.get("qk_scale", 1.0)
        self.act = one_of("hidden_act", values.get("hidden_act", "silu"), "silu", "relu2", "gelu")
        self.qk_norm = one_of(
            "qk_norm", values.get("qk_norm", "none"), "none", "before_rope", "after_rope"
        )
        self.head = one_of(
            "nag_head", values.get("nag_head", "cosine_scale"), "cosine_scale", "rmsnorm"
        )


def one_of(key, value, *allowed):
    """An unknown setting would change outputs silently."""
    if value not in allowed:
        raise ValueError(f"{key} is {value!r}, not one of {allowed}")
    return value


def load(folder, dtype=torch.float32):
    """The model of a checkpoint folder; all arithmetic is in `dtype`, float32 or float64."""
    folder = pathlib.Path(folder)
    config = Config(json.loads((folder / "config.json").read_text()))
    depth = {"kv_policy": "compute", "tiers": [], "default": "full"}
    if (folder / "depth.json").exists():
        depth = json.loads((folder / "depth.json").read_text())
    weights = {name: tensor.to(dtype) for name, tensor in read_weights(folder).items()}
    return Model(config, weights, depth, dtype)


# ---- The residual stream, in both forms ---------------------------------------------------------


def rms(x):
    return x.pow(2).mean(-1, keepdim=True).sqrt()


def divide(x, norm):
    """x / norm; a row of zeros stays one."""
    return torch.where(norm > 0, x / torch.where(norm > 0, norm, torch.ones_like(norm)), x)


class Lane:
    """What is implemented: a direction r of RMS 1 and a log-norm s."""

    def __init__(self, e, log_gain):
        rho = rms(e)
        self.r = divide(e, rho)
        self.s = torch.where(rho > 0, rho, torch.ones_like(rho)).log().squeeze(-1) + log_gain

    def step(self, run, g, u):
        moved = self.r + g.unsqueeze(-1) * u
        self.r = torch.where(run.unsqueeze(-1), divide(moved, rms(moved)), self.r)  # (16)
        self.s = torch.where(run, self.s + 0.5 * torch.log1p(g * g), self.s)  # (17)


class Additive:
    """The oracle: R' = R + rho g u (14), with R = rho r and rho = exp(s)."""

    def __init__(self, e, log_gain):
        self.R = e * log_gain.exp()

    @property
    def r(self):
        return divide(self.R, rms(self.R))

    @property
    def s(self):
        return rms(self.R).log().squeeze(-1)

    def step(self, run, g, u):
        g = torch.where(run, g, torch.zeros_like(g))
        self.R = self.R + rms(self.R) * g.unsqueeze(-1) * u


# ---- The model ----------------------------------------------------------------------------------


class Cache:
    """K and V of the positions seen so far, and per block which of them are present (kv_policy)."""

    def __init__(self, config, dtype):
        empty = torch.zeros(0, config.kv_heads, config.head_size, dtype=dtype)
        self.k = [empty] * config.blocks
        self.v = [empty] * config.blocks
        self.present = [torch.zeros(0, dtype=torch.bool)] * config.blocks
        self.length = 0


class Step(NamedTuple):
    """One sub-layer, for those who look inside: r before it, and what was added to it."""

    r: torch.Tensor  # [T, d]
    s: torch.Tensor  # [T]
    g: torch.Tensor  # [T], also where the row did not run
    u: torch.Tensor  # [T, d], zero where the row was not computed


class Result(NamedTuple):
    logits: torch.Tensor  # [T, V]
    mix: torch.Tensor  # [2N, T]
    run: torch.Tensor  # [2N, T] bool
    s: torch.Tensor  # [T], after the last sub-layer
    r: torch.Tensor  # [T, d], after the last sub-layer
    steps: list  # 2N of Step; empty without trace


class Model:
    def __init__(self, config, weights, depth, dtype):
        self.config, self.weights, self.dtype = config, weights, dtype
        self.kv_policy = one_of("kv_policy", depth["kv_policy"], "compute", "omit")
        self.tiers = {"full": [0.0] * (2 * config.blocks)}
        self.tiers.update({tier["name"]: tier["theta"] for tier in depth["tiers"]})
        self.default_tier = depth.get("default", "full")

    def new_cache(self):
        return Cache(self.config, self.dtype)

    @torch.no_grad()
    def forward(
        self, tokens, theta="full", cache=None, *, trace=False, additive=False, gather=False
    ):
        """Logits of every row, and the decisions on the way.

        theta: a tier's name, 2N thresholds, or None for a dense model that decides nothing.
        cache: the positions before `tokens`; extended by them. Without one they start at 0.
        additive: keep R instead of (r, s).  gather: compute branches for running rows only.
        """
        theta = self.thresholds(theta)
        cache = cache or self.new_cache()
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        position = cache.length + torch.arange(len(tokens))
        e = self.weights["model.embed_tokens.weight"][tokens]
        lane = (Additive if additive else Lane)(e, self.weights["model.log_gain"])
        mixes, runs, steps = [], [], []
        for sublayer in range(2 * self.config.blocks):
            block, kind = sublayer // 2, ("attn", "mlp")[sublayer % 2]
            gate = f"model.layers.{block}.{kind}_nag."
            r, s = lane.r, lane.s
            mix = self.mix(gate, r)
            run = ~(mix < (-math.inf if theta is None else theta[sublayer]))
            g = self.weights[gate + "alpha"] * mix ** self.weights[gate + "beta"]  # (14)
            rows = run.nonzero().squeeze(-1) if gather else torch.arange(len(tokens))
            if kind == "attn":
                f = self.attention(block, r, rows, run, position, cache)
            else:
                f = self.mlp(block, r[rows])
            u = torch.zeros_like(r).index_copy(0, rows, self.direction(f, r[rows]))
            lane.step(run, g, u)
            mixes.append(mix)
            runs.append(run)
            if trace:
                steps.append(Step(r, s, g, u))
        cache.length += len(tokens)
        logits = self.head(lane.r, lane.s)
        return Result(logits, torch.stack(mixes), torch.stack(runs), lane.s, lane.r, steps)

    def generate(self, prompt, count, theta="full"):
        """Greedy continuation, one row at a time; the lowest id wins among equals."""
        cache, out, rows = self.new_cache(), [], list(prompt)
        for _ in range(count):
            logits = self.forward(rows, theta, cache).logits[-1]
            rows = [int((logits == logits.max()).nonzero()[0])]
            out += rows
        return out

    def thresholds(self, theta):
        if theta is None:
            return None
        if isinstance(theta, str):
            theta = self.tiers[theta]
        if len(theta) != 2 * self.config.blocks:
            raise ValueError(f"{len(theta)} thresholds for {2 * self.config.blocks} sub-layers")
        return theta

    def mix(self, gate, r):
        """sum_c p_c sigmoid(<w_c, r> + b_c), p = softmax(mix_logits). (13) -> [T]"""
        w = self.weights
        lanes = torch.sigmoid(r @ w[gate + "directions.weight"].T + w[gate + "directions.bias"])
        return lanes @ torch.softmax(w[gate + "mix_logits"], 0)

    @staticmethod
    def direction(f, r):
        """The branch's output, centred, without its part along r, at RMS 1. (10), (11), (12)"""
        f = f - f.mean(-1, keepdim=True)
        along = (f * r).sum(-1, keepdim=True)
        perpendicular = f - divide(along, (r * r).sum(-1, keepdim=True)) * r
        norm = perpendicular.norm(dim=-1, keepdim=True)
        return math.sqrt(r.shape[-1]) * perpendicular / norm.clamp_min(NORM_EPSILON)

    def attention(self, block, r, rows, run, position, cache):
        """Causal attention of `rows`; K and V of all rows go into the cache. -> [rows, d]"""
        w, D = f"model.layers.{block}.self_attn.", self.config.head_size
        q, k, v = (self.project(w, name, x) for name, x in (("q", r[rows]), ("k", r), ("v", r)))
        present = run if self.kv_policy == "omit" else torch.ones_like(run)
        cache.k[block] = torch.cat([cache.k[block], self.rotate(k, position)])
        cache.v[block] = torch.cat([cache.v[block], v])
        cache.present[block] = torch.cat([cache.present[block], present])
        share = self.config.heads // self.config.kv_heads  # query heads of one key/value head
        k = cache.k[block].repeat_interleave(share, 1)  # [S, H, D]
        v = cache.v[block].repeat_interleave(share, 1)
        scores = torch.einsum("thd,shd->hts", self.rotate(q, position[rows]), k) / math.sqrt(D)
        at, own = torch.arange(len(k)), position[rows].unsqueeze(-1)
        # A row that does not run still sees itself here, which keeps its unused softmax finite.
        visible = ((at < own) & cache.present[block]) | (at == own)  # [rows, S]
        probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
        out = torch.einsum("hts,shd->thd", probabilities, v).flatten(1)
        return out @ self.weights[w + "o_proj.weight"].T

    def project(self, prefix, name, x):
        y = x @ self.weights[f"{prefix}{name}_proj.weight"].T
        return y.unflatten(-1, (-1, self.config.head_size))

    def rotate(self, x, position):
        """Q/K norm, RoPE on split halves, and the scale of q and k each; x [T, heads, D]."""
        half = x.shape[-1] // 2
        if self.config.qk_norm == "before_rope":
            x = self.unit(x)
        frequency = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = position.double().unsqueeze(-1) * frequency
        cos, sin = (f.to(self.dtype).unsqueeze(1) for f in (angle.cos(), angle.sin()))
        x1, x2 = x[..., :half], x[..., half:]
        x = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
        if self.config.qk_norm == "after_rope":
            x = self.unit(x)
        return x * self.config.qk_scale

    @staticmethod
    def unit(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + NORM_EPSILON).sqrt()

    def mlp(self, block, r):
        w = f"model.layers.{block}.mlp."
        up = r @ self.weights[w + "up_proj.weight"].T
        if self.config.act == "silu":
            h = F.silu(r @ self.weights[w + "gate_proj.weight"].T) * up
        elif self.config.act == "relu2":
            h = F.relu(up) ** 2
        else:
            h = F.gelu(up)  # the erf form
        return h @ self.weights[w + "down_proj.weight"].T

    def head(self, r, s):
        if self.config.head == "cosine_scale":  # (18)
            scale = s.exp().unsqueeze(-1) / self.config.hidden
            return scale * (r @ self.weights["lm_head.weight"].T)
        return (self.unit(r) * self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T


# ---- Perplexity ---------------------------------------------------------------------------------


def perplexity(model, tokens, window, theta="full"):
    """Independent windows; the first token of each is not predicted.

    -> tokens predicted, perplexity, share of skipped attention sub-layers, share of skipped MLPs
    """
    loss, predicted, rows, skipped = 0.0, 0, 0, torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(tokens), window):
        part = torch.as_tensor(tokens[start : start + window], dtype=torch.int64)
        result = model.forward(part, theta)
        loss += F.cross_entropy(result.logits[:-1], part[1:], reduction="sum").item()
        predicted += len(part) - 1
        rows += len(part)
        skipped += (~result.run).reshape(-1, 2, len(part)).sum((0, 2))
    attn, mlp = (skipped / (rows * model.config.blocks)).tolist()
    return predicted, math.exp(loss / max(predicted, 1)), attn, mlp


def read_tokens(folder, text):
    """Ids of a text file by the folder's tokenizer; a file *.u16 holds ids already."""
    if text.suffix == ".u16":
        return np.fromfile(text, dtype="<u2").astype(np.int64)
    from tokenizers import Tokenizer  # only needed here

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids


def main():
    parser = argparse.ArgumentParser(description="Perplexity of a text by the reference model.")
    add = parser.add_argument
    add("--perplexity", nargs=2, type=pathlib.Path, metavar=("FOLDER", "TEXT"), required=True)
    add("--window", type=int, default=512, help="tokens of one independent window")
    add("--max-tokens", type=int, default=0, help="first tokens of the text to use; 0: all")
    add("--tier", help="default: the checkpoint's")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--threads", type=int, default=0, help="0: torch's default")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder, text = args.perplexity
    model = load(folder, getattr(torch, args.dtype))
    tokens = read_tokens(folder, text)[: args.max_tokens or None]
    tier = args.tier or model.default_tier
    predicted, value, attn, mlp = perplexity(model, tokens, args.window, tier)
    print(f"tier {tier}  predicted {predicted}  perplexity {value:.6f}", end="")
    print(f"  attn_skip {attn:.4f}  mlp_skip {mlp:.4f}")


if __name__ == "__main__":
    main()
