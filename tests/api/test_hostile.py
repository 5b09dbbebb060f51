"""A hostile corpus: each input is refused with the 4xx that it earns, by the name of the field at
fault, within a second; the next request is served and the server is healthy.

The unit tests try every field and type (test_api_request.c, test_api_chat.c), test_http.py the
framing of HTTP; here is what attackers send first, and both sides of every limit, over the wire.
Limits of number and time (connections, requests waiting, timeouts, bytes unread) are met in
test_http.py, test_completions.py, test_pressure.py and test_disconnect.py.
"""

import json
import threading
import time

import httpx
import pytest

from conftest import read_response

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MIB = 1 << 20


def many(item, count):
    return "[" + ",".join([item] * count) + "]"


def bias(count):
    return "{" + ",".join(f'"{i}":1' for i in range(count)) + "}"


def deep(levels):
    return "[" * (levels - 1) + "]" * (levels - 1)  # the body's object is a level too


WORD = '"x"'
MESSAGE = '{"role":"user","content":"x"}'

# What a field refuses, as JSON: 400 by the field's name. In capitals, what `words` replaces.
VALUES = {
    "prompt": ["null", "[]", "5", '{"text":"x"}', many("[5]", 257)],
    "quality": ['"splendid"', '"full\\u0000"', f'"{"x" * MIB}"'],
    "top_k": ["-1", "2147483648", "0.01"],
    "n": ["0", "-1", "129", "1000000", '"3"'],
    "best_of": ["129"],
    "logprobs": ["-1", "21", "1000000000", '"5"'],
    "max_tokens": ["-1", "0", "2147483648", "1e308"],
    "max_completion_tokens": ["2147483648"],
    "temperature": ["2.001", "-1", "1e30", '"hot"', "NaN", "-Infinity"],
    "top_p": ["0", "1.001"],
    "min_p": ["-0.001", "1.1"],
    "presence_penalty": ["2.1", "-2.1"],
    "frequency_penalty": ["2.1", "-2.1"],
    "repetition_penalty": ["2.1", "0"],
    "seed": ["9223372036854775808", "-9223372036854775809"],
    "priority": ["-2147483649", "2147483648"],
    "logit_bias": ['{"the":1}', '{"-1":1}', '{"VOCABULARY":1}', '{"18446744073709551621":1}',
                   '{"5":100.1}', '{"5":-100.1}', '{"5":1e999}', '{"5":1,"5":2}', bias(1025)],
    "stop": [many(WORD, 17), many(WORD, 100000), f'"{"é" * 512}x"', f'"{"x" * 1000000}"'],
    "stop_token_ids": [many("5", 65)],
    "cache_salt": [f'"{"x" * 257}"', '"a\\u0000b"'],
    "stream_options": ['{"include_usage":true}'],  # without stream
    "suffix": ['"x"'],
    "tools": ["[{}]"],
    "response_format": ['{"type":"json_object"}'],
}

# The same where an element is at fault: field, element, value.
ELEMENTS = [
    ("prompt", "[0]", "[[]]"),
    ("prompt", "[1]", '["a",1]'),
    ("prompt", "[0]", "[-1]"),
    ("prompt", "[1]", "[5,VOCABULARY]"),
    ("prompt", "[0]", "[9223372036854775808]"),
    ("prompt", "[0]", "[1.5]"),
    ("prompt", "[1]", "[5,true]"),
    ("prompt", "[0]", "[2147483648]"),
    ("prompt", "[1][0]", "[[5],[-9223372036854775809]]"),
    ("stop", "[0]", '[""]'),
    ("stop", "[0]", f'["{"x" * MIB}"]'),
    ("stop_token_ids", "[0]", "[VOCABULARY]"),
]

