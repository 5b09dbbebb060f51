"""`fathom bench` against a real server, and against servers that do not behave."""

import csv
import io
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest

from conftest import BINARY, Server, certificate

EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
# A machine that also runs the server, and other tests, makes the client late: that it says so is
# tested below, but must not decide whether counts are right.
PATIENT = ("--lag-limit", "60000")


def command(url, *flags):
    return [BINARY, "bench", url, *map(str, flags)]


def environment(trusted=None):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    return kept | {"SSL_CERT_FILE": str(trusted or certificate()[0])}


def bench(url, *flags, code=0, trusted=None):
    """Runs a benchmark; returns its JSON report."""
    done = subprocess.run(command(url, *flags, *PATIENT, "--json", "-"), capture_output=True,
                          text=True, timeout=120, env=environment(trusted))
    assert code is None or done.returncode == code, done.stderr
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


class Endpoint:
    """A server of one behaviour: `behave(connection, number of the request, its body)` answers."""

    def __init__(self, behave, tls=False, host="127.0.0.1"):
        self.behave, self.bodies, self.lock = behave, [], threading.Lock()
        self.listener = socket.create_server((host, 0), backlog=256)
        self.url = f"http{'s' * tls}://{host}:{self.listener.getsockname()[1]}"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate())
            self.listener = context.wrap_socket(self.listener, server_side=True,
                                                do_handshake_on_connect=False)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=[connection], daemon=True).start()

    def read_request(self, connection):
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return None
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(65536)
        return body

    def serve(self, connection):
        try:
            with connection:
                while (body := self.read_request(connection)) is not None:
                    with self.lock:
                        self.bodies.append(json.loads(body))
                        number = len(self.bodies)
                    if self.behave(connection, number, self.bodies[number - 1]) == "close":
                        return
        except OSError:
            pass

    def close(self):
        self.listener.close()


