"""Clients that ask for more than they take, and work that nobody waits for: others do not notice."""

import contextlib
import json
import pathlib
import random
import threading
import time

from conftest import read_response
from test_disconnect import count_left, leave
from test_http import GET, POST, completion, length

SLOW_TEXT = "1" * (4 << 20)  # one long word: a second to tokenize


def send_until_blocked(connection, data):
    """What fits while nobody reads; returns the rest."""
    connection.setblocking(False)
    data, blocked = memoryview(data), 0
    while data and blocked < 20:
        try:
            data = data[connection.send(data[:65536]):]
            blocked = 0
        except BlockingIOError:
            blocked += 1
            time.sleep(0.01)
    return data


def test_answers_that_nobody_reads(start_server):
    """Pipelined cheap requests: memory stays, the loop stays free, and nothing is lost."""
    # Little KV: it is touched in the background, and is not what is looked for.
    server = start_server(send_high_water="64KiB", log_level="error", kv_budget="4MiB")
    count, connections = 100_000, 4
    server.metric("fathom_ready")
    before = server.metric("process_resident_memory_bytes")
    with contextlib.ExitStack() as stack:
        flooding = [stack.enter_context(server.connect(receive_buffer=4096)) for _ in range(connections)]
        page = b"GET /metrics HTTP/1.1\r\nHost:\r\n\r\n"
        threads = [threading.Thread(target=send_until_blocked, args=(connection, page * count))
                   for connection in flooding]
        for thread in threads:
            thread.start()
        for _ in range(20):
            start = time.monotonic()
            assert server.get("/health").status_code == 200
            assert time.monotonic() - start < 2
        for thread in threads:
            thread.join()
        assert server.metric("process_resident_memory_bytes") - before < 24 << 20
        assert server.metric("fathom_http_responses_total") < connections * count / 4
    with server.connect() as connection:
        rest = send_until_blocked(connection, (GET + b"\r\n") * 40_000)
        time.sleep(0.5)  # held: the client is behind
        answers, deadline = b"", time.monotonic() + 20
        while answers.count(b"HTTP/1.1 200 OK") < 40_000 and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                while piece := connection.recv(1 << 20):
                    answers += piece
            with contextlib.suppress(BlockingIOError):
                rest = rest[connection.send(rest[:65536]):] if rest else rest
            time.sleep(0.01)
        assert answers.count(b"HTTP/1.1 200 OK") == 40_000


def test_half_close_behind_many_requests(server):
    """More than one turn's requests, then the end of input: all are answered."""
    with server.connect() as connection:
        connection.sendall((GET + b"\r\n") * 100 + GET + b"Connection: close\r\n\r\n")
        assert [read_response(connection)[0] for _ in range(101)] == [200] * 101
        assert read_response(connection) is None


def test_a_reader_that_stops_is_dropped(start_server):
    server = start_server(send_high_water="64KiB", send_timeout=1, log_level="error")
    with server.connect(receive_buffer=4096) as connection:
        send_until_blocked(connection, (GET + b"\r\n") * 100_000)
        deadline = time.monotonic() + 20
        while server.metric("fathom_http_connections") > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert time.monotonic() < deadline


def test_bodies_that_nobody_waits_for(start_server):
    """Only those that the pool has begun are worked on; a small body does not wait for the others."""
    server = start_server(log_level="error")
    big = POST + length(json.dumps({"prompt": SLOW_TEXT}).encode())
    for _ in range(40):
        with server.connect() as connection:
            connection.sendall(big)
    start = time.monotonic()
    assert server.post("/tokenize", json={"prompt": "word " * 2000}).status_code == 200
    assert time.monotonic() - start < 10


def test_tokenizing_stops_when_the_client_leaves(start_server):
    """Four that the pool has begun cost less than one that is answered; in processor time, which
    does not depend on what else the machine does."""
    def spent():
        times = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(times[11]) + int(times[12])  # of the process, in user and system mode

    server = start_server(log_level="error")
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=2 << 20))
    begin = spent()
    assert server.post("/tokenize", json={"prompt": word}).status_code == 200
    whole, begin = spent() - begin, spent()
    for _ in range(4):
        with server.connect() as connection:
            connection.sendall(POST + length(json.dumps({"prompt": word}).encode()))
    # Runs once the pool has a thread for it.
    assert server.post("/tokenize", json={"prompt": "word " * 2000}).status_code == 200
    assert spent() - begin < whole


def test_too_many_waiting_bodies(start_server):
    server = start_server(log_level="error")
    big = POST + length(json.dumps({"prompt": SLOW_TEXT}).encode())
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            connection = stack.enter_context(server.connect())
            connection.sendall(big)
        status, headers, body = read_response(connection)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error"]["code"] == "server_overloaded"
    assert server.post("/tokenize", json={"prompt": "word " * 2000}).status_code == 200


def test_a_prompt_whose_bytes_cannot_fit(server):
    for prompt, name in ((SLOW_TEXT, "prompt"), (["a", SLOW_TEXT], "prompt[1]")):
        start = time.monotonic()
        answer = server.complete(prompt=prompt)
        assert time.monotonic() - start < 2
        error = answer.json()["error"]
        assert answer.status_code == 400 and "at least" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)


def test_leaving_behind_many_requests(start_server):
    """An orderly end comes behind all that was sent: more than the kernel's buffers hold, and than
    the server keeps."""
    server = start_server(max_sequences=1)
    fields = server.fields_lasting(20)
    for abruptly, count in ((True, 20_000), (False, 8_000), (False, 400_000), (False, 700_000)):
        connection = server.connect()
        send_until_blocked(connection, completion(server, **fields) + (GET + b"\r\n") * count)
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.01)
        left_before = count_left(server)
        leave(connection, abruptly)
        server.wait_idle()
        assert count_left(server) == left_before + 1, count


def test_drain_timeout_says_so(start_server):
    """What cannot be finished ends with an error, in the stream or as the answer."""
    server = start_server(max_sequences=1, queue_limit=4096, drain_timeout=0.3)
    fields = server.fields_lasting(20)
    with contextlib.ExitStack() as stack:
        plain, stream, half_sent = [stack.enter_context(server.connect()) for _ in range(3)]
        stream.sendall(completion(server, stream=True, **fields))
        plain.sendall(completion(server, **fields))
        half_sent.sendall(completion(server)[:-1])
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.005)
        assert server.stop() == 0
        for connection in (plain, half_sent):
            status, headers, body = read_response(connection)
            assert (status, headers["connection"]) == (503, "close")
            assert json.loads(body)["error"]["code"] == "draining"
            assert read_response(connection) is None
        events = read_response(stream)[2].split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert json.loads(events[-3].removeprefix(b"data: "))["error"]["code"] == "draining"
        assert read_response(stream) is None
