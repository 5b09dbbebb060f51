"""Fathom beside llama.cpp on the same checkpoint, in one run, alternating, the best of five rounds.

    python compare_llama_cpp.py LLAMA_BIN FOLDER [--build build] [--threads 2] [--rounds 5]
                                [--weights bf16,int8] [--parts engine,http] [--json FILE]

LLAMA_BIN is the folder with llama-bench and llama-server of a llama.cpp that was built natively
(Release); with llama-batched-bench beside them decode of 8 and 32 sequences is compared too. FOLDER
comes from make_random_llama.py. Nothing is built here. Both sides use the same threads and weights of
the same width (BF16 and bf16, Q8_0 and int8), no caches of prompts, a slot for every client, and a
KV cache of 16 bits for as many tokens. FILE is written anew after every round.
A program that is missing leaves its cells empty. Rates are the best of the rounds; times to first
token, between tokens and from start, and memory, are the least.
"""

import argparse
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
GGUF = {"bf16": "bf16.gguf", "int8": "q8_0.gguf"}
CLIENTS = (1, 8, 32)
PROMPT, OUTPUT, PREFILL = 128, 128, 512
KV_TOKENS = max(CLIENTS) * (PROMPT + OUTPUT + 16)  # whole blocks of 16

# What to reach, Fathom's figure over llama.cpp's, by weights.
TARGETS = {
    "prefill 512, tok/s": (">=", {"bf16": 2.5, "int8": 3}),
    "decode 1, tok/s": (">=", {"bf16": 1.6, "int8": 2.2}),
    "decode 8, tok/s": (">=", {"bf16": 2, "int8": 2.5}),
    "decode 32, tok/s": (">=", {"bf16": 3, "int8": 4}),
    "HTTP 1, output tok/s": (">=", {"bf16": 1.5, "int8": 1.5}),
    "HTTP 8, output tok/s": (">=", {"bf16": 2, "int8": 2}),
    "HTTP 32, output tok/s": (">=", {"bf16": 3, "int8": 3}),
    **{f"HTTP {n}, {what} {p} ms": ("<=", {"bf16": 1, "int8": 1})
       for n in CLIENTS for what in ("TTFT", "TPOT") for p in ("p50", "p99")},
    "peak RSS, MiB": ("<=", {"bf16": 0.9, "int8": 0.9}),
    "start to first token, s": ("<=", {"bf16": 0.5, "int8": 0.5}),
}

# ---- Without a server ---------------------------------------------------------------------------


