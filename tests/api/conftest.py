"""Starts the real binary and talks to it: no mocks, no test doors in the server.

FATHOM_BINARY (default build/fathom) and FATHOM_MODEL (default models/fathom-tiny, or the smallest
checkpoint with a tokenizer when that is not there) choose what is tested. With FATHOM_TEST_TLS=1
every server speaks TLS: the same tests, through the other transport.
"""

import functools
import os
import pathlib
import queue
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("FATHOM_BINARY", str(ROOT / "build" / "fathom"))
START_TIMEOUT = 60
EVERYTHING_OVER_TLS = os.environ.get("FATHOM_TEST_TLS") == "1"


def find_model():
    if "FATHOM_MODEL" in os.environ:
        return os.environ["FATHOM_MODEL"]
    bundled = ROOT / "models" / "fathom-tiny"
    if (bundled / "model.safetensors").exists():
        return str(bundled)
    return str(ROOT / "tests" / "reference" / "golden" / "with-tokenizer")


def make_certificate(folder, key="ec"):
    """A self-signed certificate for 127.0.0.1; returns the paths of certificate and key."""
    paths = [pathlib.Path(folder) / f"{key.replace(':', '')}-{name}.pem" for name in ("cert", "key")]
    kind = ["-newkey", key] + (["-pkeyopt", "ec_paramgen_curve:prime256v1"] if key == "ec" else [])
    subprocess.run(["openssl", "req", "-x509", *kind, "-nodes", "-days", "2", "-subj", "/CN=fathom",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]],
                   check=True, capture_output=True)
    return paths


@functools.cache
def certificate():
    return make_certificate(tempfile.mkdtemp(prefix="fathom-tls-"))


def client_context(**attributes):
    context = ssl.create_default_context(cafile=certificate()[0])
    for name, value in attributes.items():
        setattr(context, name, value)
    return context


class HandMade:
    """A TLS client whose bytes are in the test's hands."""

    def __init__(self, server, context=None):
        self.socket = server.connect_plain()
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = (context or client_context()).wrap_bio(
            self.incoming, self.outgoing, server_hostname=server.host)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def _run(self, function):
        while True:
            try:
                return function()
            except ssl.SSLWantReadError:
                self.flush()
                data = self.socket.recv(65536)
                if data:
                    self.incoming.write(data)
                else:
                    self.incoming.write_eof()
            finally:
                self.flush()

    def flush(self):
        if self.outgoing.pending:
            self.socket.sendall(self.outgoing.read())

    def handshake(self):
        self._run(self.tls.do_handshake)

    def sendall(self, data):
        self._run(lambda: self.tls.write(data))

    def recv(self, size):
        """b"" is a close_notify; an end without one is an SSLEOFError."""
        try:
            return self._run(lambda: self.tls.read(size))
        except ssl.SSLZeroReturnError:
            return b""

    def end(self):
        """Says close_notify, and goes on reading."""
        try:
            self.tls.unwrap()
        except ssl.SSLError:  # the server has not said it, and may go on
            self.flush()


