"""Clients that leave, stall or never read: nothing may stay behind.

Leaving is closing, resetting, and closing one side while an answer is being made.
"""

import concurrent.futures
import json
import random
import signal
import socket
import struct
import time

import pytest

from conftest import HandMade, Server, read_response
from test_http import GET, POST, completion, length


def leave(connection, abruptly):
    if abruptly:  # RST instead of FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection):
    """Says that no more requests come, and waits for the server to take that as leaving."""
    if isinstance(connection, HandMade):
        connection.end()
    else:
        connection.shutdown(socket.SHUT_WR)
    try:
        while connection.recv(65536):
            pass
    except OSError:
        pass  # an answer that was cut


WITNESS = {"prompt": "The sea was", "max_tokens": 400, "seed": 5, "temperature": 1,
           "ignore_eos": True}


def texts(answer):
    assert answer.status_code == 200
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="module", params=["plain", "tls"])
def arena(request):
    """Two slots, and prefill in small pieces, so that every state lasts."""
    running = Server(tls=request.param == "tls", max_sequences=2, prefill_chunk=8)
    running.witnesses = {n: texts(running.complete(n=n, **WITNESS)) for n in (1, 2)}
    yield running
    assert running.process.poll() is None, running.lines[-20:]
    assert running.stop() == 0


def connect_for(server, way):
    if way == "half-close" and server.trust:
        connection = HandMade(server)
        connection.handshake()
        return connection
    return server.connect()


@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
def test_matrix(arena, state, stream, way):
    """Others' texts stay as they are; nothing stays behind; all within a few steps."""
    fields = {"max_tokens": 400, "n": 32}
    if state == "prefilling":  # 63 steps of prefill for one of decoding
        fields = {"prompt": [[i + 1] + [9] * 499 for i in range(64)], "max_tokens": 1}
    arena.wait_idle()
    time.sleep(0.05)
    open_before, left_before = arena.descriptors(), count_left(arena)
    others = 2 if state == "queued" else 1
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        witness = pool.submit(arena.complete, n=others, **WITNESS)
        wait_until(lambda: arena.metric("fathom_num_requests_running") == others)
        connection = connect_for(arena, way)
        connection.sendall(completion(arena, stream=stream, **fields))
        wait_until(lambda: arena.metric("fathom_num_requests_waiting") > 0)
        if state != "queued":
            wait_until(lambda: arena.metric("fathom_num_requests_running") == 2)
        if state == "decoding" and stream:
            connection.recv(1)
        if way == "half-close":
            half_close(connection)
            connection = getattr(connection, "socket", connection)
        leave(connection, way == "reset")
        wait_until(lambda: arena.metric("fathom_num_requests_waiting") == 0)
        assert texts(witness.result()) == arena.witnesses[others]
    arena.wait_idle()
    arena.wait_descriptors(open_before)
    assert count_left(arena) == left_before + 1


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count_left(server):
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith('fathom_http_responses_total{') and '"499"' in line]
    return float(found[0].split()[-1]) if found else 0


@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
@pytest.mark.parametrize("state", ["head", "body", "tokenizing", "answered", "pipelined"])
def test_matrix_outside_the_engine(arena, state, way):
    before = arena.descriptors()
    big = POST + length(json.dumps({"prompt": "1" * (2 << 20)}).encode())
    connection = connect_for(arena, way)
    connection.sendall({"head": POST[:-3], "body": big[:-10], "tokenizing": big,
                        "answered": GET + b"\r\n",
                        "pipelined": completion(arena, max_tokens=400) + (GET + b"\r\n") * 100}[state])
    if state == "answered":
        assert read_response(connection)[0] == 200
    if way == "half-close":
        half_close(connection)
        connection = getattr(connection, "socket", connection)
    leave(connection, way == "reset")
    arena.wait_idle()
    arena.wait_descriptors(before)
    assert arena.complete(max_tokens=1).status_code == 200


def leave_somewhere(server, seed):
    """One request cut off at a random moment: while sending it, queued, in prefill, in decode, after."""
    dice = random.Random(seed)
    prompt = "word " * dice.choice([1, 20, 60])
    if dice.random() < 0.1:
        prompt = "word " * 3000  # tokenized on the pool; too long
    data = completion(
        server,
        prompt=prompt,
        max_tokens=40,
        n=dice.choice([1, 1, 4, 16]),
        stream=dice.random() < 0.6,
        quality=dice.choice(["full", "auto"]),
    )
    way = dice.choice(["close", "close", "reset", "reset", "half-close"])
    connection = connect_for(server, way)
    try:
        if dice.random() < 0.2:  # kept alive by an earlier request
            connection.sendall(GET + b"\r\n")
            read_response(connection)
        if dice.random() < 0.15:
            data = data[: dice.randrange(len(data))]
        connection.sendall(data)
        if dice.random() < 0.7:
            time.sleep(dice.random() ** 2 * 0.2)
        plain = getattr(connection, "socket", connection)
        if dice.random() < 0.3:
            plain.settimeout(0.05)
            try:
                connection.recv(dice.choice([1, 300]))
            except OSError:
                pass
            plain.settimeout(30)
        if way == "half-close":
            half_close(connection)
    finally:
        leave(getattr(connection, "socket", connection), way == "reset")


