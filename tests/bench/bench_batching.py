"""Runs bench_batching over fathom-tiny and a random NAG of 135 M parameters: a table and a plot.

    python bench_batching.py OUT [--build build] [--random FOLDER] [--quick] [--rounds 5]
                             [--parts tiers,open,..]
    python bench_batching.py OUT --report       table and plot again, from OUT/results.jsonl

Writes results.jsonl (every cell, appended), batching.md and batching.svg into the folder OUT. The
random model is made there once (make_random_nag.py, needs torch) unless --random names one.
Medians over rounds, quartiles in brackets; gains compare cells of the same round.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
ARMS = {"static": "lock-step static", "budget": "token budget", "time": "predicted time"}
COLORS = {"full": "#0b62a8", "high": "#15803d", "balanced": "#c2410c", "fast": "#7e22ce"}

# ---- Runs ---------------------------------------------------------------------------------------


def plan(models, quick, rounds):
    """Arguments of bench_batching for every part. Seconds are those of a cell. 128 clients of the
    large model take half a minute to read their prompts, so the other arms meet at 32."""
    tiny, large = models
    text = ["--text", ROOT / "README.md"]
    tiers = "full,balanced,fast"
    s = 0.2 if quick else 1
    one = ["--rounds", 1 if quick else 2]
    rounds = ["--rounds", 1 if quick else rounds]
    yield "predict", [tiny, "predict", *rounds, "--requests", 256, *text]
    yield "predict", [tiny, "predict", *rounds, "--requests", 256, "--threads", 1, *text]
    yield "predict", [large, "predict", *one, "--requests", 64, "--target-ms", 100]
    yield "tiers", [tiny, "tiers", "--tiers", tiers, "--seconds", 5 * s, *rounds, *text]
    for clients, arms, lengths in (
        ("32", "static,budget,time", "fixed"),
        ("1,8", "time", "fixed"),
        ("32", "budget,time", "mixed"),
        ("128", "time", "fixed"),
    ):
        cells = ["--tiers", tiers, "--clients", clients, "--arms", arms, "--lengths", lengths]
        seconds = ["--seconds", 15 * s, "--target-ms", 100]
        yield "tiers", [large, "tiers", *cells, *seconds, *(rounds if clients == "32" else one)]
    yield "long", [large, "long", *one, "--prompt", 1000 if quick else 8000, "--target-ms", 100]
    yield "kv", [tiny, "kv", "--requests", 128, *text]
    yield "open", [tiny, "open", "--seconds", 60 * s, *one, *text]


def run(arguments, models, out):
    with open(out / "results.jsonl", "a") as results:
        for part, flags in plan(models, arguments.quick, arguments.rounds):
            if arguments.parts and part not in arguments.parts.split(","):
                continue
            command = [arguments.build / "tests" / "bench_batching", *flags]
            print("+", *command, file=sys.stderr, flush=True)
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                results.write(line)
                results.flush()
            if process.wait() != 0:
                sys.exit(f"bench_batching ended with {process.returncode}")


# ---- Table --------------------------------------------------------------------------------------


def spread(values, form="{:.0f}"):
    values = sorted(values)
    if len(values) < 3:
        return form.format(statistics.median(values))
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{form.format(middle)} [{form.format(low)}–{form.format(high)}]"


def markdown(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


class Cells:
    """Cells of part tiers by what was run; each a list over rounds."""

    def __init__(self, results):
        self.rounds = collections.defaultdict(dict)
        for cell in results:
            if cell["part"] == "tiers":
                device = cell["device"].split(", ")[-1]  # "2 threads"
                cell["model"] += f", {device}"
                cell["lengths"] += f" {cell['tokens']}/{cell['tokens']}"
                key = tuple(cell[k] for k in ("model", "lengths", "arm", "clients", "tier"))
                self.rounds[key][cell["round"]] = cell

    def values(self, key, field):
        return [cell[field] for cell in self.rounds[key].values()]

    def gains(self, key, field="tokens_per_second"):
        """Against full in the same round; of a time per token the inverse."""
        full, cells = self.rounds.get((*key[:4], "full"), {}), self.rounds[key]
        pairs = [(cells[r][field], full[r][field]) for r in cells if r in full]
        return [a / b if field == "tokens_per_second" else b / a for a, b in pairs] or [float("nan")]

    def ideal(self, key):
        """1 / (1 - what was skipped): of the FLOPs that full depth would have taken."""
        return 1 / (1 - statistics.median(self.values(key, "saving")))


def tiers_table(cells, model, lengths):
    keys = [key for key in cells.rounds if key[:2] == (model, lengths)]
    order = {name: i for i, name in enumerate([*ARMS, *COLORS])}
    rows = []
    for key in sorted(keys, key=lambda k: (k[3], order[k[2]], order[k[4]])):
        gains, ideal = cells.gains(key), cells.ideal(key)
        gain = statistics.median(gains)
        is_full = key[4] == "full"
        rows.append([
            ARMS[key[2]], str(key[3]), key[4], spread(cells.values(key, "tokens_per_second")),
            "" if is_full else spread(gains, "{:.2f}"),
            "" if is_full else f"{statistics.median(cells.gains(key, 'cpu_ms_per_token')):.2f}",
            "" if is_full else f"{ideal:.2f}", "" if is_full else f"{100 * gain / ideal:.0f} %",
            spread(cells.values(key, "next_p50"), "{:.1f}").split(" ")[0],
            spread(cells.values(key, "next_p99"), "{:.1f}").split(" ")[0],
            f"{statistics.median(cells.values(key, 'others')):.2f}",
        ])  # fmt: skip
    if not rows:
        return []
    head = ["scheduler", "clients", "tier", "output tokens/s", "gain", "gain, CPU time", "ideal",
            "of ideal", "ITL p50, ms", "p99", "others"]  # fmt: skip
    return [f"### {model}, {lengths} lengths", "", *markdown(head, rows)]


def other_tables(results):
    by_part = collections.defaultdict(list)
    for cell in results:
        by_part[cell["part"]].append(cell)
    if by_part["predict"]:
        yield from ["### Predicted against real step time, |predicted − real| / real", ""]
        yield from markdown(
            ["model", "round", "steps", "against", "count", "p25", "median", "p75", "p90", "load average"],
            [[f"{c['model']}, {c['device'].split(', ')[-1]}", str(c["round"]), c["steps"],
              c["against"], str(c["count"]),
              *(f"{100 * c[p]:.1f} %" for p in ("p25", "p50", "p75", "p90")),
              f"{c['load_average']:.1f}"] for c in by_part["predict"]],
        )  # fmt: skip
    if by_part["long"]:
        yield from ["### 8 clients decode, a long prompt arrives", ""]
        yield from markdown(
            ["model", "prompt", "step", "prompt read in, s", "ITL p50, ms", "p99", "max",
             "one chunk of 16, ms"],
            [[c["model"], str(c["prompt"]),
              f"target {c['target']} ms" if c["target"] else f"budget of {c['chunk'] or 256} tokens",
              f"{c['prompt_seconds']:.1f}", f"{c['next_p50']:.0f}", f"{c['next_p99']:.0f}",
              f"{c['next_max']:.0f}", f"{c['chunk_ms']:.0f}"] for c in by_part["long"]],
        )  # fmt: skip
    if by_part["kv"]:
        yield from ["### 32 clients with a quarter of the KV that they want", ""]
        yield from markdown(
            ["model", "requests", "ended", "same tokens", "preemptions", "tokens/s", "without limit"],
            [[c["model"], str(c["requests"]), str(c["ended"]), str(c["same_tokens"]).lower(),
              str(c["preemptions"]), f"{c['tokens_per_second']:.0f}",
              f"{c['unlimited_tokens_per_second']:.0f}"] for c in by_part["kv"]],
        )  # fmt: skip
    if by_part["open"]:
        yield from ["### Poisson arrivals at 1.2 times what full does", ""]
        yield from markdown(
            ["model", "quality", "requests/s", "ended", "TTFT p50, ms", "p99", "objective",
             "ITL p99, ms", "tiers", "others"],
            [[c["model"], c["tier"], f"{c['rate']:.1f}", str(c["ended"]), f"{c['first_p50']:.0f}",
              f"{c['first_p99']:.0f}", f"{c['slo_first']:.0f}", f"{c['next_p99']:.0f}",
              shares(c["per_tier"]), f"{c['others']:.2f}"] for c in by_part["open"]],
        )  # fmt: skip


def shares(per_tier):
    total = sum(per_tier.values()) or 1
    return ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in per_tier.items() if n)


# ---- Plot ---------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 270, 60, 54, 34


def round_up(value):
    """The next of 1, 2, 4 or 8 times a power of ten: its quarters are round."""
    power = 10 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 4, 8, 10) if n * power >= value)



def bar_panel(title, groups, x, y):
    """groups: {label: [(value, ideal or None, low, high, color)]}."""
    highest = (max(v, ideal or 0, high) for bars in groups.values() for v, ideal, _, high, _ in bars)
    top = round_up(max(highest))
    yield f'<g transform="translate({x},{y})"><text x="{LEFT}" y="18" class="title">{title}</text>'
    plot_height, plot_width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - 12
    for tick in range(5):
        at = TOP + plot_height * (1 - tick / 4)
        yield f'<path class="axis" d="M{LEFT} {at:.1f}h{plot_width}"/>'
        value = top * tick / 4
        text = f"{value:.3g}" if top < 10 else f"{value:.0f}"
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    step = plot_width / len(groups)
    for i, (label, bars) in enumerate(groups.items()):
        width = step * 0.8 / len(bars)
        for j, (value, ideal, low, high, color) in enumerate(bars):
            left = LEFT + step * (i + 0.1) + width * j

            def up(v):
                return TOP + plot_height * (1 - v / top)

            yield (f'<rect x="{left:.1f}" y="{up(value):.1f}" width="{width * 0.9:.1f}" '
                   f'height="{plot_height * value / top:.1f}" fill="{color}"/>')  # fmt: skip
            middle = left + width * 0.45
            yield f'<path class="range" d="M{middle:.1f} {up(low):.1f}V{up(high):.1f}"/>'
            if ideal:
                yield f'<path class="ideal" d="M{left:.1f} {up(ideal):.1f}h{width * 0.9:.1f}"/>'
        for line, text in enumerate(label.split("\n")):
            yield (f'<text x="{LEFT + step * (i + 0.5):.1f}" y="{HEIGHT - BOTTOM + 16 + 14 * line}" '
                   f'text-anchor="middle">{text}</text>')  # fmt: skip
    yield "</g>"


def bar(cells, key):
    values = sorted(cells.values(key, "tokens_per_second"))
    full = (*key[:4], "full")
    ideal = None
    if key[4] != "full" and full in cells.rounds:
        ideal = statistics.median(cells.values(full, "tokens_per_second")) * cells.ideal(key)
    quartiles = statistics.quantiles(values, n=4) if len(values) > 2 else [values[0]] * 2 + [values[-1]]
    return statistics.median(values), ideal, quartiles[0], quartiles[2], COLORS[key[4]]


def plot(cells):
    panels = []
    models = sorted({key[0] for key in cells.rounds})
    for model in models:
        kinds = sorted({key[1] for key in cells.rounds if key[0] == model})
        groups = collections.defaultdict(list)
        for n in sorted({key[3] for key in cells.rounds if key[0] == model}):
            for tier in COLORS:
                key = (model, kinds[0], "time", n, tier)
                if key in cells.rounds:
                    groups[f"{n} client{'s' * (n > 1)}"].append(bar(cells, key))
        panels.append((f"{model}: output tokens/s, {kinds[0]}", groups))
        groups = collections.defaultdict(list)
        for lengths in kinds:
            for arm, name in ARMS.items():
                for tier in COLORS:
                    key = (model, lengths, arm, 32, tier)
                    if key in cells.rounds:
                        label = f"{name.split()[-1]},\n{lengths.split()[0]}"
                        groups[label].append(bar(cells, key))
        panels.append((f"{model}: 32 clients", groups))
    panels = [(title, groups) for title, groups in panels if groups and all(groups.values())]
    height = HEIGHT * ((len(panels) + 1) // 2) + 40
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" '
           'font-family="system-ui,sans-serif" font-size="11">')  # fmt: skip
    yield ("<style>.axis{stroke:#d8e0e8}.ideal{stroke:#111;stroke-width:2}"
           ".range{stroke:#667;stroke-width:1}.title{font-weight:600;font-size:12px}</style>")
    yield f'<rect width="{2 * WIDTH}" height="{height}" fill="#fff"/>'
    for i, (title, groups) in enumerate(panels):
        yield from bar_panel(title, groups, i % 2 * WIDTH, i // 2 * HEIGHT)
    x = LEFT
    for tier in ("full", "balanced", "fast"):
        yield f'<rect x="{x}" y="{height - 26}" width="12" height="12" fill="{COLORS[tier]}"/>'
        yield f'<text x="{x + 17}" y="{height - 16}">{tier}</text>'
        x += 90
    yield f'<path class="ideal" d="M{x} {height - 20}h14"/>'
    yield (f'<text x="{x + 20}" y="{height - 16}">ideal: full / (1 − FLOPs skipped); '
           "thin lines: quartiles over rounds</text></svg>")  # fmt: skip


# ---- Start --------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--random", type=pathlib.Path, help="a random checkpoint made before")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time: to try it out")
    parser.add_argument("--rounds", type=int, default=5, help="of the cells that are compared (5)")
    parser.add_argument("--parts", help="only these: predict,tiers,long,kv,open")
    parser.add_argument("--report", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        large = arguments.random or out / "nag-135m"
        if not (large / "model.safetensors").exists():
            subprocess.run([sys.executable, HERE / "make_random_nag.py", large], check=True)
        run(arguments, (ROOT / "models" / "fathom-tiny", large), out)
    results = [json.loads(line) for line in open(out / "results.jsonl")]
    cells = Cells(results)
    lines = [f"{os.cpu_count()} processors; medians [quartiles]; others: processors taken by other",
             "programs meanwhile", ""]  # fmt: skip
    for model, lengths in sorted({key[:2] for key in cells.rounds}):
        lines += tiers_table(cells, model, lengths)
    lines += other_tables(results)
    (out / "batching.md").write_text("\n".join(lines))
    if cells.rounds:
        (out / "batching.svg").write_text("\n".join(plot(cells)))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
