"""The main job, through the official client and as raw JSON."""

import concurrent.futures
import json

import openai
import pytest


def complete(server, **fields):
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server, **fields):
    """The events of a stream as objects, checked for its form."""
    answer = server.complete(stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "\r" not in answer.text
    events = answer.text.split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(events):
    texts, reasons = {}, {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return texts, reasons


def tiers(server):
    return [tier["name"] for tier in server.model["fathom"]["tiers"]]


def test_openai_client(server):
    client = server.client()
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    answer = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2
    )
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    chunks = list(
        client.completions.create(
            model=model,
            prompt="Once upon a time",
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1 and len({c.created for c in chunks}) == 1


def test_openai_errors(server):
    client = server.client()
    model = client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", extra_body={"quality": "splendid"})
    assert caught.value.param == "quality" and tiers(server)[0] in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    # The chat resource lives at a path that this server does not have.
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")


@pytest.mark.parametrize(
    "prompt, choices",
    [("a b", 1), (["a", "b c", "d"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
def test_prompt_shapes(server, prompt, choices):
    answer = complete(server, prompt=prompt, max_tokens=3, n=2, seed=1, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * choices))
    assert answer["usage"]["completion_tokens"] == 2 * choices * 3
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"x"', "{}", '{"prompt":7}', '{"prompt":[]}',
                                  '{"prompt":"x","max_tokens":-1}', "\xff", '{"prompt":"x"} x',
                                  '{"prompt":[1e99]}', '{"prompt":[[-1]]}', "[" * 100000])
def test_bad_bodies(server, body):
    answer = server.post(content=body.encode("latin-1"), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 2}, {"echo": True},
                                    {"temperature": 1.5, "top_p": 0.9}, {"stop": ["e", "th"]},
                                    {"prompt": ["a", "b"], "n": 2}])
def test_stream_equals_whole(server, fields):
    fields = {"seed": 11, "max_tokens": 24, **fields}
    whole = complete(server, **fields)
    events = stream(server, stream_options={"include_usage": True}, **fields)
    texts, reasons = joined(events)
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]


def test_seed_under_load(server):
    """The same text whatever else runs."""
    alone = complete(server, seed=5, max_tokens=20)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(complete, server, seed=i, n=4, prompt="x " * (i + 1)) for i in range(16)]
        again = [pool.submit(complete, server, seed=5, max_tokens=20) for _ in range(4)]
        assert {job.result()["choices"][0]["text"] for job in again} == {alone}
        [job.result() for job in others]


def test_tier_precedence(server):
    names, model = tiers(server), server.model["id"]
    last = names[-1]
    other = names[0]
    plain = complete(server)
    assert plain["quality"] == server.model["fathom"]["default_quality"]
    assert complete(server, quality=last)["quality"] == last
    suffixed = complete(server, model=f"{model}:{last}")
    assert suffixed["quality"] == last and suffixed["model"] == model
    header = {"X-Quality": last}
    assert server.complete(headers=header).json()["quality"] == last
    over_suffix = server.complete(headers=header, model=f"{model}:{other}")
    assert over_suffix.json()["quality"] == last
    over_header = server.complete(headers=header, quality=other)
    assert over_header.json()["quality"] == other
    assert server.complete(headers={"X-Quality": "splendid"}).status_code == 400
    twice = server.complete(headers=[("X-Quality", last), ("x-quality", "full")])
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "X-Quality")
    assert server.complete(headers=[("X-Quality", last)] * 2).json()["quality"] == last
    assert complete(server, quality="auto")["quality"] == plain["quality"]


def test_depth_of_tiers(server):
    """A shallower tier runs fewer sub-layers, and the answer says so."""
    run = [
        complete(server, quality=name, temperature=0, max_tokens=16, ignore_eos=True)["usage"]["depth"]
        for name in tiers(server)
    ]
    assert run[0]["sublayers_run"] == run[0]["sublayers_total"]
    assert run[-1]["sublayers_run"] < run[0]["sublayers_run"]


