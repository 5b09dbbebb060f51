"""The page that Prometheus reads."""

import re
import time

EDGES = {
    "time_to_first_token_seconds": 22,
    "inter_token_latency_seconds": 19,
    "e2e_request_latency_seconds": 21,
    "request_queue_time_seconds": 21,
    "request_prefill_time_seconds": 21,
    "request_decode_time_seconds": 21,
}


def test_form(server):
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    typed = set()
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in typed
            typed.add(name)
        elif not line.startswith("# HELP "):
            name = re.fullmatch(r'([a-z_0-9]+)(\{([a-z_]+="[^"]*",?)*\})? \S+', line).group(1)
            assert name in typed or re.sub(r"_(bucket|sum|count)$", "", name) in typed
    assert "vllm:" not in answer.text


def test_counts(server):
    tier = server.model["fathom"]["tiers"][-1]["name"]
    names = ["generation_tokens_total", "prompt_tokens_total", "steps_total"]
    before = {name: server.metric("fathom_" + name) for name in names}
    observed = {name: server.metric(f"fathom_{name}_count", quality=tier) for name in EDGES}
    finished = server.metric("fathom_request_success_total", quality=tier, finished_reason="length")
    skipped = server.metric("fathom_sublayers_skipped_total", quality=tier)
    server.complete(quality=tier, prompt=[5, 6, 7], n=2, max_tokens=5, ignore_eos=True)
    assert server.metric("fathom_generation_tokens_total") - before["generation_tokens_total"] == 10
    assert server.metric("fathom_prompt_tokens_total") - before["prompt_tokens_total"] >= 3
    assert server.metric("fathom_steps_total") > before["steps_total"]
    assert server.metric("fathom_sublayers_skipped_total", quality=tier) > skipped
    assert server.metric("fathom_request_success_total", quality=tier,
                         finished_reason="length") - finished == 2
    for name, edges in EDGES.items():
        added = server.metric(f"fathom_{name}_count", quality=tier) - observed[name]
        assert added == (8 if name == "inter_token_latency_seconds" else 1)
        total = server.metric(f"fathom_{name}_bucket", quality=tier, le="+Inf")
        assert total == server.metric(f"fathom_{name}_count", quality=tier)
        page = server.get("/metrics").text
        assert len(re.findall(rf'fathom_{name}_bucket\{{[^}}]*quality="{tier}"', page)) == edges + 1
    assert 0 <= (64 << 20) - server.metric("fathom_kv_bytes_budget") < 64 << 10  # whole blocks


def test_more_kv_than_can_be_used_is_not_taken(start_server):
    """Two whole contexts are all that two sequences can hold."""
    server = start_server(kv_budget="100GiB", max_sequences=2)
    tokens = 2 * server.model["max_model_len"]
    per_token = server.metric("fathom_kv_bytes_budget") / tokens
    assert per_token < 1 << 16
    assert re.search(r"[\d.]+ [KM]iB KV budget", "\n".join(server.lines))


def test_an_end_by_a_stop_string_is_a_success(server):
    """Not a cancellation, whatever the engine is told."""
    tier = server.model["fathom"]["tiers"][0]["name"]
    fields = {"quality": tier, "max_tokens": 60, "seed": 3, "temperature": 1, "ignore_eos": True}
    text = server.complete(**fields).json()["choices"][0]["text"]

    def count():
        return [server.metric("fathom_requests_cancelled_total"),
                server.metric("fathom_request_success_total", quality=tier, finished_reason="abort"),
                server.metric("fathom_request_success_total", quality=tier, finished_reason="stop")]

    before = count()
    for stream in (False, True):
        answer = server.complete(stop=text[10:14], stream=stream, **fields)
        assert answer.status_code == 200 and '"finish_reason":"stop"' in answer.text.replace(" ", "")
    server.wait_idle()
    assert count() == [before[0], before[1], before[2] + 2]


def test_the_loop_watches_itself(server):
    name = "fathom_event_loop_lag_seconds"
    before = server.metric(name + "_count")
    time.sleep(1)
    after = server.metric(name + "_count")
    assert 1 <= after - before <= 5
    assert server.metric(name + "_bucket", le="+Inf") >= after
    assert 0 <= server.metric(name + "_sum") < after


def test_vllm_names(start_server):
    server = start_server(vllm_metric_names=True)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "gpu_cache_usage_perc"):
        assert server.metric(f"vllm:{name}") == 0