@pytest.mark.parametrize("tls, count", [(False, 1000), (True, 400)], ids=["plain", "tls"])
def test_random_disconnects(start_server, tls, count):
    """Memory, descriptors and blocks are as before, and so is what others read meanwhile."""
    server = start_server(tls=tls, log_level="error")
    witness = {**WITNESS, "max_tokens": 30}
    expected = texts(server.complete(**witness))

    def burst(seeds):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            leaving = [pool.submit(leave_somewhere, server, seed) for seed in seeds]
            while not all(one.done() for one in leaving):
                assert texts(server.complete(**witness)) == expected
            for one in leaving:
                one.result()
        server.wait_idle()
        return server.metric("process_resident_memory_bytes")

    burst(range(10_000, 10_150))  # everything that is kept for good is allocated by now
    before = burst(range(10_150, 10_300))
    opened, cancelled = server.descriptors(), server.metric("fathom_requests_cancelled_total")
    after = burst(range(count))
    assert server.metric("fathom_requests_cancelled_total") > cancelled
    assert after - before < 4 << 20
    server.wait_descriptors(opened)
    assert server.metric("fathom_http_connections") == 1
    assert texts(server.complete(**witness)) == expected


def test_leaving_cancels_at_once(start_server):
    """One long request on one slot: the next one starts as soon as its client is gone."""
    server = start_server(max_sequences=1)
    fields = server.fields_lasting(5)
    for stream in (False, True):
        connection = server.connect()
        connection.sendall(completion(server, stream=stream, **fields))
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.01)
        assert server.metric("fathom_num_requests_waiting") > 0
        leave(connection, abruptly=False)
        start = time.monotonic()
        server.wait_idle()
        assert time.monotonic() - start < 2
    assert server.wait_for(r"status=499 tier=")


def test_slow_reader_is_cancelled(start_server):
    """A client that asks for much and reads nothing is dropped; others do not notice."""
    server = start_server(send_high_water="32KiB", send_timeout=1)
    data = completion(server, n=64, max_tokens=100, logprobs=20, stream=True)
    connection = server.connect(receive_buffer=4096)
    connection.sendall(data * 8)
    deadline = time.monotonic() + 60
    while server.metric("fathom_http_connections") > 1 and time.monotonic() < deadline:
        assert server.complete(max_tokens=2).status_code == 200
        time.sleep(0.1)
    server.wait_idle()
    assert server.metric("fathom_http_responses_total", code="499") == 1
    connection.close()


def test_stalled_reader_is_cancelled(start_server):
    """Under the high-water mark the time decides, and a large whole answer counts too."""
    server = start_server(send_timeout=1)
    connection = server.connect(receive_buffer=4096)
    connection.sendall(completion(server, n=128, max_tokens=100, logprobs=20) * 4)
    time.sleep(0.5)
    deadline = time.monotonic() + 60
    while server.metric("fathom_http_connections") > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline
    server.wait_idle()
    connection.close()


def test_large_answer_to_a_slow_but_steady_reader(start_server):
    """Taking something now and then is enough."""
    server = start_server(send_timeout=2)
    with server.connect(receive_buffer=4096) as connection:
        connection.sendall(completion(server, n=64, max_tokens=60, logprobs=20))
        time.sleep(1)
        status, headers, body = read_response(connection)
    assert status == 200 and len(json.loads(body)["choices"]) == 64


LONG_REQUEST = POST + length(json.dumps({"prompt": "q z, " * (256 << 10), "return_token_strs": True}).encode())


def is_long_answer(answer):
    status, _, body = answer
    found = json.loads(body)
    return (status == 200 and len(body) > 8 << 20 and "".join(found["token_strs"]).count("q z, ") == 256 << 10
            and found["count"] == len(found["tokens"]) == len(found["token_strs"]))


@pytest.mark.parametrize("way", ["fast", "slow", "half-close"])
def test_long_answers_go_out_in_slices(arena, way):
    """Whole and in order, with others served meanwhile, however they are read."""
    with arena.connect(receive_buffer=4096 if way == "slow" else None) as connection:
        connection.sendall(LONG_REQUEST + (GET + b"\r\n") * (way != "half-close"))
        first = connection.recv(1)
        if way == "slow":
            assert arena.complete(max_tokens=2).status_code == 200
        if way == "half-close" and not arena.trust:
            connection.shutdown(socket.SHUT_WR)
        assert is_long_answer(read_response(connection, first))
        if way != "half-close":
            assert read_response(connection)[0] == 200
    arena.wait_idle()


@pytest.mark.parametrize("way", ["close", "reset"])
def test_leaving_in_a_long_answer(arena, way):
    opened, left_before = arena.descriptors(), count_left(arena)
    connection = arena.connect(receive_buffer=4096)
    connection.sendall(LONG_REQUEST)
    connection.recv(1)
    leave(connection, way == "reset")
    arena.wait_descriptors(opened)
    wait_until(lambda: count_left(arena) == left_before + 1)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
def test_stopping_in_a_long_answer(start_server, reads):
    """It is finished, or cut when the time is over."""
    server = start_server(drain_timeout=30 if reads else 0.5)
    with server.connect(receive_buffer=4096) as connection:
        connection.sendall(LONG_REQUEST)
        first = connection.recv(1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("termination: finishing")
        if reads:
            assert is_long_answer(read_response(connection, first))
        assert server.process.wait(60) == 0
    assert any("drain timeout" in line for line in server.lines) != reads


def test_ping_in_silence(start_server):
    """While a stream has nothing to say, a comment keeps it open."""
    server = start_server(max_sequences=1, ping_interval=0.3)
    blocker = server.connect()
    blocker.sendall(completion(server, **server.fields_lasting(8)))
    while server.metric("fathom_num_requests_running") == 0:
        time.sleep(0.01)
    with server.connect() as connection:
        connection.sendall(completion(server, max_tokens=2, stream=True))
        status, headers, body = read_response(connection)
    assert status == 200 and body.endswith(b"data: [DONE]\n\n")
    assert body.startswith(b": ping\n\n") and b"\r" not in body
    blocker.close()
