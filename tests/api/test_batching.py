"""What the server says of its batching: reuse, the tier that it chose, its last steps."""

import concurrent.futures

import pytest


def test_prefix_cache(server):
    prompt = [7, 8, 9] * 20
    server.complete(prompt=prompt, cache_salt="a", max_tokens=1)
    hits = server.metric("fathom_prefix_cache_hits_total")
    usage = server.complete(prompt=prompt, cache_salt="a", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48
    assert server.metric("fathom_prefix_cache_hits_total") - hits == 48
    usage = server.complete(prompt=prompt, cache_salt="b", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_without_prefix_cache(start_server):
    server = start_server(no_prefix_cache=True)
    for _ in range(2):
        usage = server.complete(prompt=[7, 8, 9] * 20, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_auto_at_rest(server):
    server.wait_idle()
    answer = server.complete(quality="auto", max_tokens=2).json()
    assert answer["quality"] == "full"
    assert answer["quality_reason"] == "within the objectives"
    assert "quality_reason" not in server.complete(quality="full", max_tokens=2).json()
    chosen = server.metric("fathom_auto_quality_total", quality="full", reason="within")
    assert chosen >= 1


def test_auto_under_load(start_server):
    """An objective that a crowd cannot meet: the first gets full, later ones less, none below."""
    server = start_server(ttft_slo_ms=1, tpot_slo_ms=0.3, auto_floor="balanced")
    busy = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "quality": "auto"}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = [job.result().json() for job in
                   [pool.submit(server.complete, **busy) for _ in range(48)]]
    assert {answer["quality"] for answer in answers} >= {"full", "balanced"}
    assert "fast" not in {answer["quality"] for answer in answers}


def test_last_steps(start_server):
    server = start_server(debug_steps=5)
    server.complete(max_tokens=12, ignore_eos=True)
    server.wait_idle()
    steps = server.get("/debug/steps").json()["steps"]
    assert len(steps) == 5
    assert [step["step"] for step in steps] == list(range(steps[0]["step"], steps[0]["step"] + 5))
    for step in steps:
        assert step["rows"] == step["decode_rows"] == sum(step["tiers"].values()) == 1
        assert step["real_ms"] > 0 and step["predicted_ms"] > 0 and step["modelled_ms"] > 0
        assert 0 < step["thread_ms"] < step["real_ms"] + 1
        assert sum(step["bodies"].values()) == server.model["fathom"]["sublayers"]


def test_steps_are_off(server):
    assert server.get("/debug/steps").status_code == 404


def test_a_conversation_is_found_again(server):
    """The next turn of a chat begins with what the last one computed."""
    fields = {"model": server.model_id, "cache_salt": "talk", "max_tokens": 1}
    messages = [{"role": "user", "content": "Tell me about the sea and the ships. " * 4}]
    first = server.post("/v1/chat/completions", json={**fields, "messages": messages}).json()
    if "error" in first:
        pytest.skip("no chat with this model")
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    second = server.post("/v1/chat/completions", json={**fields, "messages": messages}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_measured_times_are_kept_for_the_next_start(start_server, tmp_path):
    for expected in ("measured in [0-9]+ ms$", "read from the cache in "):
        server = start_server(cost_cache=str(tmp_path / "cache"))
        assert server.wait_for("ridge at [0-9]+ rows; " + expected)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("{}")
    server = start_server(cost_cache=str(tmp_path / "cache"))
    server.wait_for("measured in [0-9]+ ms: .*format is missing")
    assert server.complete(max_tokens=2).status_code == 200
