"""Draws perplexity against executed FLOPs, and which share of tokens skips each sub-layer.

    python curve.py --model models/fathom-tiny --fathom build/fathom --fit train.txt --text heldout.txt

Calibrates a copy of the model at many skip rates, measures each with `fathom eval`, and writes
MODEL/curve.png, MODEL/curve.json and MODEL/sublayers.png. The tiers of the model itself are marked.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RATES = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60)


def evaluate(fathom, folder, text, tokens):
    command = [fathom, "eval", folder, "--text", text, "--max-tokens", str(tokens), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_rates(args):
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model"
        shutil.copytree(args.model, copy)
        targets = ",".join(f"r{round(100 * rate):02}={rate}" for rate in RATES)
        command = [args.fathom, "calibrate", copy, "--text", args.fit, "--target", targets]
        subprocess.run(command + ["--max-tokens", "16384", "--measure-tokens", "4096"], check=True)
        return evaluate(args.fathom, copy, args.text, args.tokens)


def draw_curve(rates, tiers, path):
    def point(row):
        return row["flops_per_token"] / 1e6, row["perplexity"]

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130)
    axes.plot(*zip(*map(point, rates)), "-o", color="#7a8ba8", markersize=3, label="one threshold on |g|")
    for row in tiers:
        x, y = point(row)
        axes.plot(x, y, "o", color="#c8442b", markersize=7)
        change = 100 * (y / tiers[0]["perplexity"] - 1)
        axes.annotate(f"{row['tier']} ({change:+.2f} %)", (x, y), (0, 9), textcoords="offset points", rotation=50)
    full = rates[0]["flops_per_token_full"] / 1e6
    axes.set_xlabel(f"FLOPs executed in the blocks per token, millions (full depth: {full:.2f})")
    axes.set_ylabel("held-out perplexity")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def draw_sublayers(tiers, path):
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), dpi=130, sharey=True)
    for kind, panel in enumerate(panels):
        for row in tiers[1:]:
            shares = [100 * share for share in row["sublayer_skip"][kind::2]]
            panel.plot(range(1, len(shares) + 1), shares, "-o", markersize=4, label=row["tier"])
        panel.set_title("MLP" if kind else "attention")
        panel.set_xlabel("block")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens that skip, %")
    panels[1].legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--fathom", default="build/fathom", help="the binary")
    parser.add_argument("--fit", help="text that thresholds are fitted on")
    parser.add_argument("--text", help="held-out text to measure")
    parser.add_argument("--redraw", action="store_true", help="only draw what curve.json holds")
    parser.add_argument("--tokens", type=int, default=131072)
    args = parser.parse_args()
    figures = args.model / "curve.json"
    if not args.redraw:
        tiers, rates = evaluate(args.fathom, args.model, args.text, args.tokens), measure_rates(args)
        figures.write_text(json.dumps({"tiers": tiers, "rates": rates}, indent=1) + "\n")
    measured = json.loads(figures.read_text())
    draw_curve(measured["rates"], measured["tiers"], args.model / "curve.png")
    draw_sublayers(measured["tiers"], args.model / "sublayers.png")


if __name__ == "__main__":
    main()
