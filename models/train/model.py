"""The trainable NAG: a direction of unit RMS, a log-norm, and a gate before every sub-layer.

Formulas: arXiv 2606.16112, "Scaling Adaptive Depth with Norm-Agnostic Residual Networks"; equation
numbers in brackets. This file is for training (hard masks, bf16 branches, fp32 lanes); the plain
reference that decides what is right is tests/reference/nag.py.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Config:
    vocab_size: int = 4096
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    max_position_embeddings: int = 512
    qk_scale: float = 1.2
    nag_directions: int = 16

    def sublayer_flops(self):
        """FLOPs that one skip saves, (attention at the mean context, MLP): 4dq + 4qT and 6d·inner."""
        d, q = self.hidden_size, self.num_attention_heads * self.head_dim
        attention = 4 * d * q + 4 * q * self.max_position_embeddings / 2
        return attention, 6 * d * self.intermediate_size


def product_type():
    """bf16 where this CPU multiplies it; without such instructions bf16 is some 20 times slower than fp32."""
    try:
        with open("/proc/cpuinfo") as cpu:
            words = next(line for line in cpu if line.startswith(("flags", "Features"))).split()
    except (OSError, StopIteration):
        return torch.bfloat16
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16", "bf16"} & set(words) else torch.float32


PRODUCT = product_type()


def linear(x, weight):
    """Matrix product in PRODUCT, with fp32 accumulation inside the product."""
    return F.linear(x.to(PRODUCT), weight.to(PRODUCT))


class Gate(nn.Module):
    """mix, and the size g of the step that a sub-layer takes. (13), (14)"""

    def __init__(self, config, index):
        super().__init__()
        d, c = config.hidden_size, config.nag_directions
        self.directions = nn.Parameter(torch.randn(c, d) / math.sqrt(d))
        self.bias = nn.Parameter(torch.zeros(c))
        self.mix_logits = nn.Parameter(torch.zeros(c))
        self.raw_beta = nn.Parameter(torch.tensor([math.log(math.e - 1.0)]))  # softplus gives 1
        self.alpha = nn.Parameter(torch.tensor([index**-0.5]))

    def beta(self):
        return F.softplus(self.raw_beta)

    def forward(self, r):
        lanes = torch.sigmoid(F.linear(r, self.directions, self.bias))
        mix = (torch.softmax(self.mix_logits, 0) * lanes).sum(-1)
        return self.alpha * mix.clamp_min(1e-8) ** self.beta()


def step(r, s, f, g):
    """One residual step on the sphere. (10)-(12), (16), (17)"""
    d = r.shape[-1]
    f = f.float()
    f = f - f.mean(-1, keepdim=True)
    f = f - (f * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r
    u = f * (math.sqrt(d) / f.norm(dim=-1, keepdim=True).clamp_min(1e-6))
    moved = r + g.unsqueeze(-1) * u
    moved = moved * torch.rsqrt((moved * moved).mean(-1, keepdim=True))
    return moved, s + 0.5 * torch.log1p(g * g)


def causal_attention(q, k, v):
    """q, k, v and the result [batch, heads, length, head_dim]."""
    if hasattr(F, "scaled_dot_product_attention"):  # from torch 2 on
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v


def unit_rms(x):
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.config = config
        d, inner = config.hidden_size, config.intermediate_size
        q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.attn_gate = Gate(config, 2 * number + 1)
        self.mlp_gate = Gate(config, 2 * number + 2)

        def matrix(rows, columns):
            return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))

        self.q, self.k, self.v, self.o = matrix(q, d), matrix(k, d), matrix(k, d), matrix(d, q)
        self.gate, self.up, self.down = matrix(inner, d), matrix(inner, d), matrix(d, inner)

    def attention(self, r, cos, sin):
        c, (batch, length, _) = self.config, r.shape

        def heads(x, count):
            return x.view(batch, length, count, c.head_dim).transpose(1, 2)

        def rotate(x):  # RoPE on split halves, then RMS over the head, then the scale
            a, b = x.float().chunk(2, -1)
            x = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            return (unit_rms(x) * c.qk_scale).to(PRODUCT)

        q = rotate(heads(linear(r, self.q), c.num_attention_heads))
        k = rotate(heads(linear(r, self.k), c.num_key_value_heads))
        v = heads(linear(r, self.v), c.num_key_value_heads)
        group = c.num_attention_heads // c.num_key_value_heads
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = causal_attention(q, k, v)
        return linear(y.transpose(1, 2).reshape(batch, length, -1), self.o)

    def mlp(self, r):
        return linear(F.silu(linear(r, self.gate)) * linear(r, self.up), self.down)

    def forward(self, r, s, cos, sin, tau, ramp):
        """tau [batch, 1]: a sub-layer is skipped where |g| < tau. Returns r, s and |g| of both gates.

        The mask is hard; the gradient reaches the gate through the g of the steps that were kept.
        """
        sizes = []
        for gate, branch in ((self.attn_gate, lambda x: self.attention(x, cos, sin)), (self.mlp_gate, self.mlp)):
            g = gate(r)
            size = g.detach().abs()
            r, s = step(r, s, branch(r), ramp * g * (size >= tau))
            sizes.append(size)
        return r, s, sizes[0], sizes[1]


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size))
        self.log_gain = nn.Parameter(torch.tensor([math.log(10.0)]))
        self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        half = config.head_dim // 2
        rates = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), rates)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.run_block = [block.__call__ for block in self.blocks]
        self.run_start, self.run_loss = self.start, self.loss
        self.run_predict = self.log_probabilities

    def compile(self):
        self.run_block = [torch.compile(block, dynamic=False) for block in self.blocks]
        self.run_start = torch.compile(self.start, dynamic=False)
        self.run_loss = torch.compile(self.loss, dynamic=False)
        self.run_predict = torch.compile(self.log_probabilities, dynamic=False)

    def centred_embed(self):
        return self.embed - self.embed.mean(-1, keepdim=True)

    def unit_head(self):
        """Head rows centred with RMS 1. (18)"""
        head = self.head - self.head.mean(-1, keepdim=True)
        return head * torch.rsqrt((head * head).mean(-1, keepdim=True))

    def start(self, tokens):
        e = F.embedding(tokens, self.embed)
        e = e - e.mean(-1, keepdim=True)
        rho = (e * e).mean(-1, keepdim=True).sqrt()
        return e / rho, rho.squeeze(-1).log() + self.log_gain

    def logits(self, r, s):
        """Logits of the cosine_scale head. (18)"""
        return linear(r, self.unit_head()).float() * (s.exp() / r.shape[-1]).unsqueeze(-1)

    def log_probabilities(self, r, s):
        return torch.log_softmax(self.logits(r, s), -1)

    def loss(self, r, s, targets, teacher=None):
        """Losses per token: cross-entropy [batch, length], second pass [again, length], teacher [batch or 0, length].

        Sequences with targets are scored by cross-entropy, and by KL divergence from the log-probabilities of a
        teacher, [batch, length, vocabulary], where there is one. Those past them are the first ones seen
        again, and are scored by KL divergence from what the first pass predicted.
        """
        predicted = self.log_probabilities(r, s)
        first = len(targets)
        full, reduced = predicted[:first], predicted[first:]
        loss = -full.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        said = full[: len(reduced)].detach()
        again = (said.exp() * (said - reduced)).sum(-1)
        if teacher is None:
            return loss, again, loss.new_zeros(0)
        return loss, again, (teacher.exp() * (teacher - full)).sum(-1)

    @torch.no_grad()
    def predict(self, tokens):
        """Log-probabilities at full depth, [batch, length, vocabulary]."""
        r, s, _ = self.run(tokens, torch.zeros(len(tokens), 1), torch.ones(1))
        return self.run_predict(r, s)

    def forward(self, tokens, targets, tau, ramp, teacher=None):
        """Returns the losses per token and |g| per sub-layer, [2N, batch, length]."""
        r, s, sizes = self.run(tokens, tau, ramp)
        return *self.run_loss(r, s, targets, teacher), sizes

    def run(self, tokens, tau, ramp):
        """r and s after the last block, and |g| per sub-layer."""
        r, s = self.run_start(tokens)
        length = tokens.shape[1]
        sizes = []
        for run in self.run_block:
            r, s, attention, mlp = run(r, s, self.cos[:length], self.sin[:length], tau, ramp)
            sizes += [attention, mlp]
        return r, s, torch.stack(sizes)