# name, members of a completion (or a whole body, from its "!" on), the field that the 400 names.
# Where the text itself cannot be read, the field is the one in which reading ends.
COMPLETIONS = [
    ("no prompt", '!{"model":"MODEL"}', "prompt"),
    ("no model", '!{"prompt":"x"}', "model"),
    ("unknown tier in the model's name", '"model":"MODEL:splendid"', "model"),
    ("more choices than the queue", f'"prompt":{many("[5]", 256)},"n":128', "n"),
    ("context + 1", '"prompt":[5IDS+1],"max_tokens":0,"echo":true', "prompt"),
    ("context and one token", '"prompt":[5IDS],"max_tokens":1', "prompt"),
    ("context - 1 and two tokens", '"prompt":[5IDS-1],"max_tokens":2', "max_tokens"),
    ("min_tokens over max_tokens", '"max_tokens":4,"min_tokens":5', "min_tokens"),
    ("two lengths", '"max_tokens":3,"max_completion_tokens":4', "max_completion_tokens"),
    ("best_of not n", '"n":1,"best_of":2', "best_of"),
    ("no body", "!", ""),
    ("array", "![]", ""),
    ("text", '!"x"', ""),
    ("null", "!null", ""),
    ("array of requests", '![{"model":"MODEL","prompt":"x"}]', ""),
    ("cut off in a text", '!{"model":"MODEL","prompt":"x', "prompt"),
    ("cut off in a list", '!{"model":"MODEL","prompt":[5,', "prompt"),
    ("cut off behind a key", '!{"model":"MODEL","prompt"', "prompt"),
    ("cut off between members", '!{"model":"MODEL",', ""),
    ("two bodies", '!{"model":"MODEL","prompt":"x"}{"model":"MODEL","prompt":"x"}', ""),
    ("a key twice", '"max_tokens":1,"max_tokens":2', "max_tokens"),
    ("a key twice, escaped", '"max_tokens":1,"max_t\\u006fkens":2', ""),
    ("a key twice, inside", '"metadata":{"a":1,"b":2,"a":3}', "metadata"),
    ("65 deep", f'"user":{deep(65)}', ""),
    ("200 000 deep", "!" + "[" * 200000, ""),
    ("200 000 deep objects", "!" + '{"a":' * 200000, ""),
    ("65 537 arrays and objects", f'"user":{many("[]", 65535)}', ""),
    ("more than 2^21 values", f'"user":{many("0", (1 << 21) + 1)}', ""),
    ("NUL in a key", '"a\\u0000b":1', ""),
    ("NUL, bare", '"user":"\0"', "user"),
    ("lone surrogate", '"prompt":"\\ud800"', "prompt"),
    ("surrogates the wrong way round", '"prompt":"\\udc00\\ud800"', "prompt"),
    ("lone surrogate in a key", '"\\ud800":1', ""),
    ("not UTF-8", b'!{"model":"MODEL","prompt":"\xff"}', "prompt"),
    ("surrogate in UTF-8", b'!{"model":"MODEL","prompt":"\xed\xa0\x80"}', "prompt"),
    ("UTF-16", "!" + '{"prompt":"x"}'.encode("utf-16").decode("latin-1"), ""),
]

CHAT_VALUES = {
    "messages": ["[]", '"x"', many(MESSAGE, 1025), '[{"role":"user","content":"\\udfff"}]',
                 f'[{{"role":"user","content":"{"x! " * 3000}"}}]'],  # longer than the context
    "quality": ['"splendid"'],
    "temperature": ["1e30"],
    "max_tokens": ["0"],
    "max_completion_tokens": ["-1"],
    "logprobs": ["5"],
    "top_logprobs": ["2"],  # without logprobs
    "n": ["129"],
    "tools": ["[{}]"],
}

CHAT_ELEMENTS = [
    ("messages", "[0]", '["x"]'),
    ("messages", "[0].role", '[{"content":"x"}]'),
    ("messages", "[0].role", '[{"role":"tool","content":"x"}]'),
    ("messages", "[0].role", '[{"role":"user\\u0000","content":"x"}]'),
    ("messages", "[0].content", '[{"role":"user"}]'),
    ("messages", "[0].content", '[{"role":"user","content":[]}]'),
    ("messages", "[0].content[0].type", '[{"role":"user","content":[{"type":"image_url"}]}]'),
    ("stop", "[0]", '[""]'),
]

CHATS = [
    ("no messages", '!{"model":"MODEL"}', "messages"),
    ("a key twice", '"n":1,"n":2', "n"),
    ("top_logprobs 21", '"logprobs":true,"top_logprobs":21', "top_logprobs"),
]


