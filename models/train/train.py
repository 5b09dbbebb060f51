"""Trains a NAG with skipping on. Resumes by itself from OUT/last.pt.

    python train.py --data DIR --out DENSE --again ""
    python train.py --data DIR --out OUT --teacher DENSE/last.pt [--tokens 12000000] [--again 0.25,0.4]

DIR comes from prepare.py. Every sequence of a batch is seen at full depth and scored by cross-entropy, and
against what a teacher predicts where there is one. The first ones are seen once more with skipping, one
per rate of --again, and scored against what the first pass predicted. A sub-layer is skipped for a token
where |g| is below a global tau per rate, and tau follows the rate that was reached, weighted by the FLOPs
that each skip saves.

`--again ""` trains without skipping. Such a network is what full depth is compared with, and as --teacher
it makes up for what skipping costs: full depth then learns from its predictions too.

`torchrun --nproc_per_node N train.py ... --threads 1` splits every batch among N processes: the same
training, faster than N threads of one process.
"""

import argparse
import json
import math
import os
import pathlib
import pickle
import time

import numpy as np
import torch
import torch.distributed as dist

from model import Config, Model

EVAL_RATES = (0.0, 0.10, 0.25, 0.40)
TORCH_2 = hasattr(torch, "compile")  # it also reads a file without running what a pickle may say


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=float, default=12e6, help="training tokens in all")
    parser.add_argument("--stop-at", type=float, default=0, help="stop early after this many tokens")
    parser.add_argument("--rates", default="0", help="skip rates of the first pass, for each sequence or repeated")
    parser.add_argument("--again", default="0.25,0.4", help="rates at which a batch's first sequences are seen once more")
    parser.add_argument("--again-weight", default="2", help="of their loss, for each or one for all; the first pass has 1")
    parser.add_argument("--teacher", type=pathlib.Path, help="last.pt of a finished run with --again ''")
    parser.add_argument("--teacher-share", type=float, default=0.75, help="of the first pass' loss, 0 to 1; falls with --lr")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="matrices; tables get twice, gates half of it")
    parser.add_argument("--decay", type=float, default=0.3, help="last share of training: rate falls to zero")
    parser.add_argument("--skip-from", type=int, default=500, help="full depth until this step, at least 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if not 0 <= args.teacher_share <= 1:
        parser.error(f"--teacher-share is {args.teacher_share}; it goes from 0 to 1")
    if args.skip_from < 1:
        parser.error(f"--skip-from is {args.skip_from}; the first step has no thresholds yet")
    return args


def load(path):
    """What a last.pt holds."""
    return torch.load(path, map_location="cpu", weights_only=TORCH_2)


def load_teacher(path, config):
    """The network of a run without skipping, over the same tokens and windows."""
    try:
        state = load(path)
        for name, value in {"config": vars(config), "tau": {}}.items():
            if state[name] != value:
                raise ValueError(f"its {name} is {state[name]}, this run's {value}")
        teacher = Model(config)
        teacher.load_state_dict(state["model"])
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise SystemExit(f"--teacher {path} is no last.pt of a run with --again '' like this one: {error}") from None
    return teacher


def gather(values):
    """The lists of all processes, one after the other."""
    if not dist.is_initialized():
        return values
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, values)
    return [value for one in lists for value in one]


