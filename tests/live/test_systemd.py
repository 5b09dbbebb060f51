"""The units of deploy/, run by a real systemd: process 1 of namespaces of its own.

It has this machine's programs, without write access, and none of its units: only what the commands
of deploy/README.md install. A machine that lends no namespaces skips this, with the reason.
"""

import contextlib
import json
import os
import pathlib
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from live import ROOT, find_program, free_port
from serving import BINARY

SYSTEMD = pathlib.Path("/lib/systemd/systemd")

# Arguments: a folder, the project, the binary, the terminal. Leaves no cgroup behind.
BOOT = r"""
set -e
mount -t cgroup2 none "$1/cgroup"
group="$1/cgroup/fathom-test-$$"
mkdir "$group"
trap 'find "$group" -depth -type d -exec rmdir {} \;' EXIT
sh -c 'echo $$ >"$0/cgroup.procs"
       exec unshare --mount --pid --fork --cgroup --ipc --uts sh -ec "$@"' "$group" "$INSIDE" inside "$@"
"""
# What the units and systemd write goes into memory. /proc/sys is the whole machine's.
INSIDE = r"""
read -r pid _ </proc/self/stat
echo "$pid" >"$1/pid"
mount --bind "$4" /dev/console
mount -t tmpfs -o mode=755 none "$1/run"
mkdir "$1/run/project" "$1/run/units"
mount --bind -o ro "$2" "$1/run/project"
cp "$3" "$1/run/fathom"
cp -P /lib/systemd/system/*.target "$1/run/units"
mount --rbind "$1/run" /run
for folder in /usr/local /etc/systemd /var/cache /var/lib/systemd /var/tmp /tmp; do
    mount -t tmpfs -o mode=755 none $folder
done
mkdir -p /usr/local/bin /usr/local/share /etc/systemd/system
mount -t proc none /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t cgroup2 none /sys/fs/cgroup
mount -o remount,bind,ro /
exec env -i PATH=/usr/bin:/bin container=fathom-test SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units \
    /lib/systemd/systemd --unit=multi-user.target --show-status=no
"""

# Holds every thread of a process but its first, the event loop's, until the process is killed.
HOLD_ENGINE = """
import ctypes, os, sys
SEIZE, INTERRUPT, ANY_THREAD = 0x4206, 0x4207, 0x40000000
ptrace = ctypes.CDLL(None).ptrace
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if thread != sys.argv[1]:
        assert ptrace(SEIZE, int(thread), None, None) == 0
        assert ptrace(INTERRUPT, int(thread), None, None) == 0
print("held", flush=True)
while True:
    try:
        os.waitpid(-1, ANY_THREAD)
    except ChildProcessError:
        break
"""