def refused(path, values=(), elements=(), named=()):
    """name, path, text, status, field of every row of the tables."""
    rows = [(field, "", value) for field in values for value in values[field]] + list(elements)
    return [(f"{field} {value[:40]}", path, f'"{field}":{value}', 400, field + element)
            for field, element, value in rows] + [(name, path, text, 400, field)
                                                  for name, text, field in named]


ROWS = refused("/v1/completions", VALUES, ELEMENTS, COMPLETIONS)
ROWS += refused("/v1/chat/completions", CHAT_VALUES, CHAT_ELEMENTS, CHATS)
ROWS += refused("/tokenize", named=[("nothing", "!{}", "prompt"),
                                    ("a list", '!{"prompt":["x"]}', "prompt")])
ROWS += refused("/detokenize", named=[
    ("nothing", "!{}", "tokens"),
    ("-1", '!{"tokens":[5,-1]}', "tokens[1]"),
    ("the vocabulary's size", '!{"tokens":[VOCABULARY]}', "tokens[0]"),
    ("2^64", '!{"tokens":[18446744073709551616]}', "tokens[0]"),
])
ROWS += [
    ("another model", "/v1/completions", '"model":"gpt-4"', 404, "model"),
    ("model's name and NUL", "/v1/completions", '"model":"MODEL\\u0000"', 404, "model"),
    ("another model", "/tokenize", '!{"prompt":"x","model":"gpt-4"}', 404, "model"),
    ("16 MiB and 1", "/v1/completions", "!" + " " * (16 * MIB + 1), 413, ""),
]


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def words(client):
    """What the words in a row stand for, asked of the server."""
    model = client.get("/v1/models").json()["data"][0]
    message = client.post("/detokenize", json={"tokens": [-1]}).json()["error"]["message"]
    last, context = int(message.split("from 0 to ")[1].split(",")[0]), model["max_model_len"]
    return {"MODEL": model["id"], "VOCABULARY": str(last + 1), "LAST": str(last),
            "IDS+1": ",5" * context, "IDS-1": ",5" * (context - 2), "IDS": ",5" * (context - 1)}


def whole_body(words, path, text):
    """A row's body as bytes: its words replaced, its members put behind those that are missing."""
    if isinstance(text, bytes):
        return text[1:].replace(b"MODEL", words["MODEL"].encode())
    if not text.startswith("!"):
        subject = f'"messages":[{MESSAGE}]' if "chat" in path else '"prompt":"x"'
        missing = [member for member in ('"model":"MODEL"', subject)
                   if not text.startswith(member.split(":")[0] + ":")]
        text = f"!{{{','.join([*missing, text])}}}"
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text[1:].encode("utf-8", "surrogatepass")


def within_a_second(ask):
    """What is asked for, from the first of three times that took no longer: the machine may be
    busy for a while, but a server that needs longer always does."""
    for _ in range(3):
        start = time.monotonic()
        answer = ask()
        seconds = time.monotonic() - start
        if seconds < 1:
            return answer
    raise AssertionError(f"it took {seconds:.1f} s")


def check_alive(server, client):
    fields = {"model": server.model_id, "prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=fields).status_code == 200
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path, body, status, field", [row[1:] for row in ROWS],
                         ids=[f"{row[1]}: {row[0]}" for row in ROWS])
def test_refused(server, client, words, path, body, status, field):
    body = whole_body(words, path, body)
    header = {"Content-Type": "application/json"}
    answer = within_a_second(lambda: client.post(path, content=body, headers=header))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"] or "") == (status, field), error
    assert field in error["message"] and error["type"] == "invalid_request_error"
    check_alive(server, client)


def test_tier_of_the_header(server, client):
    fields = {"model": server.model_id, "prompt": "x", "max_tokens": 1}
    for tier in ("splendid", "x" * 20000, "full, fast", "caf\xe9".encode("latin-1")):
        answer = client.post("/v1/completions", json=fields, headers={"X-Quality": tier})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Quality")
    check_alive(server, client)