def add_gradients(model):
    """The sum over all processes, in one message."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


class Windows:
    """Non-overlapping windows of the token file, in an order fixed by the seed."""

    def __init__(self, path, length, seed=None):
        self.tokens = np.fromfile(path, dtype="<u2")
        self.length = length
        count = (len(self.tokens) - 1) // length
        self.order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)

    def batch(self, start, size):
        rows = [self.order[i % len(self.order)] * self.length for i in range(start, start + size)]
        block = np.stack([self.tokens[r : r + self.length + 1] for r in rows]).astype(np.int64)
        block = torch.from_numpy(block)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


class Thresholds:
    """One tau per skip rate; tau follows the achieved rate, weighted by FLOPs saved."""

    def __init__(self, config):
        attention, mlp = config.sublayer_flops()
        weights = np.array([attention, mlp] * config.num_hidden_layers)
        self.weights = weights / weights.sum()
        self.tau = {}

    def start(self, sizes, rates):
        """Quantiles of |g| over a batch; sizes [2N, batch, length]."""
        flat = sizes.reshape(sizes.shape[0], -1).numpy()
        weight = np.repeat(self.weights[:, None] / flat.shape[1], flat.shape[1], 1).ravel()
        order = np.argsort(flat.ravel())
        total = np.cumsum(weight[order])
        for rate in sorted(set(rates)):
            if rate > 0:
                index = min(int(np.searchsorted(total, rate)), len(order) - 1)
                self.tau[rate] = float(np.mean(gather([float(flat.ravel()[order][index])])))

    def column(self, rates):
        return torch.tensor([[self.tau.get(rate, 0.0)] for rate in rates])

    def achieved(self, sizes, tau):
        """Share of FLOPs skipped, per sequence."""
        skipped = (sizes < tau).float().mean(-1).numpy()  # [2N, batch]
        return self.weights @ skipped

    def follow(self, sizes, rates, tau):
        got = gather(list(zip(rates, self.achieved(sizes, tau))))
        for rate in self.tau:
            mine = [share for r, share in got if r == rate]
            if mine:
                self.tau[rate] *= math.exp(0.3 * (rate - float(np.mean(mine))))


def make_optimizer(model, lr):
    matrices, tables, gates = [], [], []
    for name, parameter in model.named_parameters():
        if "_gate." in name or name == "log_gain":
            gates.append(parameter)
        elif name in ("embed", "head"):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "base": lr, "weight_decay": 0.1},
        {"params": tables, "base": 2 * lr, "weight_decay": 0.0},
        {"params": gates, "base": lr / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.97), eps=1e-10, foreach=True)


@torch.no_grad()
def evaluate(model, windows, thresholds, batch, batches=8):
    """Perplexity, achieved skip and share of tokens that skip each sub-layer, per rate."""
    result = {}
    for rate in EVAL_RATES:
        if rate > 0 and rate not in thresholds.tau:
            continue
        tau = thresholds.column([rate] * batch)
        losses, skips, shares = [], [], []
        for b in range(batches):
            loss, _, _, sizes = model(*windows.batch(b * batch * 2, batch), tau, torch.ones(1))
            losses.append(loss.mean().item())
            skips.append(float(thresholds.achieved(sizes, tau).mean()))
            shares.append((sizes < tau).float().mean((1, 2)).numpy())
        share = np.mean(shares, 0)
        result[f"{rate:.2f}"] = {
            "perplexity": math.exp(float(np.mean(losses))),
            "skip": float(np.mean(skips)),
            "attn": [round(float(x), 3) for x in share[0::2]],
            "mlp": [round(float(x), 3) for x in share[1::2]],
        }
    return result


def main():
    args = parse_arguments()
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    rates = [float(x) for x in args.rates.split(",")]
    rates = (rates * args.batch)[: args.batch]
    again = [float(x) for x in args.again.split(",") if x]
    weights = [float(x) for x in args.again_weight.split(",")]
    weights = torch.tensor((weights * len(again))[: len(again)])
    every_rate = rates + again
    rates, again, weights = (x[rank::processes] for x in (rates, again, weights))
    config = Config(max_position_embeddings=args.length)
    model = Model(config)
    optimizer = make_optimizer(model, args.lr)
    thresholds = Thresholds(config)
    train = Windows(args.data / "train.u16", args.length, args.seed)
    heldout = Windows(args.data / "heldout.u16", args.length)
    per_step = args.batch * args.length
    steps = math.ceil(args.tokens / per_step)
    stop = min(steps, math.ceil((args.stop_at or args.tokens) / per_step))
    first, average = 0, None
    last = args.out / "last.pt"
    if last.exists():
        state = load(last)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        thresholds.tau, first, average = state["tau"], state["step"], state["average"]
        print(f"resumed at step {first}", flush=True)
    missing = set(every_rate) - {0.0} - set(thresholds.tau)
    if first >= args.skip_from and missing:
        raise SystemExit(f"{last} is past --skip-from {args.skip_from} without thresholds for {sorted(missing)}")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {steps} steps", flush=True)
    compiled = TORCH_2 and not args.no_compile
    if compiled:
        model.compile()
    teacher = load_teacher(args.teacher, config) if args.teacher else None
    if teacher and compiled:
        teacher.compile()

    def save(step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tau": thresholds.tau}
        torch.save({**state, "step": step, "average": average, "config": vars(config)}, args.out / "tmp.pt")
        (args.out / "tmp.pt").replace(last)

    started, done = time.time(), first
    for step in range(first, stop):
        left = min(1.0, (steps - step) / (args.decay * steps))
        scale = min(left, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * scale
        ramp = torch.tensor([min(1.0, 0.1 + 0.9 * step / 200)])
        skipping = step >= args.skip_from
        tokens, targets = (x[rank::processes] for x in train.batch(step * args.batch, args.batch))
        # The teacher's share falls with the learning rate: the last word is the text's.
        share = args.teacher_share * left if teacher else 0.0
        taught = teacher.predict(tokens) if teacher else None
        used = [0.0] * len(targets)
        if skipping:
            used = rates + again
            tokens = torch.cat((tokens, tokens[: len(again)]))
        tau = thresholds.column(used)
        full, reduced, distance, sizes = model(tokens, targets, tau, ramp, taught)
        total = (1 - share) * full.sum() + share * distance.sum() + (weights[: len(reduced)] * reduced.sum(-1)).sum()
        (total / per_step).backward()
        add_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step + 1 == args.skip_from:
            thresholds.start(sizes, every_rate)
        elif skipping:
            thresholds.follow(sizes, used, tau)
        value = full.mean().item()
        kl = reduced.mean().item() if len(reduced) else 0.0
        away = distance.mean().item() if len(distance) else 0.0
        if rank > 0:
            continue
        average = value if average is None else 0.98 * average + 0.02 * value
        if (step + 1) % 20 == 0 or step == first:
            speed = (step + 1 - done) * per_step / (time.time() - started)
            seconds = (stop - step - 1) * per_step / speed
            print(
                f"step {step + 1}/{stop}  loss {average:.4f}  |g| {sizes.mean().item():.3f}  norm {norm.item():.2f}"
                f"  kl {kl:.3f}  teacher {away:.3f}  tau {[round(t, 4) for t in thresholds.tau.values()]}  {speed:.0f} tok/s  left {seconds / 60:.0f} min",
                flush=True,
            )
        if (step + 1) % 100 == 0 or step + 1 == stop:
            save(step + 1)
        if (step + 1) % 250 == 0 or step + 1 == stop:
            report = {"step": step + 1, "tokens": (step + 1) * per_step, "rates": evaluate(model, heldout, thresholds, args.batch)}
            with open(args.out / "eval.jsonl", "a") as log:
                log.write(json.dumps(report) + "\n")
            line = "  ".join(f"{k}: {v['perplexity']:.3f} (skip {v['skip']:.3f})" for k, v in report["rates"].items())
            print(f"held-out  {line}", flush=True)


if __name__ == "__main__":
    main()