class Machine:
    def __init__(self, folder):
        for name in ("cgroup", "run"):
            (folder / name).mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.console = ""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", BOOT, "boot", folder, ROOT, BINARY, os.ttyname(slave)],
            env={**os.environ, "INSIDE": INSIDE}, stdout=slave, stderr=slave)
        threading.Thread(target=self._read_console, daemon=True).start()
        self.pid_file = folder / "pid"

    def _read_console(self):
        while data := os.read(self.master, 65536):
            self.console += data.decode(errors="replace").replace("\r", "")

    def wait(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.console[-4000:]}"
            time.sleep(0.05)

    def boot(self):
        """The reason why it did not, or None."""
        for _ in range(1200):
            if self.process.poll() is not None:
                return self.console.strip().splitlines()[-1:]
            if self.pid_file.exists() and self.pid_file.read_text():
                state = subprocess.run([*self.enter(), "systemctl", "is-system-running"],
                                       capture_output=True, text=True).stdout.strip()
                if state in ("running", "degraded"):
                    return None
            time.sleep(0.05)
        return self.console.strip()[-500:]

    def enter(self):
        return ["nsenter", "--target", self.pid_file.read_text().strip(), "--all"]

    def run(self, *command):
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.console[-4000:]}"
        return done.stdout.strip()

    def write(self, path, text):
        self.run("sh", "-c", 'mkdir -p "${0%/*}" && printf %s "$1" >"$0"', path, text)

    def show(self, name):
        return self.run("systemctl", "show", "--value", "-p", name, "fathom.service")

    def main_process(self):
        """Its id out here: the process in the service's cgroup is the only one with that name."""
        inside = self.show("MainPID")
        for status in pathlib.Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                text = status.read_text()
                is_here = re.search(rf"^NSpid:.*\t{inside}$", text, re.M)
                if text.startswith("Name:\tfathom\n") and is_here:
                    return int(status.parent.name), text
        raise AssertionError(f"no process {inside}")

    def is_ready(self):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/ready", timeout=60).status_code == 200

    def end(self):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(self.pid_file.read_text()), signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A running system in which the README's commands have been run; the port is a free one."""
    for program in ("unshare", "nsenter"):
        find_program(program, package="util-linux")
    if not SYSTEMD.exists():
        pytest.skip("systemd is not installed (Debian's package systemd has it)")
    if os.geteuid() != 0:
        pytest.skip("only root may start a systemd in namespaces")
    made = Machine(tmp_path_factory.mktemp("machine"))
    if (reason := made.boot()) is not None:
        made.end()
        pytest.skip(f"systemd does not start in namespaces here: {reason}")
    text = (ROOT / "deploy" / "README.md").read_text()
    commands = re.search(r"^## systemd\n\n((?:    .*\n)+)", text, re.M).group(1)
    made.write("/etc/systemd/system/fathom.socket.d/port.conf",
               f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{made.port}\n")
    made.run("sh", "-ec", "cd /run/project\n" + commands.replace("build/fathom", "/run/fathom"))
    yield made
    made.end()


def completion(**fields):
    return {"model": "fathom-tiny", "prompt": "It was", "max_tokens": 4, **fields}


def test_it_is_started_when_it_can_serve(machine):
    """The README's last command waits for both units."""
    answer = httpx.post(machine.url + "/v1/completions", json=completion(), timeout=60)
    assert answer.status_code == 200, answer.text
    assert machine.show("Type") == "notify" and machine.show("ActiveState") == "active"
    assert "fathom_" in httpx.get(machine.url + "/metrics", timeout=60).text


def test_it_has_no_privileges(machine):
    _, status = machine.main_process()
    assert re.search(r"^Uid:\t(6[1-5]\d\d\d)\t\1\t\1\t\1$", status, re.M), status  # a dynamic user
    assert re.search(r"^CapEff:\t0+$", status, re.M) and re.search(r"^CapPrm:\t0+$", status, re.M)
    assert "NoNewPrivs:\t1\n" in status and "Seccomp:\t2\n" in status
    assert machine.run("ls", "/var/cache/fathom")  # what start-up measured is kept


def test_a_connection_starts_it(machine):
    machine.run("systemctl", "stop", "fathom.socket", "fathom.service")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", machine.port))
    machine.run("systemctl", "start", "fathom.socket")
    assert machine.show("ActiveState") == "inactive"
    answer = httpx.get(machine.url + "/health", timeout=60)  # held by systemd, answered by it
    assert answer.status_code in (200, 503)
    machine.wait(machine.is_ready, "never ready")
    assert machine.show("ActiveState") == "active"


def test_stopping_drains(machine):
    fields = completion(n=8, max_tokens=400, ignore_eos=True, stream=True)
    with httpx.stream("POST", machine.url + "/v1/completions", json=fields, timeout=120) as answer:
        pieces = answer.iter_text()
        body = next(pieces)
        machine.run("systemctl", "stop", "--no-block", "fathom.service")
        body += "".join(pieces)
    assert answer.status_code == 200 and body.endswith("data: [DONE]\n\n"), body[-300:]
    assert '"error"' not in body
    machine.wait(lambda: machine.show("ActiveState") == "inactive", "not stopped")
    assert machine.show("Result") == "success"
    machine.run("systemctl", "start", "fathom.service")


def test_a_restart_refuses_no_connection(machine):
    """Each on a connection of its own; 503 says that it loads or drains, and is an answer."""
    stop, seen = threading.Event(), []

    def ask():
        while not stop.is_set():
            seen.append(httpx.post(machine.url + "/v1/completions", json=completion(),
                                   timeout=60).status_code)

    client = threading.Thread(target=ask)
    client.start()
    try:
        machine.wait(lambda: 200 in seen, "no answer")
        before = machine.show("MainPID")
        machine.run("systemctl", "restart", "fathom.service")
        assert machine.show("MainPID") != before
        count = len(seen)
        machine.wait(lambda: 200 in seen[count:] or not client.is_alive(), "no answer after it")
    finally:
        stop.set()
        client.join()
    print(f"{len(seen)} requests, {seen.count(503)} of them told to come again")
    assert 200 in seen[count:] and set(seen) <= {200, 503}


@contextlib.contextmanager
def engine_held(process):
    holder = subprocess.Popen([sys.executable, "-c", HOLD_ENGINE, str(process)],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        yield
        assert holder.wait(60) == 0
    finally:
        holder.kill()
        holder.wait()


@contextlib.contextmanager
def process_held(process):
    os.kill(process, signal.SIGSTOP)
    yield


@pytest.fixture
def impatient(machine):
    machine.write("/etc/systemd/system/fathom.service.d/impatient.conf",
                  "[Service]\nWatchdogSec=4\nEnvironment=FATHOM_STUCK_TIMEOUT=0.5\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "fathom.service")
    yield machine
    machine.run("rm", "/etc/systemd/system/fathom.service.d/impatient.conf")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "fathom.service")


def health(machine):
    """Its status; 0 where there was no answer."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(machine.url + "/health", timeout=60).status_code
    return 0


@pytest.mark.parametrize("held", [engine_held, process_held])
def test_the_watchdog_restarts_what_does_not_come_on(impatient, held):
    """While the engine alone is held the event loop lives, says so, and gives no sign of life."""
    restarts = int(impatient.show("NRestarts"))
    process, _ = impatient.main_process()
    body = json.dumps(completion()).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
              b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with held(process), socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(request)
        if held is engine_held:
            impatient.wait(lambda: health(impatient) == 503, "never said that it is stuck")
        impatient.wait(lambda: int(impatient.show("NRestarts")) > restarts, "never restarted")
    impatient.wait(impatient.is_ready, "not ready again")
    assert impatient.main_process()[0] != process
    assert "watchdog" in impatient.console.lower()
