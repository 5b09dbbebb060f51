"""Starting, loading, draining, dying: what scripts and supervisors see."""

import json
import os
import signal
import subprocess
import threading
import time

import httpx
import pytest

from conftest import BINARY, Server, find_model, read_response
from test_http import GET, completion


# Touching this much memory takes long enough to look at a server that is still loading.
SLOW_TO_LOAD = {"kv_budget": "2GiB"}


def test_503_while_loading(start_server):
    server = start_server(wait="listening", **SLOW_TO_LOAD)
    gets = ["/ready", "/health", "/v1/models", "/nothing", "/version"]
    with server.connect() as connection:  # all at once: loading does not take long
        connection.sendall(b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % p.encode() for p in gets) +
                           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        answers = [read_response(connection) for _ in range(len(gets) + 1)]
    assert [answer[0] for answer in answers] == [503, 503, 503, 404, 200, 503]
    for status, headers, body in answers:
        if status == 503:
            assert int(headers["retry-after"]) > 0
            assert json.loads(body)["error"]["code"] == "loading"
    assert json.loads(answers[4][2])["isa"] is None
    server.wait_for("^ready$")
    assert server.get("/ready").status_code == 200 and server.metric("fathom_ready") == 1


def test_signal_while_loading(start_server):
    server = start_server(wait="listening", **SLOW_TO_LOAD)
    assert server.stop(signal.SIGTERM) == 0
    assert "ready" not in server.lines


def test_model_that_is_not_there():
    server = Server(model="/nowhere/at/all", wait="listening")
    assert server.process.wait(30) == 1


def test_drain(start_server):
    """SIGTERM: running work ends well, new work is refused, the process ends with 0."""
    server = start_server(max_sequences=1)
    fields = server.fields_lasting(1.5)
    choices = len(fields["prompt"]) * fields["n"]
    running, streaming, idle = server.connect(), server.connect(), server.connect()
    running.sendall(completion(server, **fields))
    streaming.sendall(completion(server, stream=True, **fields))
    while server.metric("fathom_num_requests_running") == 0:
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("termination: finishing")
    refused = server.complete()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert refused.headers["connection"] == "close"
    assert server.get("/ready").status_code == 503
    idle.sendall(GET + b"\r\n")
    assert read_response(idle)[1]["connection"] == "close"
    status, headers, body = read_response(running)
    assert (status, headers["connection"]) == (200, "close")
    assert len(json.loads(body)["choices"]) == choices
    assert read_response(streaming)[2].endswith(b"data: [DONE]\n\n")
    assert server.process.wait(30) == 0


def test_a_terminal_that_is_closed_drains(start_server):
    server = start_server(prefix=["env", "--default-signal=HUP"])
    assert server.stop(signal.SIGHUP) == 0
    assert any("hangup: finishing" in line for line in server.lines)


def test_a_hangup_that_was_ignored_stays_so(start_server):
    """As under nohup."""
    server = start_server(prefix=["env", "--ignore-signal=HUP"])
    server.process.send_signal(signal.SIGHUP)
    assert server.complete(max_tokens=1).status_code == 200
    assert server.stop() == 0
    assert not any("hangup" in line for line in server.lines)


def test_drain_timeout_and_second_signal(start_server):
    for flags, signals in (({"drain_timeout": 0.3}, 1), ({"drain_timeout": 60}, 2)):
        server = start_server(max_sequences=1, **flags)
        connection = server.connect()
        connection.sendall(completion(server, stream=True, **server.fields_lasting(20)))
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.005)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("termination: finishing")
        if signals == 2:
            while server.process.poll() is None:  # any number of them: the exit code stays right
                server.process.send_signal(signal.SIGINT)
                time.sleep(0.001)
        assert server.process.wait(30) == 0
        assert time.monotonic() - start < 10
        connection.close()


def test_health_while_a_step_takes_too_long(start_server):
    """A step as long as it can be made, and a limit below that: unhealthy in it, healthy after."""
    server = start_server(max_step_rows=8192, step_target_ms=0, threads=1, stuck_timeout=0.1,
                          kv_budget="256MiB", log_level="error")
    assert server.get("/health").status_code == 200
    with server.connect() as connection:
        prompts = [[i + 1] + [7] * 499 for i in range(16)]  # one step
        connection.settimeout(120)
        connection.sendall(completion(server, prompt=prompts, max_tokens=1))
        deadline = time.monotonic() + 60
        while server.metric("fathom_engine_stalled_seconds") < 0.1:
            assert time.monotonic() < deadline
        while (answer := server.get("/health")).status_code == 200:
            assert time.monotonic() < deadline
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")
        assert server.get("/version").status_code == 200  # the loop goes on
        assert read_response(connection)[0] == 200
    server.wait_idle()
    assert server.get("/health").status_code == 200
    time.sleep(0.3)  # nothing to do for longer than the limit
    assert server.get("/health").status_code == 200
    assert server.metric("fathom_engine_stalled_seconds") == 0


