"""Clients that leave, stall or never read: nothing may stay behind."""

import concurrent.futures
import json
import random
import socket
import struct
import time

from conftest import read_response
from test_http import completion


def leave(connection, abruptly):
    if abruptly:  # RST instead of FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


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
    with server.connect() as connection:
        if dice.random() < 0.15:
            data = data[: dice.randrange(len(data))]
        connection.sendall(data)
        if dice.random() < 0.7:
            time.sleep(dice.random() ** 2 * 0.2)
        if dice.random() < 0.3:
            connection.settimeout(0.05)
            try:
                connection.recv(dice.choice([1, 300]))
            except OSError:
                pass
        leave(connection, dice.random() < 0.5)


def test_random_disconnects(server):
    def burst(seeds):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda seed: leave_somewhere(server, seed), seeds))
        server.wait_idle()
        return server.metric("process_resident_memory_bytes")

    burst(range(1000, 1150))  # everything that is kept for good is allocated by now
    before = burst(range(1150, 1300))
    cancelled = server.metric("fathom_requests_cancelled_total")
    after = burst(range(500))
    assert server.metric("fathom_requests_cancelled_total") > cancelled
    assert after - before < 4 << 20
    time.sleep(0.5)
    assert server.metric("fathom_http_connections") <= 2
    answer = server.complete(seed=1)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


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
