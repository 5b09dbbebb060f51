"""Whether `fathom bench` and guidellm say the same of the same load.

    .venv-clients/bin/python tests/bench/agreement.py paced
    .venv-clients/bin/python tests/bench/agreement.py URL [--model NAME] [-c 4] [-n 32] [--rounds 5]

`paced` is a server of this file that sends each token at its time: both must find that time. Of a
server that computes, on processors that it shares with them, they also measure what they take from
it: processor_ms_per_token says how much that is (docs/measuring.md). Start it without a prefix
cache: both send the same prompts. They take turns, each first every other time; printed are the
medians of the rounds' means, and of their ratios. guidellm's names differ: the inter_token_latency
of a request is TPOT, and the mean over all tokens is ITL if each token comes in a chunk of its own.
Its rates are means over moments of the run: here they are counted from its requests' times instead.
Each of its processes makes its HTTP client within the first request's time: hence the warm-up.
"""

import argparse
import http.server
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "clients"))

from corpus import SENTENCES  # noqa: E402
from guidellm_run import run_guidellm  # noqa: E402

# Asked for by guidellm, and used only for what servers do not count themselves.
TOKENIZER = ROOT / "models" / "fathom-tiny"
FIRST, NEXT = 0.3, 0.03  # of the paced server: seconds to the first token, to each further one
FIGURES = ("requests_per_s", "tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms",
           "processor_ms_per_token")


class Paced(http.server.BaseHTTPRequestHandler):
    """Each token at its time after the request, however late the one before was."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "paced", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        start = time.monotonic()
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = request["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(count):
            time.sleep(max(start + FIRST + i * NEXT - time.monotonic(), 0))
            choice = {"index": 0, "text": " a", "finish_reason": "length" if i + 1 == count else None}
            self.send_event({"choices": [choice]})
        usage = {"prompt_tokens": 32, "completion_tokens": count, "total_tokens": 32 + count}
        self.send_event({"choices": [], "usage": usage})
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def send_event(self, members):
        event = {"id": "cmpl-1", "object": "text_completion", "model": "paced", **members}
        self.send_chunk(b"data: %s\n\n" % json.dumps(event).encode())

    def send_chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Descendants(threading.Thread):
    """The processor time of the processes below this one, as time goes on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.samples, self.ended = [], threading.Event()

    def run(self):
        while not self.ended.wait(0.1):
            self.samples.append((time.time(), self.seconds()))

    def seconds(self):
        parents, used = {}, {}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:  # it is gone
                continue
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        def is_below(pid):
            while pid := parents.get(pid):
                if pid == os.getpid():
                    return True
            return False

        return sum(seconds for pid, seconds in used.items() if is_below(pid))

    def between(self, start, end):
        inside = [used for moment, used in self.samples if start <= moment <= end]
        return inside[-1] - inside[0]


def guidellm_figures(report, descendants):
    done = report["requests"]["successful"]
    start, end = min(r["start_time"] for r in done), max(r["end_time"] for r in done)
    seconds, tokens = end - start, sum(r["output_tokens"] for r in done)
    metrics = {name: value["successful"] for name, value in report["metrics"].items()}
    return {
        "requests_per_s": len(done) / seconds,
        "tokens_per_s": tokens / seconds,
        "ttft_ms": metrics["time_to_first_token_ms"]["mean"],
        "tpot_ms": statistics.mean(r["inter_token_latency_ms"] for r in done),
        "itl_ms": metrics["inter_token_latency_ms"]["mean"],
        "e2e_ms": 1000 * metrics["request_latency"]["mean"],
        "processor_ms_per_token": 1000 * descendants.between(start, end) / tokens,
    }


def fathom_figures(binary, url, model, streams, requests, warm_up, prompts):
    command = [binary, "bench", url, "-m", model, "-c", streams, "-n", requests, "--prompts", prompts,
               "--warm-up", warm_up, "--temperature", 1, "--ignore-eos", "--lag-limit", 60000,
               "--json", "-"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True,
                          timeout=900, env=environment)
    point = json.loads(done.stdout)["points"][0]
    assert point["completed"] == requests, point
    return {
        "requests_per_s": point["completed"] / point["seconds"],
        "tokens_per_s": point["output_tokens_per_second"],
        **{name: point[name]["mean"] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")},
        "processor_ms_per_token": 1000 * point["busy"] * point["seconds"] / point["output_tokens"],
    }


def write_prompts(path, count, sentences, tokens_out):
    """Lines that both read: each has its own name for the tokens to write."""
    dice = random.Random(7)
    with path.open("w") as lines:
        for _ in range(count):
            prompt = " ".join(dice.sample(SENTENCES, sentences))
            line = {"prompt": prompt, "max_tokens": tokens_out, "output_tokens_count": tokens_out}
            lines.write(json.dumps(line) + "\n")


def compare(binary, url, model, rounds, streams, requests, sentences, tokens_out):
    """Figure -> fathom bench's median, guidellm's, and that of the rounds' ratios: a server whose
    speed drifts is more alike within a round."""
    sides = ([], [])
    warm_up = 2 * streams
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        prompts = scratch / "prompts.jsonl"
        write_prompts(prompts, requests + warm_up, sentences, tokens_out)

        def ours():
            return fathom_figures(binary, url, model, streams, requests, warm_up, prompts)

        def theirs():
            descendants = Descendants()
            descendants.start()
            report = run_guidellm(url, model, TOKENIZER, streams, requests + warm_up, prompts,
                                  scratch / "report.json",
                                  "--warmup-percent", str(warm_up / (requests + warm_up)))
            descendants.ended.set()
            return guidellm_figures(report, descendants)

        for i in range(rounds):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                sides[side].append((ours, theirs)[side]())
    for name in FIGURES:
        for side, figures in zip(("fathom bench", "guidellm"), sides):
            print(f"{name} {side}:", *(f"{one[name]:.4g}" for one in figures), file=sys.stderr)
    return {name: (*(statistics.median(figures[name] for figures in side) for side in sides),
                   statistics.median(ours[name] / theirs[name] for ours, theirs in zip(*sides)))
            for name in FIGURES}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="or `paced`")
    parser.add_argument("--model", default="fathom-tiny")
    parser.add_argument("--sentences", type=int, default=7, help="of a prompt; one has 15 words")
    for flag, name, default in (("-c", "streams", 4), ("-n", "requests", 32), ("-o", "tokens_out", 64),
                                ("-r", "rounds", 5)):
        parser.add_argument(flag, f"--{name.replace('_', '-')}", type=int, default=default)
    given = parser.parse_args()
    if given.url == "paced":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Paced)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given.url, given.model = f"http://127.0.0.1:{server.server_address[1]}", "paced"
        print(f"paced: ttft {1000 * FIRST:.0f} ms, tpot and itl {1000 * NEXT:.0f} ms, "
              f"e2e {1000 * (FIRST + NEXT * (given.tokens_out - 1)):.0f} ms")
    binary = os.environ.get("FATHOM_BINARY", str(ROOT / "build" / "fathom"))
    found = compare(binary, given.url, given.model, given.rounds, given.streams, given.requests,
                    given.sentences, given.tokens_out)
    print(f"{'':24}{'fathom bench':>14}{'guidellm':>14}{'ratio':>8}")
    for name, (ours, theirs, ratio) in found.items():
        print(f"{name:24}{ours:14.3f}{theirs:14.3f}{ratio:8.3f}")


if __name__ == "__main__":
    main()