def test_long_prompt_goes_through_the_pool(server):
    """Longer than what is tokenized inline: the same ids, or the same error."""
    text = "the cat sat " * 800
    ids = server.post("/tokenize", json={"prompt": text}).json()["tokens"]
    by_text = server.complete(prompt=text, max_tokens=4, seed=1)
    by_ids = server.complete(prompt=ids, max_tokens=4, seed=1)
    assert by_text.status_code == by_ids.status_code
    if by_text.status_code == 200:
        assert by_text.json()["choices"] == by_ids.json()["choices"]
    else:
        assert by_text.json()["error"]["code"] == "context_length_exceeded"
        # Far too long a text is refused by its bytes, before it is tokenized.
        message = by_text.json()["error"]["message"]
        assert str(len(ids)) in message or "make at least" in message


def test_scoring(server):
    answer = complete(server, prompt="Once upon", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "Once upon"
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None and all(value <= 0 for value in values[1:])
    assert answer["usage"]["completion_tokens"] == 0


def test_tokenize_round_trip(server):
    for text in ("Once upon a time", "", "naïve ☃", "x" * 20000):
        answer = server.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert answer["count"] == len(answer["tokens"])
        back = server.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back["prompt"] == text


def test_queue_full_cancels_the_others(start_server):
    """More choices than the queue takes: 429, and what was accepted is given back."""
    server = start_server(max_sequences=1, queue_limit=4)
    busy = {"prompt": "x", "n": 4, "max_tokens": 100, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [job.result() for job in [pool.submit(server.complete, **busy) for _ in range(8)]]
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert "try again later" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    server.wait_idle()
    assert complete(server, max_tokens=1)["choices"]


def test_waiting_too_long(start_server):
    """Who does not get into a step in time is told so, and when to come back."""
    server = start_server(max_sequences=1, queue_timeout=0.01)
    slow = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [job.result() for job in [pool.submit(server.complete, **slow) for _ in range(8)]]
    assert {answer.status_code for answer in answers} == {200, 503}
    expired = [answer for answer in answers if answer.status_code == 503]
    assert all(answer.json()["error"]["code"] == "queue_timeout" for answer in expired)
    assert all(int(answer.headers["retry-after"]) > 0 for answer in expired)
    assert server.metric("fathom_requests_expired_total") == len(expired)


def test_a_stream_that_fails_says_why_in_the_log(start_server):
    """Its head went out when it was accepted: the status is 200, here and there."""
    server = start_server(max_sequences=1, queue_timeout=0.01, log_format="json")
    slow = {"prompt": "Two words", "max_tokens": 200, "ignore_eos": True}

    def read(number):
        return server.complete(**slow, stream=number > 0, headers={"X-Request-Id": f"wait-{number}"})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [answer.text for answer in pool.map(read, range(8))]
    late = [n for n, text in enumerate(texts) if "queue_timeout" in text]
    assert any(n > 0 for n in late) and len(late) < 8
    for n in range(8):
        server.wait_for(f'"wait-{n}"')
    lines = {line["id"]: line for line in map(json.loads, filter(None, server.lines)) if "id" in line}
    for n, text in enumerate(texts):
        line = lines[f"wait-{n}"]
        assert ("error" in line) == (n in late)
        assert line["prompt_tokens"] > 0
        assert line["completion_tokens"] == (0 if n in late else 200)
        if n in late:
            assert line["status"] == (503 if n == 0 else 200) and line["error"] in text
            assert n == 0 or text.endswith("data: [DONE]\n\n")


def test_depth_does_not_depend_on_when_the_engine_heard_of_a_stop(server):
    """Rows that run after a stop string matched are chance: they are no part of the usage."""
    fields = {"prompt": "hello", "seed": 1, "n": 4, "max_tokens": 100, "stop": [" "]}
    answers = [server.complete(**fields, ignore_eos=True).json() for _ in range(12)]
    assert answers[0]["usage"]["completion_tokens"] < 100
    assert all(answer["usage"]["depth"] == answers[0]["usage"]["depth"] for answer in answers)