# Values that stand exactly at the limit; VALUES has what stands beyond it.
SERVED_VALUES = {
    "prompt": ["[0,LAST]", '""', '"a\\u0000b"'],
    "priority": ["-2147483648", "2147483647"],
    "min_tokens": ["16"],
    "temperature": ["0", "2"],
    "top_p": ["1e-300", "1"],
    "top_k": ["2147483647"],
    "min_p": ["0", "1"],
    "seed": ["-9223372036854775808", "9223372036854775807"],
    "logprobs": ["20"],
    "logit_bias": [bias(1024), '{"LAST":100,"0":-100}'],
    "stop": [many(f'"{"é" * 512}"', 16)],
    "stop_token_ids": [many("LAST", 64)],
    "cache_salt": [f'"{"é" * 128}"'],
    # Of JSON: depth, arrays and objects, values.
    "user": [deep(64), many("[]", 65534), many("0", (1 << 21) - 2)],
}
FILLED = '"user":"what makes it long stands in front"'
SERVED = [(f"{field} {value[:40]}", f'"{field}":{value}')
          for field in SERVED_VALUES for value in SERVED_VALUES[field]]
SERVED += [
    ("context and nothing more", '"prompt":[5IDS],"max_tokens":0,"echo":true,"logprobs":0'),
    ("context - 1 and one token", '"prompt":[5IDS-1],"max_tokens":1'),
    ("256 prompts", f'"prompt":{many("[5]", 256)},"max_tokens":1'),
    ("as many choices as the queue holds", f'"prompt":{many("[5]", 8)},"n":128,"max_tokens":1'),
    ("n 128", '"n":128,"best_of":128,"max_tokens":1'),
    ("penalties -2", '"presence_penalty":-2,"frequency_penalty":-2,"repetition_penalty":1e-300'),
    ("penalties 2", '"presence_penalty":2,"frequency_penalty":2,"repetition_penalty":2'),
    ("key of 3 MiB, which nobody knows", f'"{"x" * 3 * MIB}":1'),
    ("16 MiB", FILLED),
]


@pytest.mark.parametrize("text", [row[1] for row in SERVED], ids=[row[0] for row in SERVED])
def test_served_at_the_limit(server, client, words, text):
    body = whole_body(words, "/v1/completions", text)
    if text == FILLED:
        body = b" " * (16 * MIB - len(body)) + body
    answer = client.post("/v1/completions", content=body,
                         headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    check_alive(server, client)


def test_limits_that_flags_set(start_server):
    """The most tokens that the KV budget holds, the most choices that the queue holds."""
    server = start_server(kv_budget="1MiB", queue_limit=6)
    room = server.model["fathom"]["max_sequence"]
    assert room < server.model["max_model_len"]
    ids = [5] * (room - 1)
    assert server.complete(prompt=ids, max_tokens=1).status_code == 200
    answer = server.complete(prompt=ids, max_tokens=2)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "kv_budget_exceeded")
    assert str(room) in error["message"]
    for count, n, status, field in ((3, 2, 200, None), (7, 1, 400, "prompt"), (1, 7, 400, "n")):
        answer = server.complete(prompt=["x"] * count, n=n, max_tokens=1)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["param"] == field
    server.wait_idle()


OPTIONAL = """\
add_generation_prompt best_of cache_salt continue_final_message echo frequency_penalty ignore_eos
logit_bias logprobs max_completion_tokens max_tokens metadata min_p min_tokens n presence_penalty
priority quality repetition_penalty response_format return_depth seed service_tier stop
stop_token_ids store stream stream_options suffix temperature tool_choice tools top_k top_logprobs
top_p user""".split()


