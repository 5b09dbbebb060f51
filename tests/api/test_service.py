"""Under a service manager: what systemd's protocols promise, with a manager of the test's own."""

import os
import signal
import socket
import sys
import time

import pytest

from conftest import Server, read_response
from test_http import GET, completion

# Puts a descriptor where the protocol wants it, under the process's own id.
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=sys.argv[2])
os.execv(sys.argv[3], sys.argv[3:])
"""


class Manager:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.settimeout(30)
        self.path = path if isinstance(path, str) else "@" + path[1:].decode()

    def take(self):
        return self.socket.recv(4096).decode()

    def take_until(self, state):
        while self.take() != state:
            pass

    def forget(self):
        self.socket.setblocking(False)
        try:
            while True:
                self.take()
        except BlockingIOError:
            self.socket.settimeout(30)


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    name = f"fathom-test-{os.getpid()}"
    made = Manager(str(tmp_path / "notify") if request.param == "path" else b"\0" + name.encode())
    yield made
    made.socket.close()


def test_states(start_server, manager):
    server = start_server(environment={"NOTIFY_SOCKET": manager.path})
    assert manager.take() == "READY=1"
    server.process.send_signal(signal.SIGTERM)
    assert manager.take() == "STOPPING=1"
    assert server.process.wait(30) == 0


def test_watchdog(start_server, tmp_path):
    """Signs of life at rest and under load; none while the engine does not come on."""
    manager = Manager(str(tmp_path / "notify"))
    server = start_server(max_step_rows=8192, step_target_ms=0, threads=1, stuck_timeout=0.1,
                          kv_budget="256MiB", log_level="error",
                          environment={"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "500000"})
    manager.take_until("READY=1")
    for _ in range(3):
        assert manager.take() == "WATCHDOG=1"
    with server.connect() as connection:
        prompts = [[i + 1] + [7] * 499 for i in range(16)]  # one long step
        connection.settimeout(120)
        connection.sendall(completion(server, prompt=prompts, max_tokens=1))
        deadline = time.monotonic() + 60
        while server.get("/health").status_code == 200:
            assert time.monotonic() < deadline
        manager.forget()
        while server.get("/health").status_code == 503:
            with pytest.raises(BlockingIOError):
                manager.socket.setblocking(False)
                manager.take()
        manager.socket.settimeout(30)
        assert read_response(connection)[0] == 200
    assert manager.take() == "WATCHDOG=1"
    manager.socket.close()  # who does not listen stops nobody
    assert server.complete(max_tokens=1).status_code == 200


def activated(listener, count="1", **arguments):
    descriptor = listener.fileno()
    return Server(prefix=[sys.executable, "-c", ACTIVATE, str(descriptor), count],
                  pass_fds=(descriptor,), **arguments)


def test_socket_activation():
    """The socket outlives the process: a connection made while there is none is answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        first = activated(listener, port=1)
        assert first.port == listener.getsockname()[1]
        with first.connect() as kept:
            kept.sendall(GET + b"\r\n")
            assert read_response(kept)[0] == 200
            assert first.stop() == 0
            with first.connect() as early:
                early.sendall(GET + b"Connection: close\r\n\r\n")
                second = activated(listener)
                assert read_response(early)[0] == 200
        assert second.complete(max_tokens=1).status_code == 200
        assert second.stop() == 0


def test_draining_leaves_new_connections_to_the_next():
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        first = activated(listener, max_sequences=1, wait="ready")
        fields = first.fields_lasting(2)
        with first.connect() as running:
            running.sendall(completion(first, **fields))
            while first.metric("fathom_num_requests_running") == 0:
                time.sleep(0.005)
            first.process.send_signal(signal.SIGTERM)
            first.wait_for("termination: finishing")
            with first.connect() as early:
                early.sendall(GET + b"Connection: close\r\n\r\n")
                second = activated(listener)
                assert read_response(early)[0] == 200
            assert read_response(running)[0] == 200
        assert first.process.wait(30) == 0
        assert second.stop() == 0


def test_what_cannot_be_listened_on(tmp_path):
    plain = socket.socket()
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "socket"))
    local.listen()
    with socket.create_server(("127.0.0.1", 0)) as good:
        for given, count, message in ((plain, "1", "does not listen for TCP"),
                                      (local, "1", "does not listen for TCP"), (good, "2", "LISTEN_FDS is 2")):
            with pytest.raises(RuntimeError, match=message):
                activated(given, count)
    plain.close()
    local.close()
