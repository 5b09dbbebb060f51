"""guidellm, unmodified, loads the server and counts tokens: the server counted the same."""

import json

import pytest

from guidellm_run import run_guidellm

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
    report = run_guidellm(server.url, server.model_id, model_folder, streams, REQUESTS, 32, OUTPUT,
                          tmp_path / "report.json")
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