def test_every_optional_field_null(server, client):
    """Null is the same as absence: one by one, and all at once."""
    for name in OPTIONAL:
        fields = {"model": server.model_id, "prompt": "x", "max_tokens": 1, name: None}
        assert client.post("/v1/completions", json=fields).status_code == 200, name
    fields = {name: None for name in OPTIONAL} | {"model": server.model_id}
    plain = server.complete(seed=1)
    answer = server.complete(**{**fields, "seed": 1, "max_tokens": 12})
    assert answer.json()["choices"] == plain.json()["choices"]
    fields = {**fields, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", json=fields)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1


# What is never all read is refused before it is all sent.
RAW = [
    ("head of 5 MiB", HEAD + b"A: " + b"x" * (5 * MIB), 431),
    ("head of 5 MiB in fields", HEAD + b"A: b\r\n" * MIB, 431),
    ("head of 32 KiB and 1", HEAD + b"A: " + b"x" * (32769 - len(HEAD) - 7) + b"\r\n\r\n", 431),
    ("65 fields", HEAD + b"A: b\r\n" * 63 + b"\r\n", 431),
    ("target of 8193 bytes", b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    ("length of 16 MiB and 1", HEAD + b"Content-Length: 16777217\r\n\r\n", 413),
    ("length of 100 MiB", HEAD + b"Content-Length: 104857600\r\n\r\n", 413),
    ("100 MiB", HEAD + b"Content-Length: 104857600\r\n\r\n" + b" " * (100 * MIB), 413),
    ("100 MiB in chunks", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" +
     (b"100000\r\n" + b" " * MIB + b"\r\n") * 100, 413),
    ("length of 2^63", HEAD + b"Content-Length: 9223372036854775808\r\n\r\n", 413),
    ("length of 2^64", HEAD + b"Content-Length: 18446744073709551616\r\n\r\n", 400),
    ("negative length", HEAD + b"Content-Length: -1\r\n\r\n", 400),
    ("line folded", HEAD + b"A: b\r\n c: d\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("length folded", HEAD + b"Content-Length:\r\n 2\r\n\r\n{}", 400),
    ("lone CR", HEAD + b"A: b\rContent-Length: 2\r\n\r\n{}", 400),
    ("bare LF", HEAD + b"A: b\nContent-Length: 2\r\n\r\n{}", 400),
    ("bare LF at the end", HEAD + b"Content-Length: 2\n\n{}", 400),
]

# A request that a proxy in front may have ended elsewhere: nothing behind it is answered.
SMUGGLED = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: %d\r\n"
PAIRS = [
    ("two lengths", LENGTH % 2 + LENGTH % 40 + b"\r\n{}"),
    ("two equal lengths", LENGTH % 2 + LENGTH % 2 + b"\r\n{}"),
    ("list of lengths", b"Content-Length: 2, 2\r\n\r\n{}"),
    ("length with a sign", b"Content-Length: +2\r\n\r\n{}"),
    ("length with a blank in it", b"Content-Length: 0 2\r\n\r\n{}"),
    ("length, a blank before the colon", b"Content-Length : 2\r\n\r\n{}"),
    ("length, a NUL before the colon", b"Content-Length\0: 2\r\n\r\n{}"),
    ("length and chunks", LENGTH % 2 + CHUNKS + b"\r\n0\r\n\r\n"),
    ("chunks and length", CHUNKS + LENGTH % 2 + b"\r\n0\r\n\r\n"),
    ("chunks twice", CHUNKS * 2 + b"\r\n0\r\n\r\n"),
    ("chunks and identity", CHUNKS + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n"),
    ("chunks, identity", b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    ("chunks by another name", b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("chunks, quoted", b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n'),
    ("chunks, a vertical tab", b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    ("chunks, a blank before the colon", b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    ("chunks on a folded line", b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
    ("chunk size with a blank", CHUNKS + b"\r\n 2\r\n{}\r\n0\r\n\r\n"),
    ("chunk size and a blank", CHUNKS + b"\r\n2 \r\n{}\r\n0\r\n\r\n"),
    ("chunk size with a prefix", CHUNKS + b"\r\n0x2\r\n{}\r\n0\r\n\r\n"),
    ("chunk size, negative", CHUNKS + b"\r\n-2\r\n{}\r\n0\r\n\r\n"),
    ("chunk size, with a sign", CHUNKS + b"\r\n+2\r\n{}\r\n0\r\n\r\n"),
    ("chunk size of 2^64 + 2", CHUNKS + b"\r\n10000000000000002\r\n{}\r\n0\r\n\r\n"),
    ("chunk size, bare LF", CHUNKS + b"\r\n2\n{}\r\n0\r\n\r\n"),
    ("chunk size, lone CR", CHUNKS + b"\r\n2\r{}\r\n0\r\n\r\n"),
    ("chunk extension, bare LF", CHUNKS + b"\r\n2;a\n{}\r\n0\r\n\r\n"),
    ("chunk without its end", CHUNKS + b"\r\n2\r\n{}0\r\n\r\n"),
    ("trailer, bare LF", CHUNKS + b"\r\n2\r\n{}\r\n0\r\nA: b\n\r\n"),
]
RAW += [(name, HEAD + rest + SMUGGLED, 400) for name, rest in PAIRS]


def answer_to(server, data):
    """The first response to the bytes, and what comes behind it. Sending goes on all the while."""
    def send():
        try:
            connection.sendall(data)
        except OSError:
            pass  # refused before it was all sent

    with server.connect() as connection:
        sender = threading.Thread(target=send)
        sender.start()
        status, _, body = read_response(connection)
        yield status, body
        rest = b""
        try:
            while piece := connection.recv(65536):
                rest += piece
        except ConnectionError:
            pass
        sender.join()
    yield rest


@pytest.mark.parametrize("data, status", [row[1:] for row in RAW], ids=[row[0] for row in RAW])
def test_raw_refused(server, client, data, status):
    exchanges = []

    def ask():
        exchanges.append(answer_to(server, data))
        return next(exchanges[-1])

    got, body = within_a_second(ask)
    assert got == status, body
    assert json.loads(body)["error"]["message"]
    for exchange in exchanges:
        assert next(exchange) == b"", "an answer to what stood behind the refused request"
    check_alive(server, client)


def padded(size):
    """A request whose head has so many bytes."""
    head = b"GET /version HTTP/1.1\r\nHost: x\r\n"
    return head + b"A: " + b"x" * (size - len(head) - 7) + b"\r\n\r\n"


@pytest.mark.parametrize("data", [
    padded(32768),
    b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 63 + b"\r\n",
    b"GET /version?" + b"x" * (8192 - 9) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"x" * 128 + b"\r\n\r\n",
], ids=["head of 32 KiB", "64 fields", "target of 8 KiB", "request id of 128"])
def test_head_at_the_limit(server, client, data):
    with server.connect() as connection:
        connection.sendall(data)
        status, headers, _ = read_response(connection)
    assert status == 200
    assert (headers["x-request-id"] == "x" * 128) == (b"X-Request-Id" in data)
    check_alive(server, client)


def test_request_inside_a_body(server):
    """Bytes that a body's length covers are never a request, wanted or not."""
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: last\r\n\r\n"
    for first, status in ((b"GET /version HTTP/1.1\r\nHost: x\r\n", 200),
                          (b"DELETE /version HTTP/1.1\r\nHost: x\r\n", 405),
                          (b"POST /nothing HTTP/1.1\r\nHost: x\r\n", 404), (HEAD, 400)):
        for body in (b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
                     CHUNKS + b"\r\n%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n0\r\n\r\n"):
            with server.connect() as connection:
                connection.sendall(first + body + last)
                assert read_response(connection)[0] == status
                assert read_response(connection)[1]["x-request-id"] == "last"


def test_chunks_without_end(start_server):
    """Chunks that stop coming, or come slowly, end with the time that a body has."""
    server = start_server(body_timeout=0.5)
    for piece in (b"", b"2\r\n{", b"2\r\n{}\r\n", b"2\r\n{}\r\n0\r\n", b"2;" + b"x" * 5000):
        with server.connect() as connection:
            connection.sendall(HEAD + CHUNKS + b"\r\n" + piece)
            status, headers, _ = read_response(connection)
            assert (status, headers["connection"]) == (408, "close")
    with server.connect() as connection:
        connection.sendall(HEAD + CHUNKS + b"\r\n")
        deadline = time.monotonic() + 30
        connection.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < deadline:
            connection.sendall(b"1\r\n \r\n")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                pass
        assert answer.startswith(b"HTTP/1.1 408 ")
    assert server.complete(max_tokens=1).status_code == 200