@pytest.fixture
def endpoint():
    opened = []

    def start(behave, **arguments):
        opened.append(Endpoint(behave, **arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def whole(body):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def stream_answer(connection, number, body):
    connection.sendall(STREAM + EVENT + LAST + DONE)
    return "close"


# ---- A real server ------------------------------------------------------------------------------


def counters(server):
    names = ("generation_tokens_total", "requests_cancelled_total")
    found = {name: server.metric(f"fathom_{name}") for name in names}
    for tier in server.model["fathom"]["tiers"]:
        name = tier["name"]
        found[name] = server.metric("fathom_request_success_total", quality=name,
                                    finished_reason="length")
    return found


def test_counts_are_the_servers(server, tmp_path):
    tiers = [tier["name"] for tier in server.model["fathom"]["tiers"]]
    mix = f"{tiers[0]}:1,{tiers[-1]}:2"
    before = counters(server)
    page, lines = tmp_path / "page.html", tmp_path / "requests.csv"
    report = bench(server.url, "-c", "1,4", "-n", 12, "-i", "4-20", "-o", "normal:12:3", "-q", mix,
                   "--ignore-eos", "--slo", "ttft:60000", "--html", page, "--csv", lines)
    added = {name: value - before[name] for name, value in counters(server).items()}
    assert [point["label"] for point in report["points"]] == ["concurrency 1", "concurrency 4"]
    for point in report["points"]:
        assert point["valid"] and point["completed"] == 12 and point["failed"] == 0
        assert point["good"] == 12
        assert point["ttft_ms"]["count"] == point["e2e_ms"]["count"] == 12
        assert 0 < point["ttft_ms"]["mean"] <= point["e2e_ms"]["mean"]
        assert point["e2e_ms"]["p50"] <= point["e2e_ms"]["p90"] <= point["e2e_ms"]["p99"]
    assert sum(p["output_tokens"] for p in report["points"]) == added["generation_tokens_total"]
    for tier in (tiers[0], tiers[-1]):
        completed = sum(t["completed"] for p in report["points"] for t in p["tiers"]
                        if t["quality"] == tier)
        assert completed == added[tier] > 0
    rows = list(csv.DictReader(io.StringIO(lines.read_text())))
    assert len(rows) == 24 and {row["outcome"] for row in rows} == {"completed"}
    text = page.read_text()
    assert text.count("<svg") >= 3 and "http" not in text.replace(server.url, "")


def test_cancelled_requests_are_cancelled(server):
    before = counters(server)
    # A run in which chance cancels all ends with 1: nothing was measured.
    report = bench(server.url, "-c", 2, "-n", 8, "-i", 4, "-o", 200, "--ignore-eos", "--cancel", 1,
                   code=None)
    server.wait_idle()
    point = report["points"][0]
    cancelled = counters(server)["requests_cancelled_total"] - before["requests_cancelled_total"]
    assert point["cancelled"] + point["completed"] == 8 and point["failed"] == 0
    assert point["cancelled"] == cancelled > 0


def test_an_open_loop_keeps_its_rate(server):
    report = bench(server.url, "-r", 20, "-n", 0, "-d", 2, "--arrivals", "constant", "-i", 4, "-o",
                   1, "--ignore-eos", "--warm-up", 2)
    point = report["points"][0]
    assert point["rate"] == 20 and 36 <= point["completed"] <= 41


def test_without_a_stream(server):
    point = bench(server.url, "-n", 6, "-i", 4, "-o", 8, "--ignore-eos",
                  "--no-stream")["points"][0]
    assert point["completed"] == 6 and point["output_tokens"] == 48
    assert point["ttft_ms"]["count"] == 0 and point["ttft_ms"]["mean"] is None
    assert point["e2e_ms"]["count"] == 6


def test_prompts_from_a_file(server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('It was "dark"\n\n{"prompt": "A\\nline", "max_tokens": 5}\n')
    point = bench(server.url, "--prompts", prompts, "-n", 4, "-o", 9,
                  "--ignore-eos")["points"][0]
    assert point["completed"] == 4 and point["output_tokens"] == 2 * (9 + 5)


def test_refusals_are_told_by_kind(server):
    point = bench(server.url, "-n", 3, "-q", "nonesuch", code=1)["points"][0]
    assert point["failures"] == {"client_error": 3}


# ---- The workload -------------------------------------------------------------------------------


def test_the_same_seed_asks_the_same(endpoint):
    asked = []
    for seed in (1, 1, 2):
        server = endpoint(stream_answer)
        bench(server.url, "--model", "m", "-c", 1, "-n", 10, "-i", "exponential:20", "-q",
              "a:1,b:1", "--seed", seed, "--extra-body", '{"user": "x"}')
        assert all(body["user"] == "x" for body in server.bodies)
        asked.append(server.bodies)
    assert asked[0] == asked[1] != asked[2]


def test_turns_share_what_was_said(endpoint):
    server = endpoint(stream_answer)
    bench(server.url, "--model", "m", "-c", 1, "-n", 6, "-i", 5, "--turns", 3, "--prefix-tokens", 4)
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [9, 14, 19, 9, 14, 19]
    assert prompts[2][:14] == prompts[1] and prompts[1][:9] == prompts[0]
    assert prompts[3][:4] == prompts[0][:4] and prompts[3][4:] != prompts[0][4:]


def test_chat(endpoint):
    def answer(connection, number, body):
        delta = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        connection.sendall(STREAM + delta + delta + DONE)
        return "close"

    server = endpoint(answer)
    point = bench(server.url, "--model", "m", "--endpoint", "chat", "-n", 4, "-c", 1, "--turns",
                  2)["points"][0]
    assert point["completed"] == 4 and point["output_tokens"] == 8
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


# ---- Servers that do not behave -----------------------------------------------------------------


def drops(connection, number, body):
    return "close"


def resets(connection, number, body):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return "close"


def half_event(connection, number, body):
    connection.sendall(STREAM + EVENT + EVENT[:20])
    return "close"


def half_chunk(connection, number, body):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                       b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + EVENT[:20])
    return "close"


def garbage(connection, number, body):
    connection.sendall(bytes(range(256)) * 100)
    return "close"


def not_json(connection, number, body):
    connection.sendall(whole(b"<html>it works</html>"))


def error_event(connection, number, body):
    connection.sendall(STREAM + EVENT + b'data: {"error":{"message":"<b>out of luck</b>"}}\n\n')
    return "close"


def overloaded(connection, number, body):
    connection.sendall(b"HTTP/1.1 429 No\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n")


def broken(connection, number, body):
    connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")


def huge_head(connection, number, body):
    connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"X-Fill: " + b"y" * 200000 + b"\r\n\r\n")
    return "close"


def stalls(connection, number, body):
    connection.sendall(STREAM + EVENT)
    connection.recv(1)  # until the client leaves
    return "close"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("behave, failure", [
    (drops, "closed"), (resets, "closed"), (half_event, "truncated"), (half_chunk, "closed"),
    (garbage, "http"), (not_json, "content"), (error_event, "error_event"),
    (overloaded, "overloaded"), (broken, "server_error"), (huge_head, "too_large"),
    (stalls, "timeout"),
], ids=lambda value: getattr(value, "__name__", value))
def test_failures_are_counted_by_kind(endpoint, behave, failure, tls):
    """Every other request is answered well."""
    def every_other(connection, number, body):
        return (behave if number % 2 else stream_answer)(connection, number, body)

    server = endpoint(every_other, tls=tls)
    point = bench(server.url, "--model", "m", "-c", 1, "-n", 8, "--timeout", 1)["points"][0]
    assert point["completed"] == 4 and point["failed"] == 4
    assert point["failures"] == {failure: 4}


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert bench(url, "--model", "m", "-n", 5, code=1)["points"][0]["failures"] == {"connect": 5}
    assert "asking for the model's name" in bench(url, code=1)


def test_a_kept_connection_may_end_between_requests(endpoint):
    """The server closes without saying so; the request on the way is sent again, once."""
    def answer(connection, number, body):
        connection.sendall(whole(b'{"choices":[{"text":"a"}]}'))
        if number % 3 == 0:
            return "close"

    server = endpoint(answer)
    point = bench(server.url, "--model", "m", "-c", 1, "-n", 30, "--no-stream")["points"][0]
    assert point["completed"] == 30 and point["failed"] == 0
    assert point["connections"] >= 10


def test_times_are_the_servers(endpoint):
    """First chunk after 60 ms, then one every 40 ms: five tokens."""
    def slow(connection, number, body):
        time.sleep(0.06)
        connection.sendall(STREAM + EVENT)
        for event in (EVENT, EVENT, EVENT, LAST):
            time.sleep(0.04)
            connection.sendall(event)
        connection.sendall(DONE)
        return "close"

    start = time.monotonic()
    point = bench(endpoint(slow).url, "--model", "m", "-c", 1, "-n", 10)["points"][0]
    seconds = time.monotonic() - start
    assert point["output_tokens"] == 50
    assert all(point[name]["count"] == 10 for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    e2e, ttft, tpot, itl = (point[f"{name}_ms"]["mean"] for name in ("e2e", "ttft", "tpot", "itl"))
    # Not shorter than the server slept; all together, one after another, not longer than it took.
    # A gap may be shorter: when the chunk before it was read late.
    assert ttft >= 60 and e2e >= 220
    assert 10 * e2e <= 1000 * point["seconds"] <= 1000 * seconds
    assert tpot == pytest.approx(itl, rel=1e-4) == pytest.approx((e2e - ttft) / 4, rel=1e-4)


def paced(texts, tokens):
    """A chunk of each text, 40 ms apart; the usage states `tokens`."""
    def answer(connection, number, body):
        connection.sendall(STREAM)
        for text in texts:
            time.sleep(0.04)
            connection.sendall(EVENT.replace(b'"a"', json.dumps(text).encode()))
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode()
        connection.sendall(b"data: " + usage + b"\n\n" + DONE)
        return "close"
    return answer


@pytest.mark.parametrize("texts, tokens", [
    (["", "a", "", "", "b"], 5),  # half a character, a special token: times all the same
    (["ab", "cd", "ef"], 6),
], ids=["tokens without text", "two tokens in each chunk"])
def test_chunks_are_timed_and_tokens_counted(endpoint, texts, tokens):
    """ITL is between chunks, TPOT is per token: the time from the first chunk to the last, parted
    in two ways."""
    point = bench(endpoint(paced(texts, tokens)).url, "--model", "m", "-c", 1, "-n", 4)["points"][0]
    gaps = len(texts) - 1
    assert point["chunks"] == 4 * len(texts) and point["output_tokens"] == 4 * tokens
    assert point["ttft_ms"]["count"] == 4 and point["itl_ms"]["count"] == 4 * gaps
    e2e, ttft, itl = (point[f"{name}_ms"]["mean"] for name in ("e2e", "ttft", "itl"))
    assert ttft >= 40 and e2e >= 40 * len(texts)
    assert itl * gaps == pytest.approx(e2e - ttft, rel=1e-4)
    assert point["itl_ms"]["mean"] * gaps == pytest.approx(
        point["tpot_ms"]["mean"] * (tokens - 1), rel=1e-4)


def test_the_table_says_why_itl_is_not_tpot(endpoint):
    server = endpoint(paced(["ab", "cd"], 5))
    done = subprocess.run(command(server.url, "--model", "m", "-n", 2, *PATIENT),
                          capture_output=True, text=True, timeout=60, env=environment())
    assert "ITL is between chunks, which held 2.50 tokens each" in done.stdout


def test_names_from_a_server_are_escaped(endpoint, tmp_path):
    def evil(connection, number, body):
        name = f"<script>{number % 20}\\\"</script>".encode()
        connection.sendall(whole(b'{"quality":"%s","choices":[{"text":"a"}]}' % name))

    page, lines = tmp_path / "page.html", tmp_path / "requests.csv"
    report = bench(endpoint(evil).url, "--model", "<script>", "-c", 1, "-n", 40, "--no-stream",
                   "--html", page, "--csv", lines)
    assert len(report["points"][0]["tiers"]) == 17
    assert "<script" not in page.read_text()
    assert len(list(csv.reader(io.StringIO(lines.read_text())))) == 41


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, trusted", [((), None), (("--insecure",), os.devnull)],
                         ids=["checked", "insecure"])
def test_https(secure, flags, trusted):
    point = bench(secure.url, "-c", 3, "-n", 9, "-i", 8, "-o", 6, "--ignore-eos", *flags,
                  trusted=trusted)["points"][0]
    assert point["completed"] == 9 and point["output_tokens"] == 54
    assert point["connections"] == 3  # kept, be there tickets between the answers


def test_requests_of_many_records(endpoint):
    server = endpoint(stream_answer, tls=True)
    point = bench(server.url, "--model", "m", "-c", 2, "-n", 4, "-i", 200_000)["points"][0]
    assert point["completed"] == 4
    assert all(len(body["prompt"]) == 200_000 for body in server.bodies)


def test_certificates_are_checked(secure, endpoint):
    point = bench(secure.url, "--model", "m", "-n", 3, trusted=os.devnull, code=1)["points"][0]
    assert point["failures"] == {"connect": 3}
    assert "self-signed certificate" in bench(secure.url, trusted=os.devnull, code=1)
    elsewhere = endpoint(stream_answer, tls=True, host="127.0.0.2")
    assert "IP address mismatch" in bench(elsewhere.url, code=1)
    assert not elsewhere.bodies


def no_handshake(connection):
    connection.close()


def garbled_handshake(connection):
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("behave", [no_handshake, garbled_handshake])
def test_servers_that_do_not_speak_tls(behave):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def accept():
            for _ in range(4):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    behave(connection)

        threading.Thread(target=accept, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert "asking for the model's name" in bench(url, code=1)
        point = bench(url, "--model", "m", "-c", 1, "-n", 3, code=1)["points"][0]
    assert point["failures"] == {"connect": 3}


# ---- Itself -------------------------------------------------------------------------------------


def test_a_late_client_says_so(endpoint):
    """Stopped for most of the run, it must not pass its own lateness off as the server's."""
    def answer(connection, number, body):
        time.sleep(0.02)
        return stream_answer(connection, number, body)

    process = subprocess.Popen(
        command(endpoint(answer).url, "--model", "m", "-c", 1, "-n", 0, "-d", 3, "--json", "-"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    while process.poll() is None:
        for number, pause in ((signal.SIGSTOP, 0.15), (signal.SIGCONT, 0.1)):
            process.send_signal(number)
            time.sleep(pause)
    point = json.loads(process.stdout.read())["points"][0]
    assert process.returncode == 1
    assert not point["valid"] and "late" in point["invalid"]


def test_interrupted(endpoint):
    """What was measured until then is reported, as not valid."""
    process = subprocess.Popen(
        command(endpoint(stalls).url, "--model", "m", "-c", 3, "-n", 0, "-d", 60, "--json", "-"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    point = json.loads(output)["points"][0]
    assert process.returncode == 1 and point["cancelled"] == 3
    assert point["invalid"] == "it was interrupted"


def test_a_sweep_finds_a_knee(endpoint, tmp_path):
    """Four can be served at once, 20 ms each."""
    places = threading.Semaphore(4)

    def answer(connection, number, body):
        with places:
            time.sleep(0.02)
        return stream_answer(connection, number, body)

    page = tmp_path / "page.html"
    report = bench(endpoint(answer).url, "--model", "m", "--sweep", "-n", 60, "--html", page)
    labels = [point["label"] for point in report["points"]]
    assert labels[:3] == ["concurrency 1", "concurrency 2", "concurrency 4"]
    assert report["knee"].startswith("rate ")
    assert "Throughput against latency" in page.read_text()


def test_wrong_flags():
    for flags in (["--rate", "0"], ["--rate", "x"], ["--concurrency", "1.5"],
                  ["--sweep", "-c", "1"], ["--requests", "0"], ["--slo", "ttft"], ["--arrivals", "now"],
                  ["--input-tokens", "0"], ["--quality", "a:0"], ["--api-key", "a\r\nb"],
                  ["--api-key", ""], ["--extra-body", "{"], ["--extra-body", "[1]"]):
        done = subprocess.run(command("http://127.0.0.1:1", "--model", "m", *flags),
                              capture_output=True, text=True, timeout=60, env=environment())
        assert done.returncode == 2 and done.stderr.startswith("fathom bench: --"), flags
        assert not done.stderr.endswith(": \n"), flags  # a reason is given


def test_speed_against_nothing(capsys):
    """Prints what the client does per second, and per second of its own processor time."""
    program = pathlib.Path(BINARY).parent / "tests" / "bench_null_server"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen([str(program), str(port)])
    try:
        time.sleep(0.5)
        before = os.times()
        point = bench(f"http://127.0.0.1:{port}", "--model", "null", "-c", 32, "-n", 40000, "-i",
                      16, "--no-stream", "-q", "a:1,b:1", code=None)["points"][0]
        after = os.times()
    finally:
        server.terminate()
        server.wait()
    assert point["completed"] == 40000
    own = (after.children_user - before.children_user +
           after.children_system - before.children_system)
    with capsys.disabled():
        print(f"\nfathom bench: {point['requests_per_second']:.0f} requests/s, "
              f"{40000 / own:.0f} per second of processor time")