def run(command, allowed=(0,)):
    """Standard output of a program, or None where it is not there."""
    command = [str(part) for part in command]
    if not pathlib.Path(command[0]).exists():
        return None
    print("+", *command, file=sys.stderr, flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode not in allowed:
        sys.exit(f"{command[0]} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def fathom_engine(setup, weights):
    out = run([setup.build / "tests" / "bench_step", setup.folder / "hf", weights, setup.threads])
    return {f"{what}, tok/s": float(rate)
            for what, rate in re.findall(r"^(\w+ \d+) .*? ([\d.]+) tok/s", out or "", re.M)}


def llama_engine(setup, weights):
    gguf, found = setup.folder / GGUF[weights], {}
    common = ["-m", gguf, "-t", setup.threads]
    out = run([setup.llama / "llama-bench", *common, "-p", PREFILL, "-n", 0, "-r", 1, "-o", "json"])
    for test in json.loads(out or "[]"):
        found["prefill 512, tok/s"] = test["avg_ts"]
    # One token of one sequence with 128 behind it, as bench_step measures.
    out = run([setup.llama / "llama-bench", *common, "-p", 0, "-n", 32, "-d", PROMPT, "-r", 1,
               "-o", "json"])
    for test in json.loads(out or "[]"):
        found["decode 1, tok/s"] = test["avg_ts"]
    out = run([setup.llama / "llama-batched-bench", *common, "-c", 32 * (PROMPT + 32), "-npp",
               PROMPT, "-ntg", 32, "-npl", "8,32", "--output-format", "jsonl"])
    for line in (out or "").splitlines():
        if line.startswith("{"):
            point = json.loads(line)
            found[f"decode {point['pl']}, tok/s"] = point["speed_tg"]
    return found


# ---- Over HTTP ----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def complete_one(url):
    with urllib.request.urlopen(url + "/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": [10], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        json.load(answer)


def wait_for_first_token(process, url):
    """Seconds from now, when the process has just been started, until it has answered a token."""
    start = time.monotonic()
    while time.monotonic() - start < 300:
        if process.poll() is not None:
            raise SystemExit(f"{process.args[0]} ended with {process.returncode}")
        try:
            complete_one(url)
            return time.monotonic() - start
        except urllib.error.HTTPError as error:
            if error.code != 503:  # that is: still loading
                raise
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.005)
    raise SystemExit(f"{process.args[0]} did not answer within 300 s")


def peak_rss(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def measure_server(setup, command):
    url = command[-1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command[:-1]], stdout=log, stderr=log)
        try:
            found = {"start to first token, s": wait_for_first_token(process, url)}
            for clients in CLIENTS:
                out = run([setup.build / "fathom", "bench", url, "-c", clients, "-n",
                           max(8, 2 * clients), "-i", PROMPT, "-o", OUTPUT, "--ignore-eos",
                           "--json", "-"], allowed=(0, 1))  # 1: late itself, as `valid` says
                point = json.loads(out[out.index("{"):])["points"][0]
                name = f"HTTP {clients}, "
                found[name + "output tok/s"] = point["output_tokens_per_second"]
                for what in ("ttft", "tpot"):
                    for p in ("p50", "p99"):
                        found[f"{name}{what.upper()} {p} ms"] = point[what + "_ms"][p]
            found["peak RSS, MiB"] = peak_rss(process)
            return found
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def kv_budget(setup):
    """Bytes of K and V in 16 bits for KV_TOKENS."""
    config = json.loads((setup.folder / "hf" / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config["num_key_value_heads"] * head
    return KV_TOKENS * config["num_hidden_layers"] * 2 * width * 2


def fathom_server(setup, weights):
    port = free_port()
    return measure_server(setup, [
        setup.build / "fathom", "serve", setup.folder / "hf", "--port", port, "--threads",
        setup.threads, "--weights", weights, "--max-sequences", max(CLIENTS), "--kv-budget",
        kv_budget(setup), "--no-prefix-cache",
        f"http://127.0.0.1:{port}"])


def llama_server(setup, weights):
    if not (setup.llama / "llama-server").exists():
        return {}
    port, most = free_port(), max(CLIENTS)
    return measure_server(setup, [
        setup.llama / "llama-server", "-m", setup.folder / GGUF[weights], "--port", port, "-t",
        setup.threads, "-np", most, "--threads-http", most + 2, "-c", KV_TOKENS,
        "--no-cache-prompt", "--cache-ram", 0,
        f"http://127.0.0.1:{port}"])


# ---- The table ----------------------------------------------------------------------------------


def merge(best, found):
    for name, value in found.items():
        better = max if TARGETS[name][0] == ">=" else min
        best[name] = better(best.get(name, value), value)


def print_table(results):
    print("| weights | what | Fathom | llama.cpp | ratio | to reach |")
    print("|---|---|---:|---:|---:|---|")
    for weights, sides in results.items():
        for name, (sign, targets) in TARGETS.items():
            ours, theirs = sides["fathom"].get(name), sides["llama.cpp"].get(name)
            if ours is None and theirs is None:
                continue
            ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
            cells = ["" if value is None else f"{value:.1f}" for value in (ours, theirs)]
            print(f"| {weights} | {name} | {cells[0]} | {cells[1]} | {ratio} | "
                  f"{sign} {targets[weights]} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default="bf16,int8")
    parser.add_argument("--parts", default="engine,http")
    parser.add_argument("--json", type=pathlib.Path)
    setup = parser.parse_args()
    parts = {"engine": (fathom_engine, llama_engine), "http": (fathom_server, llama_server)}
    weights = setup.weights.split(",")
    results = {name: {"fathom": {}, "llama.cpp": {}} for name in weights}
    for turn in range(setup.rounds):
        for name in weights:
            for part in setup.parts.split(","):
                sides = list(zip(("fathom", "llama.cpp"), parts[part]))
                for side, measure in sides if turn % 2 == 0 else sides[::-1]:
                    merge(results[name][side], measure(setup, name))
        if setup.json:
            setup.json.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)


if __name__ == "__main__":
    main()
