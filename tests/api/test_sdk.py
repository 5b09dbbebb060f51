"""The official Python SDK as programs use it: raw responses, retries, errors by class, timeouts,
leaving a stream, the asynchronous client. What completions and chats contain is judged in
test_completions.py and test_chat.py."""

import asyncio
import gc
import json
import signal
import time

import openai
import pytest

from test_lifecycle import SLOW_TO_LOAD

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
ENDLESS = {"n": 64, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


class Record:
    """What passed between the SDK and the server: the times of requests, the answers' heads."""

    def __init__(self, **arguments):
        self.requests, self.responses = [], []
        hooks = {"request": [lambda _: self.requests.append(time.monotonic())],
                 "response": [lambda r: self.responses.append((time.monotonic(), r))]}
        self.client = openai.OpenAI(api_key="none", base_url="http://localhost/v1", timeout=60,
                                    http_client=openai.DefaultHttpxClient(event_hooks=hooks),
                                    **arguments)

    def client_of(self, server, **arguments):
        return self.client.with_options(base_url=server.url + "/v1", **arguments)

    @property
    def statuses(self):
        return [response.status_code for _, response in self.responses]

    def waits(self):
        """Seconds asked for, seconds waited, before each further try."""
        return [(float(response.headers["retry-after"]), after - before)
                for (before, response), after in zip(self.responses, self.requests[1:])]


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def completion_fields(server, **fields):
    return {"model": server.model_id, "prompt": PROMPT, "max_tokens": 4, **fields}


def test_raw_responses(server, client):
    raw = client.completions.with_raw_response.create(
        **completion_fields(server), extra_headers={"X-Request-Id": "of my own"})
    assert raw.status_code == 200 and raw.headers["x-request-id"] == "of my own"
    assert raw.parse().usage.completion_tokens <= 4 and raw.parse()._request_id == "of my own"
    assert json.loads(raw.text)["object"] == "text_completion"
    raw = client.chat.completions.with_raw_response.create(
        model=server.model_id, messages=MESSAGES, max_tokens=4)
    assert raw.parse().choices[0].message.role == "assistant"
    with client.completions.with_streaming_response.create(
            **completion_fields(server), stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_stream_of_a_chat(server, client):
    """The SDK's accumulating helper, which takes an ending by length for a failure, makes the same
    of the chunks as the whole answer has."""
    fields = {"model": server.model_id, "messages": MESSAGES, "max_tokens": 200, "stop": "e",
              "seed": 4, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(
            **fields, stream_options={"include_usage": True}) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion()
    assert last.choices[0].message.content == whole.choices[0].message.content == "".join(texts)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage
    assert last.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_retry_while_loading(start_server):
    record = Record(max_retries=30)
    server = start_server(wait="listening", **SLOW_TO_LOAD)
    answer = record.client_of(server).completions.create(
        model="fathom-tiny", prompt=PROMPT, max_tokens=2)
    assert answer.choices and record.statuses[0] == 503 and record.statuses[-1] == 200
    assert all(waited >= asked for asked, waited in record.waits())


def test_retry_when_the_queue_is_full(start_server):
    server = start_server(max_sequences=1, queue_limit=64)
    record = Record(max_retries=30)
    with server.connect() as busy:
        body = json.dumps({**completion_fields(server), "n": 64, "max_tokens": 40,
                           "ignore_eos": True}).encode()
        busy.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                     % len(body) + body)
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            record.client_of(server, max_retries=0).completions.create(
                **completion_fields(server, n=64, max_tokens=1))
        assert caught.value.code == "server_overloaded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        answer = record.client_of(server).completions.create(**completion_fields(server, n=64, max_tokens=1))
    assert len(answer.choices) == 64
    assert record.statuses[:2] == [429, 429] and record.statuses[-1] == 200
    assert all(waited >= asked for asked, waited in record.waits()[1:])


def test_a_mistake_is_not_retried(server):
    record = Record(max_retries=5)
    with pytest.raises(openai.BadRequestError):
        record.client_of(server).completions.create(**completion_fields(server, temperature=3))
    assert record.statuses == [400]


# What is called with which extra arguments, the class, status and param.
ERRORS = [
    ({"temperature": 3}, openai.BadRequestError, 400, "temperature"),
    ({"extra_body": {"quality": "splendid"}}, openai.BadRequestError, 400, "quality"),
    ({"model": "nobody"}, openai.NotFoundError, 404, "model"),
    ({"extra_headers": {"Content-Type": "text/plain"}}, openai.APIStatusError, 415, None),
    ({"extra_headers": {"Expect": "tea"}}, openai.APIStatusError, 417, None),
    ({"extra_headers": {"A": "x" * 40000}}, openai.APIStatusError, 431, None),
    ({"prompt": "x" * (17 << 20)}, openai.APIStatusError, 413, None),
]


@pytest.mark.parametrize("fields, error, status, param", ERRORS, ids=[row[2] for row in ERRORS])
def test_errors(server, client, fields, error, status, param):
    with pytest.raises(error) as caught:
        client.completions.create(**completion_fields(server, **fields))
    found = caught.value
    assert (type(found), found.status_code, found.param) == (error, status, param)
    assert found.type == "invalid_request_error" and found.body["message"] in str(found)
    assert found.request_id == found.response.headers["x-request-id"]


def test_errors_of_other_calls(start_server, server, client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.get("/completions", cast_to=object)
    assert caught.value.status_code == 405
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    locked = start_server(environment={"FATHOM_API_KEY": "alpha"})
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.client(api_key="beta").models.list()
    assert caught.value.code == "invalid_api_key"
    assert locked.client(api_key="alpha").models.list().data


def test_end_of_the_server(start_server):
    """A stream that a stopping server cuts ends with an error; a new request gets a 503."""
    server = start_server(max_sequences=1, queue_limit=4096, drain_timeout=1)
    model = server.model_id
    stream = server.client().completions.create(model=model, stream=True, **{
        **ENDLESS, "prompt": PROMPT, "n": 128})
    next(iter(stream))
    idle = server.client()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("termination: finishing")
    with pytest.raises(openai.InternalServerError) as caught:
        idle.completions.create(model=model, prompt=PROMPT)
    assert (caught.value.status_code, caught.value.code) == (503, "draining")
    with pytest.raises(openai.APIError, match="shutting down"):
        for _ in stream:
            pass
    assert server.stop() == 0


def test_timeout_cancels(server, client):
    before = server.metric("fathom_requests_cancelled_total")
    for call, subject in ((client.completions, {"prompt": PROMPT}),
                          (client.chat.completions, {"messages": MESSAGES})):
        with pytest.raises(openai.APITimeoutError):
            call.create(model=server.model_id, timeout=0.3, **subject, **ENDLESS)
    server.wait_idle()
    assert server.metric("fathom_requests_cancelled_total") > before


@pytest.mark.parametrize("leave", ["break", "close", "with", "raise"])
def test_leaving_a_stream_cancels(server, client, leave):
    def begin():
        return client.completions.create(
            model=server.model_id, prompt=PROMPT, stream=True, **ENDLESS)

    before = server.metric("fathom_requests_cancelled_total")
    if leave == "break":
        for _ in begin():
            break
        gc.collect()  # a stream of this client is in a cycle: leaving the loop does not free it
    elif leave == "close":
        stream = begin()
        next(stream)
        stream.close()
    elif leave == "with":
        with begin() as stream:
            next(stream)
    else:
        with pytest.raises(KeyError), begin() as stream:
            raise KeyError(next(stream).id)
    server.wait_idle()
    assert server.metric("fathom_requests_cancelled_total") > before
    assert client.completions.create(**completion_fields(server)).choices


def test_asynchronous_client(server):
    async def work():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none",
                                      max_retries=0, timeout=60) as client:
            async def text_of_stream(seed):
                stream = await client.completions.create(
                    **completion_fields(server, seed=seed, max_tokens=16), stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def text(seed):
                answer = await client.completions.create(
                    **completion_fields(server, seed=seed, max_tokens=16))
                return answer.choices[0].text

            streamed = await asyncio.gather(*map(text_of_stream, range(8)))
            whole = await asyncio.gather(*map(text, range(8)))
            assert streamed == whole

            endless = {"model": server.model_id, "prompt": PROMPT, **ENDLESS}
            async for _ in await client.completions.create(**endless, stream=True):
                break
            for stream in (False, True):
                task = asyncio.create_task(client.completions.create(**endless, stream=stream))
                await asyncio.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                    raise asyncio.CancelledError  # a stream has begun by now: it is dropped
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**completion_fields(server, n=0))

    asyncio.run(work())
    server.wait_idle()
