"""guidellm, unmodified, loads the server and counts tokens: the server counted the same. It and
`fathom bench` both measure what the server itself says of the same requests."""

import json
import os
import random
import statistics
import subprocess

import pytest

from corpus import SENTENCES
from guidellm_run import run_guidellm, synthetic

REQUESTS, OUTPUT = 24, 16


def logged_completions(server):
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    return [line for line in lines if line.get("path") == "/v1/completions"]


def counts(server):
    """Tokens written, and tokens read: those that were computed and those that were known."""
    return (server.metric("fathom_generation_tokens_total"),
            server.metric("fathom_prompt_tokens_total")
            + server.metric("fathom_prefix_cache_hits_total"))


@pytest.mark.parametrize("tier, streams", [("full", 1), ("fast", 6)])
def test_token_counts(start_server, model_folder, tmp_path, tier, streams):
    server = start_server(default_quality=tier, log_format="json")
    report = run_guidellm(server.url, server.model_id, model_folder, streams, REQUESTS,
                          synthetic(32, OUTPUT), tmp_path / "report.json")
    requests = report["run_stats"]["requests_made"]
    assert requests["successful"] == REQUESTS and requests["total"] == REQUESTS
    measured = {name: report["metrics"][f"{name}_token_count"]["successful"]["total_sum"]
                for name in ("prompt", "output")}

    completions = logged_completions(server)
    # Before it begins, guidellm asks for single tokens, to see that somebody answers.
    load = [line for line in completions if line["completion_tokens"] > 1]
    assert len(load) == REQUESTS and {line["tier"] for line in load} == {tier}
    assert measured["prompt"] == sum(line["prompt_tokens"] for line in load)
    assert measured["output"] == sum(line["completion_tokens"] for line in load)
    assert measured["output"] == REQUESTS * OUTPUT
    assert counts(server) == (sum(line["completion_tokens"] for line in completions),
                              sum(line["prompt_tokens"] for line in completions))
    server.wait_idle()


def text_prompts(count):
    """Lines of some 250 tokens. Text, so that nearly every token shows some."""
    dice = random.Random(7)
    return "".join(" ".join(dice.sample(SENTENCES, 14)) + "\n" for _ in range(count))


def run_fathom_bench(binary, url, requests, prompts):
    command = [binary, "bench", url, "-c", 1, "-n", requests, "-o", OUTPUT, "--prompts", prompts,
               "--temperature", 1, "--ignore-eos", "--lag-limit", 60000, "--json", "-"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True,
                          timeout=900, env=environment)
    return json.loads(done.stdout)["points"][0]


def medians_of_log(lines):
    return {name: statistics.median(line[f"{name}_ms"] for line in lines)
            for name in ("ttft", "tpot", "total")}


def test_clients_measure_what_the_server_says(start_server, model_folder, tmp_path, binary):
    """Run in turns they differ from each other, as a server is slower beside a client that needs
    more of the processor (docs/measuring.md). Of the same requests each agrees with the server's
    log: a figure from a client cannot be the smaller one; the rest of the bound is for the way."""
    requests = 12
    server = start_server(default_quality="full", threads=1, log_format="json")
    report = run_guidellm(server.url, server.model_id, model_folder, 1, requests,
                          synthetic(250, OUTPUT), tmp_path / "report.json")
    successful = report["requests"]["successful"]
    theirs = {
        "ttft": statistics.median(r["time_to_first_token_ms"] for r in successful),
        "tpot": statistics.median(r["inter_token_latency_ms"] for r in successful),
        "total": statistics.median(1000 * (r["end_time"] - r["start_time"]) for r in successful),
    }
    server.wait_idle()
    before = len(logged_completions(server))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(text_prompts(requests))
    point = run_fathom_bench(binary, server.url, requests, prompts)
    ours = {"ttft": point["ttft_ms"]["p50"], "tpot": point["tpot_ms"]["p50"],
            "total": point["e2e_ms"]["p50"]}
    server.wait_idle()

    lines = logged_completions(server)
    load = [line for line in lines[:before] if line["completion_tokens"] == OUTPUT]
    assert len(load) == len(successful) == len(lines) - before == requests
    for name, client, logged in (("guidellm", theirs, medians_of_log(load)),
                                 ("fathom bench", ours, medians_of_log(lines[before:]))):
        print(name, {key: (round(client[key], 2), round(logged[key], 2)) for key in client})
        assert logged["ttft"] <= client["ttft"] <= 1.5 * logged["ttft"], name
        assert client["tpot"] == pytest.approx(logged["tpot"], rel=0.5), name
        assert client["total"] == pytest.approx(logged["total"], rel=0.5), name
