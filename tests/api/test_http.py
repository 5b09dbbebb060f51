"""HTTP itself, over raw sockets: what is accepted, what is refused, in which order, and when."""

import json
import socket
import time

import pytest

from conftest import read_response

HOST = b"Host: x\r\n"
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST
GET = b"GET /version HTTP/1.1\r\n" + HOST
BODY = b'{"prompt":"a"}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def length(body=BODY):
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


# name, bytes, status
TABLE = [
    ("plain", GET + b"\r\n", 200),
    ("leading empty lines", b"\r\n\r\n" + GET + b"\r\n", 200),
    ("1.0 without Host", b"GET /version HTTP/1.0\r\n\r\n", 200),
    ("absolute form", b"GET http://x/version HTTP/1.1\r\n" + HOST + b"\r\n", 200),
    ("absolute form of https", b"GET https://x/version HTTP/1.1\r\n" + HOST + b"\r\n", 200),
    ("query", b"GET /version?a=b HTTP/1.1\r\n" + HOST + b"\r\n", 200),
    ("upgrade is declined", GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
    ("body of GET is ignored", GET + length(), 200),
    ("HEAD", b"HEAD /version HTTP/1.1\r\n" + HOST + b"\r\n", 200),
    ("options", b"OPTIONS /tokenize HTTP/1.1\r\n" + HOST + b"\r\n", 204),
    ("options of everything", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 204),
    ("post", POST + JSON + length(), 200),
    ("post without type", POST + length(), 200),
    ("post with charset", POST + b"Content-Type: Application/JSON; charset=utf-8\r\n" + length(), 200),
    ("chunked", CHUNKED + b"7\r\n" + BODY[:7] + b"\r\n7;e=1\r\n" + BODY[7:] + b"\r\n0\r\n\r\n", 200),
    ("trailer", CHUNKED + b"e\r\n" + BODY + b"\r\n0\r\nA: b\r\n\r\n", 200),
    ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
    ("zeros", b"\0" * 64, 400),
    ("no version", b"GET /\r\n\r\n", 400),
    ("no target", b"GET\r\n\r\n", 400),
    ("two spaces", b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("trailing space", b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
    ("leading space", b" GET / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("tab in target", b"GET /\t HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("raw UTF-8 in target", b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("fragment", b"GET /#a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("relative target", b"GET version HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("asterisk for GET", b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("method with @", b"G@T / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("lower-case version", b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
    ("version 11", b"GET / HTTP/11\r\n" + HOST + b"\r\n", 400),
    ("bare line feeds", b"GET / HTTP/1.1\nHost: x\n\n", 400),
    ("bare carriage return", b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n", 400),
    ("CR CR LF", b"GET / HTTP/1.1\r\nHost: x\r\r\n\r\n", 400),
    ("folded line", GET + b"A: b\r\n c\r\n\r\n", 400),
    ("first line folded", b"GET / HTTP/1.1\r\n A: b\r\n" + HOST + b"\r\n", 400),
    ("space before colon", GET + b"A : b\r\n\r\n", 400),
    ("space in name", GET + b"A b: c\r\n\r\n", 400),
    ("empty name", GET + b": c\r\n\r\n", 400),
    ("no colon", GET + b"abc\r\n\r\n", 400),
    ("NUL in value", GET + b"A: b\0c\r\n\r\n", 400),
    ("escape in value", GET + b"A: \x1b[0m\r\n\r\n", 400),
    ("high byte in name", GET + b"\xc3: b\r\n\r\n", 400),
    ("no Host", b"GET /version HTTP/1.1\r\n\r\n", 400),
    ("Host with a port", b"GET /version HTTP/1.1\r\nHost: [::1%25en0]:8080\r\n\r\n", 200),
    ("empty Host", b"GET /version HTTP/1.1\r\nHost:\r\n\r\n", 200),
    ("Host with a user", b"GET /version HTTP/1.1\r\nHost: c@d\r\n\r\n", 400),
    ("Host with a path", b"GET /version HTTP/1.1\r\nHost: b/c\r\n\r\n", 400),
    ("Host with a space", b"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    ("Host beyond ASCII", b"GET /version HTTP/1.1\r\nHost: \xc3\xa9\r\n\r\n", 400),
    ("two Hosts", GET + HOST + b"\r\n", 400),
    ("length twice, same", POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
    ("length twice, different", POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", 400),
    ("length list", POST + b"Content-Length: 1, 1\r\n\r\na", 400),
    ("length with sign", POST + b"Content-Length: +1\r\n\r\na", 400),
    ("negative length", POST + b"Content-Length: -1\r\n\r\n", 400),
    ("hexadecimal length", POST + b"Content-Length: 0x1\r\n\r\na", 400),
    ("empty length", POST + b"Content-Length: \r\n\r\n", 400),
    ("length over 64 bits", POST + b"Content-Length: 18446744073709551617\r\n\r\n", 400),
    ("length and chunked", POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("chunked and length", POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    ("chunked twice", POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("chunked in 1.0", b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("chunk size not a number", CHUNKED + b"zz\r\n", 400),
    ("chunk size negative", CHUNKED + b"-1\r\n", 400),
    ("chunk size too long", CHUNKED + b"f" * 17 + b"\r\n", 400),
    ("chunk without end", CHUNKED + b"1\r\nab\r\n", 400),
    ("chunk line bare LF", CHUNKED + b"1\na\n0\n\n", 400),
    ("endless chunk extension", CHUNKED + b"1;" + b"x" * 1300000, 400),
    ("bad JSON", POST + length(b"{"), 400),
    ("unknown path", b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    ("path with dots", b"GET /../version HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    ("unknown model", b"GET /v1/models/x%2Fy HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    ("bad escape", b"GET /v1/models/%zz HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("GET of POST", b"GET /tokenize HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ("POST of GET", b"POST /version HTTP/1.1\r\n" + HOST + length(), 405),
    ("DELETE", b"DELETE /version HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ("unknown method", b"FETCH / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ("lower-case method", b"get / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ("CONNECT", b"CONNECT /x HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ("no length", POST + b"\r\n", 411),
    ("body too long", POST + b"Content-Length: 99999999\r\n\r\n", 413),
    ("chunk too long", CHUNKED + b"fffffff\r\n" + b"x" * 65536 * 300, 413),
    ("chunk of 64 bits", CHUNKED + b"f" * 16 + b"\r\n", 413),
    ("target too long", b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    ("endless request line", b"GET /" + b"x" * 40000, 414),
    ("form", POST + b"Content-Type: application/x-www-form-urlencoded\r\n" + length(), 415),
    ("charset in quotes", POST + b'Content-Type: application/json;a="b" ; Charset="UTF-8"\r\n' + length(), 200),
    ("another charset", POST + b"Content-Type: application/json; charset=utf-16\r\n" + length(), 415),
    ("empty charset", POST + b"Content-Type: application/json;a=b;charset=\r\n" + length(), 415),
    ("compressed", POST + b"Content-Encoding: gzip\r\n" + length(), 415),
    ("unknown expectation", POST + b"Expect: tea\r\n" + length(), 417),
    ("header too long", GET + b"A: " + b"x" * 40000 + b"\r\n\r\n", 431),
    ("65 fields", GET + b"A: b\r\n" * 64 + b"\r\n", 431),
    ("gzip coding", POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ("HTTP/1.2", b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505),
    ("HTTP/0.9", b"GET / HTTP/0.9\r\n\r\n", 505),
]


@pytest.mark.parametrize("data, status", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(server, data, status):
    with server.connect() as connection:
        try:
            connection.sendall(data)
        except ConnectionError:
            pass  # refused before it was all sent: the answer is there to be read
        if data.startswith(b"HEAD"):
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            return
        got, headers, body = read_response(connection)
    assert got == status, body
    assert headers["x-request-id"]
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if status == 505:
        assert headers["x-should-retry"] == "false"
    if status == 405:
        assert "OPTIONS" in headers["allow"]


def test_table_in_single_bytes(server):
    """The pieces in which a request arrives do not matter."""
    for name, data, status in TABLE[:12] + TABLE[20:60]:
        if len(data) > 400 or data.startswith(b"HEAD"):
            continue
        with server.connect() as connection:
            try:
                for byte in data:
                    connection.send(bytes([byte]))
            except ConnectionError:
                pass
            assert read_response(connection)[0] == status, name


def test_head(server):
    with server.connect() as connection:
        connection.sendall(b"HEAD /version HTTP/1.1\r\n" + HOST + b"\r\n" + GET + b"\r\n")
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        _, headers, body = read_response(connection)
    assert f"Content-Length: {headers['content-length']}\r\n".encode() in head
    assert json.loads(body)["version"]


def test_keep_alive_and_close(server):
    with server.connect() as connection:
        for _ in range(5):
            connection.sendall(POST + length())
            assert read_response(connection)[0] == 200
        # A refused request does not cost the connection either, when its end is known.
        connection.sendall(b"POST /nothing HTTP/1.1\r\n" + HOST + length())
        assert read_response(connection)[0] == 404
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        assert read_response(connection)[1]["connection"] == "close"
        assert read_response(connection) is None
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert read_response(connection)[1]["connection"] == "close"
        assert read_response(connection) is None
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        assert read_response(connection)[1]["connection"] == "keep-alive"
        assert read_response(connection)[0] == 200


def completion(server, **fields):
    fields = {"model": server.model_id, "prompt": "x", "max_tokens": 8, "ignore_eos": True, **fields}
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + length(body)


def test_pipelining(server):
    """Answers come in the order of the requests, slow ones in front of fast ones."""
    requests = b""
    for i in range(20):
        requests += completion(server, max_tokens=1 + 7 * (i % 3), user=str(i))
        requests += GET + b"X-Request-Id: %d\r\n\r\n" % i
        requests += completion(server, stream=True, max_tokens=2)
    with server.connect() as connection:
        connection.sendall(requests)
        for i in range(20):
            status, _, body = read_response(connection)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 1 + 7 * (i % 3))
            assert read_response(connection)[1]["x-request-id"] == str(i)
            assert read_response(connection)[2].endswith(b"data: [DONE]\n\n")


def test_pipelining_many_bytes(server):
    """Far more than a socket takes at once: nothing is lost."""
    big = POST + length(json.dumps({"prompt": "y " * 20000}).encode())
    count = 40
    with server.connect() as connection:
        connection.setblocking(False)
        unsent, answers = big * count, b""
        deadline = time.monotonic() + 60
        while answers.count(b"HTTP/1.1 200 OK") < count and time.monotonic() < deadline:
            try:
                unsent = unsent[connection.send(unsent[:65536]):] if unsent else unsent
            except OSError:  # would block: TLS has an error of its own for it
                pass
            try:
                answers += connection.recv(1 << 20)
            except OSError:
                time.sleep(0.005)
    assert answers.count(b"HTTP/1.1 200 OK") == count


def test_pipelining_more_than_is_kept(start_server):
    """What was kept is answered, then comes 429: whoever sends without end is still read from."""
    server = start_server(max_sequences=1, max_body="64KiB")
    blocker = server.connect()
    blocker.sendall(completion(server, n=128, max_tokens=400))
    while server.metric("fathom_num_requests_running") == 0:
        time.sleep(0.01)
    padded, count = GET + b"A: " + b"x" * 4000 + b"\r\n\r\n", 200
    with server.connect() as connection:
        connection.sendall(completion(server, max_tokens=1) + padded * count)
        for _ in range(2):  # all of it has been read once the loop has come round
            server.get("/health")
        blocker.close()
        assert json.loads(read_response(connection)[2])["usage"]["completion_tokens"] == 1
        answers = []
        while answer := read_response(connection):
            answers.append(answer)
    assert [status for status, _, _ in answers[:-1]] == [200] * (len(answers) - 1)
    kept = (32 + 64 + 4 + 64) * 1024  # a head, a body, and what chunks may add to it
    assert len(answers) - 1 == kept // len(padded) < count
    status, headers, body = answers[-1]
    assert (status, headers["retry-after"], headers["connection"]) == (429, "1", "close")
    assert f"more than {kept} bytes" in json.loads(body)["error"]["message"]


def test_expect_continue(server):
    with server.connect() as connection:
        body = length()
        connection.sendall(POST + b"Expect: 100-continue\r\n" + body[: -len(BODY)])
        assert read_response(connection)[0] == 100
        connection.sendall(BODY)
        assert read_response(connection)[0] == 200
    with server.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n"
                           b"Content-Length: 5\r\n\r\n")
        status, headers, _ = read_response(connection)
        assert (status, headers["connection"]) == (404, "close")
        assert read_response(connection) is None


def test_request_id(server):
    answer = server.get("/version", headers={"X-Request-Id": "my id 7"})
    assert answer.headers["x-request-id"] == "my id 7"
    first = server.get("/version").headers["x-request-id"]
    assert first.startswith("req-") and first != server.get("/version").headers["x-request-id"]
    for unusable in ("x" * 129, "caf\xe9"):
        answer = server.get("/version", headers={"X-Request-Id": unusable.encode("latin-1")})
        assert answer.headers["x-request-id"].startswith("req-")
    assert server.wait_for(r'request id="my id 7" method="GET" path="/version" status=200')


def test_half_close_gets_the_answer(server):
    """printf | nc: a client that says all and closes its side still gets what is answered at once."""
    if server.trust:
        pytest.skip("Python's TLS sockets close both ways; test_tls.py closes one")
    with server.connect() as connection:
        connection.sendall(GET + b"\r\n" + GET + b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read_response(connection)[0] == 200
        assert read_response(connection)[0] == 200
        assert read_response(connection) is None


def test_streams_over_http_1_0(server):
    body = json.dumps({"model": server.model_id, "prompt": "x", "max_tokens": 4, "stream": True}).encode()
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\n" + length(body))
        data = b""
        while piece := connection.recv(65536):
            data += piece
    head, _, text = data.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head and b"Connection: close" in head
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")


def test_refused_body_is_read(server):
    """A client that sends all of its body, slowly, before it reads why that is refused."""
    size, piece = 100_000_000, b" " * 1_000_000
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            connection.sendall(piece)
            time.sleep(0.04)
        status, headers, body = read_response(connection)
        assert (status, headers["connection"]) == (413, "close")
        assert f"{size} bytes" in json.loads(body)["error"]["message"]
        assert read_response(connection) is None


@pytest.mark.parametrize("piece, pause", [(b" ", 0.05), (b" " * (1 << 20), 0)], ids=["slow", "endless"])
def test_refused_body_is_not_read_for_ever(start_server, piece, pause):
    """Neither a trickle nor a flood keeps the connection for long."""
    server = start_server(body_timeout=0.5)
    deadline = time.monotonic() + 60
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 99999999999\r\n\r\n")
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                connection.sendall(piece)
                time.sleep(pause)


def test_timeouts(start_server):
    server = start_server(header_timeout=0.5, body_timeout=0.5, idle_timeout=1)
    # A head that comes one byte at a time.
    with server.connect() as connection:
        start = time.monotonic()
        try:
            for byte in GET * 100:
                connection.send(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        assert read_response(connection)[0] == 408
        assert time.monotonic() - start < 5
    # A body that stops.
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\nabc")
        status, headers, _ = read_response(connection)
        assert (status, headers["connection"]) == (408, "close")
    # Nothing at all, and nothing after an answer: closed without a word.
    with server.connect() as connection:
        assert connection.recv(1) == b""
    with server.connect() as connection:
        connection.sendall(GET + b"\r\n")
        assert read_response(connection)[0] == 200
        assert connection.recv(1) == b""


def test_connection_limit(start_server):
    server = start_server(max_connections=4)
    held = [server.connect() for _ in range(4)]
    time.sleep(0.2)
    with server.connect() as connection:
        status, headers, body = read_response(connection)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "server_overloaded"
        assert headers["x-request-id"].startswith("req-")
    # Probes are answered all the same, on one connection after another; others are told at once.
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 503),
                         ("/nothing", 404)) * 30:
        answer = server.get(path)
        assert (answer.status_code, answer.headers["connection"]) == (status, "close"), path
    refused = server.post(json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    with server.connect() as connection:  # a body is not waited for
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n")
        assert read_response(connection)[0] == 503
    # Beyond the visitors one has to wait, for as long as they are given to ask.
    mute = [server.connect() for _ in range(100)]
    assert server.get("/health").status_code == 200
    for connection in held + mute:
        connection.close()
    time.sleep(0.5)
    assert server.complete(max_tokens=1).status_code == 200