class Server:
    """One process. Flags are keyword arguments: kv_budget="8MiB" is --kv-budget 8MiB."""

    def __init__(self, model=None, wait="ready", environment=None, tls=EVERYTHING_OVER_TLS,
                 prefix=(), pass_fds=(), **flags):
        flags = {"port": 0, "kv_budget": "64MiB", **flags}
        self.trust = ssl.create_default_context() if tls else None
        if tls:
            flags["tls_cert"], flags["tls_key"] = certificate()
            self.trust.load_verify_locations(flags["tls_cert"])
        command = [*prefix, BINARY, "serve", model or find_model()]
        for name, value in flags.items():
            command.append(f"--{name.replace('_', '-')}")
            if value is not True:
                command.append(str(value))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
        clean["FATHOM_COST_CACHE"] = "off"  # nothing is left in a home
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**clean, **(environment or {})},
            pass_fds=pass_fds,
        )
        self.lines, self.new_lines = [], queue.Queue()
        threading.Thread(target=self._read_log, daemon=True).start()
        self.port = None
        address = self.wait_for(r"listening on (https?)://(\S+):(\d+)")
        self.host, self.port = address.group(2), int(address.group(3))
        self.url = f"{address.group(1)}://{self.host}:{self.port}"
        if wait == "ready":
            self.wait_for(r"^ready$|\"message\":\"ready\"")

    def _read_log(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self.new_lines.put(line)
        self.new_lines.put(None)

    def wait_for(self, pattern):
        """The first log line that matches, from the start of the log on."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found:
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"no line like {pattern!r} in {self.lines}")
            try:
                if self.new_lines.get(timeout=1) is None and not any(
                    re.search(pattern, line) for line in self.lines
                ):
                    raise RuntimeError(f"the server ended: {self.lines}")
            except queue.Empty:
                pass

    def get(self, path, **arguments):
        return httpx.get(self.url + path, timeout=60, verify=self.trust or True, **arguments)

    def post(self, path="/v1/completions", json=None, **arguments):
        return httpx.post(self.url + path, json=json, timeout=60, verify=self.trust or True,
                          **arguments)

    def complete(self, headers=None, **fields):
        fields = {"model": self.model_id, "prompt": "Once upon a time", "max_tokens": 12, **fields}
        return self.post(json=fields, headers=headers)

    def connect(self, receive_buffer=None):
        connection = self.connect_plain(receive_buffer)
        if not self.trust:
            return connection
        return self.trust.wrap_socket(connection, server_hostname=self.host)

    def connect_plain(self, receive_buffer=None):
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect((self.host, self.port))
        return connection

    def client(self, **arguments):
        arguments = {"api_key": "none", "max_retries": 0, "timeout": 60, **arguments}
        if self.trust:
            arguments["http_client"] = openai.DefaultHttpxClient(verify=self.trust)
        return openai.OpenAI(base_url=self.url + "/v1", **arguments)

    @property
    def model(self):
        return self.get("/v1/models").json()["data"][0]

    @functools.cached_property
    def model_id(self):
        return self.model["id"]

    def fields_lasting(self, seconds):
        """A request that keeps a server with max_sequences=1 busy for about that long."""
        start = time.monotonic()
        self.complete(n=8, max_tokens=100, ignore_eos=True)
        choices = int(seconds * 8 / (time.monotonic() - start)) + 1
        prompts = min(choices // 128 + 1, 7)
        n = min(choices // prompts + 1, 128)
        return {"prompt": ["x"] * prompts, "n": n, "max_tokens": 100, "ignore_eos": True}

    def metric(self, name, **labels):
        """Sum of the lines of that name with those labels."""
        total, found = 0.0, False
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(re.escape(name) + r"(\{.*\})? (\S+)", line)
            if match and all(f'{k}="{v}"' in (match.group(1) or "") for k, v in labels.items()):
                total, found = total + float(match.group(2)), True
        assert found, f"no metric {name}"
        return total

    def wait_idle(self, seconds=30):
        """Until the engine holds nothing: what every ending of a request must lead to."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = [
                self.metric(f"fathom_{name}")
                for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
            ]
            if not any(left):
                return
            time.sleep(0.05)
        raise AssertionError(f"running, waiting, blocks: {left}")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_descriptors(self, count, seconds=30):
        """Until so many files and sockets are open: none that was closed stayed behind."""
        deadline = time.monotonic() + seconds
        while self.descriptors() > count:
            assert time.monotonic() < deadline, (self.descriptors(), count)
            time.sleep(0.05)

    def stop(self, number=signal.SIGTERM, timeout=60):
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture(scope="session")
def server():
    running = Server()
    yield running
    assert running.process.poll() is None, f"the server died: {running.lines[-20:]}"
    assert running.stop() == 0, running.lines[-20:]


@pytest.fixture(scope="module")
def secure():
    """As `server`, over TLS."""
    running = Server(tls=True)
    yield running
    assert running.process.poll() is None, running.lines[-20:]
    assert running.stop() == 0, running.lines[-20:]


@pytest.fixture
def start_server():
    """Starts servers with flags of the test's own; each must end well."""
    started = []

    def start(**arguments):
        started.append(Server(**arguments))
        return started[-1]

    yield start
    for running in started:
        running.stop()
        assert running.process.returncode in (0, -signal.SIGKILL), running.lines[-20:]


def read_response(connection, data=b""):
    """One response from a socket: status, headers (lower case), body. None at the end. `data` of it
    has been read."""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1)
        if not piece:
            assert not data, data
            return None
        data += piece
    head, _, _ = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while True:
            size = int(read_line(connection), 16)
            body += read_exactly(connection, size)
            assert read_line(connection) == b""
            if size == 0:
                break
    elif status >= 200 and status != 204:
        body = read_exactly(connection, int(headers["content-length"]))
    return status, headers, body


def read_line(connection):
    line = b""
    while not line.endswith(b"\r\n"):
        piece = connection.recv(1)
        assert piece, line
        line += piece
    return line[:-2]


def read_exactly(connection, size):
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, (size, data)
        data += piece
    return data