def test_kill_and_restart_on_the_same_port(start_server):
    server = start_server()
    with server.connect() as connection:
        connection.sendall(completion(server, n=16, max_tokens=100))
        time.sleep(0.05)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        again = start_server(port=server.port)
        assert again.port == server.port
        assert again.complete(max_tokens=1).status_code == 200


def test_port_in_use(start_server):
    server = start_server()
    second = subprocess.run([BINARY, "serve", find_model(), "--port", str(server.port)],
                            capture_output=True, text=True, timeout=30)
    assert second.returncode == 1 and str(server.port) in second.stderr
    assert "--port N" in second.stderr


@pytest.mark.parametrize("arguments, word", [
    (["--prot", "1"], "--port"),
    (["--port", "70000"], "--port"),
    (["--kv-budget", "much"], "512MiB"),
    (["--log-level", "loud"], "warning"),
    (["--idle-timeout", "nan"], "--idle-timeout"),
    (["--api-key-file", ""], "--api-key-file"),
    (["--cors-origin", "x"], "--cors-origin"),
    (["--cors-origin", "https://app.example/"], "--cors-origin"),
    (["--cors-origin", "https://a b"], "--cors-origin"),
])
def test_usage(arguments, word):
    result = subprocess.run([BINARY, "serve", find_model(), *arguments],
                            capture_output=True, text=True, timeout=30)
    assert result.returncode == 2 and word in result.stderr


def test_help():
    result = subprocess.run([BINARY, "serve", "--help"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0 and "--kv-budget" in result.stdout
    assert len(result.stdout.splitlines()) < 60


def test_bad_settings_of_a_good_model():
    for flags, word in (({"default_quality": "splendid"}, "full"), ({"kv_budget": "1"}, "1 bytes"),
                        ({"api_key_file": "/dev/null"}, "/dev/null")):
        result = subprocess.run(
            [BINARY, "serve", find_model(), "--port", "0",
             *[f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]],
            capture_output=True, text=True, timeout=60)
        assert result.returncode == 1 and word in result.stderr


@pytest.mark.parametrize("name, status", [("FATHOM_API_KEY", 1), ("FATHOM_API_KEY_FILE", 2)])
def test_an_empty_key_does_not_open_the_server(name, status):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    result = subprocess.run([BINARY, "serve", find_model(), "--port", "0"], env={**clean, name: ""},
                            capture_output=True, text=True, timeout=30)
    assert result.returncode == status and name in result.stderr and "empty" in result.stderr
    assert "listening" not in result.stderr


def test_environment_and_json_log(start_server):
    server = start_server(environment={"FATHOM_SERVED_NAME": "named", "FATHOM_LOG_FORMAT": "json",
                                       "FATHOM_API_KEY": "secret"}, wait="listening")
    server.wait_for('"message":"ready"')
    answer = server.get("/v1/models", headers={"Authorization": "Bearer secret"})
    assert answer.json()["data"][0]["id"] == "named"
    fields = {"model": "named", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    server.post(json=fields, headers={"Authorization": "Bearer secret", "X-Request-Id": 'a"b'})
    server.wait_for('"path":"/v1/completions"')
    entries = [json.loads(line) for line in server.lines]
    entry = next(entry for entry in entries if entry.get("path") == "/v1/completions")
    assert entry["id"] == 'a"b' and entry["status"] == 200 and entry["completion_tokens"] == 3
    assert entry["ttft_ms"] > 0 and entry["tpot_ms"] >= 0 and entry["tier"]
    assert not any("secret" in line for line in server.lines)


def test_a_log_that_nobody_reads_stops_nobody():
    """Standard error is a full pipe: lines are dropped, requests are answered."""
    reading, writing = os.pipe()
    process = subprocess.Popen([BINARY, "serve", find_model(), "--port", "0"], stderr=writing)
    os.close(writing)
    text = b""
    while b"ready\n" not in text:
        text += os.read(reading, 4096)
    port = int(text.split(b"listening on http://127.0.0.1:")[1].split(b"\n")[0])
    with httpx.Client(timeout=30) as client:
        for _ in range(1000):
            assert client.get(f"http://127.0.0.1:{port}/version").status_code == 200
        page = client.get(f"http://127.0.0.1:{port}/metrics").text
    dropped = next(line for line in page.splitlines() if line.startswith("fathom_log_lines_dropped"))
    assert float(dropped.split()[-1]) > 0
    threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reading, 65536), b"")]).start()
    process.terminate()
    assert process.wait(30) == 0
