"""Three servers behind the HAProxy of deploy/: restarts, a kill, and who gets which request.

The tests print their counts: pytest -rP shows them.
"""

import collections
import json
import os
import re
import signal
import subprocess
import threading
import time

import httpx
import pytest

from live import ROOT, find_program, free_port
from serving import BINARY, Server

CONFIG = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
NAMES = ("a", "b", "c")
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4


def start_replica(port):
    return Server(port=port, max_sequences=64, chat_format="plain")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """url: of HAProxy; replicas: by name. A test may replace replicas, but leaves three."""
    program = find_program("haproxy", package="haproxy")
    replicas = {name: start_replica(0) for name in NAMES}
    text, port, watch_port = CONFIG.read_text(), free_port(), free_port()
    changes = [("bind :8080", f"bind 127.0.0.1:{port}"),
               ("bind 127.0.0.1:8405", f"bind 127.0.0.1:{watch_port}")]
    changes += [(f"127.0.0.1:{8081 + i}", f"127.0.0.1:{replicas[name].port}")
                for i, name in enumerate(NAMES)]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    config = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
    config.write_text(text)
    process = subprocess.Popen([program, "-db", "-f", config], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(100):
        try:
            if httpx.get(url + "/ready").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.1)
    made = collections.namedtuple("Cluster", "url watch replicas model")
    yield made(url, f"http://127.0.0.1:{watch_port}", replicas, replicas["a"].model_id)
    process.terminate()
    process.wait()
    for replica in replicas.values():
        assert replica.stop() == 0


def wait_up(cluster, name):
    """Until HAProxy sends it requests again."""
    deadline = time.monotonic() + 30
    pattern = rf'haproxy_server_status{{proxy="by_prefix",server="{name}",state="UP"}} 1'
    while not re.search(pattern, httpx.get(cluster.watch + "/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_config():
    done = subprocess.run([find_program("haproxy", package="haproxy"), "-c", "-f", CONFIG],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr


def ask(cluster, client, prompt, **fields):
    answer = client.post("/v1/completions",
                         json={"model": cluster.model, "prompt": prompt, "max_tokens": 4, **fields})
    assert answer.status_code == 200
    return answer.headers["x-served-by"]


def test_prompts_that_begin_alike_go_to_one_server(cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        chosen = {}
        for number in range(12):
            begin = f"Story {number}. {LONG}" + "x" * 200
            chosen[number] = {ask(cluster, client, begin + end) for end in ("the", "a b c", "!")}
            assert len(chosen[number]) == 1, chosen[number]
        homes = collections.Counter(home for one in chosen.values() for home in one)
        assert set(homes) == set(NAMES), homes
        as_chat = {"model": cluster.model, "max_tokens": 4}
        for number in range(3):
            messages = [{"role": "user", "content": f"Chat {number}. {LONG}"}]
            answers = [client.post("/v1/chat/completions", json={**as_chat, "messages": messages})
                       for _ in range(3)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.headers["x-served-by"] for answer in answers}) == 1
    found = sum(one.metric("fathom_prefix_cache_hits_total") for one in cluster.replicas.values())
    print(f"homes of 12 prefixes: {dict(homes)}; prompt tokens found in caches: {found:.0f}")
    assert found > 12 * 2 * 64


def test_short_prompts_go_where_least_is_outstanding(cluster):
    fields = {"model": cluster.model, "prompt": "x", "max_tokens": 500, "n": 32, "stream": True,
              "ignore_eos": True}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        # One server after the other gets a long answer to give, and no second one before all have.
        with client.stream("POST", "/v1/completions", json=fields) as one, \
                client.stream("POST", "/v1/completions", json=fields) as two:
            held = {one.headers["x-served-by"], two.headers["x-served-by"]}
            assert len(held) == 2
            assert ask(cluster, client, "y") not in held


def bench(cluster, *flags):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    return subprocess.Popen([BINARY, "bench", cluster.url, *map(str, flags), "--ignore-eos",
                             "--lag-limit", "60000", "--json", "-"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=clean)


def restart_all(cluster):
    for name in NAMES:
        old = cluster.replicas[name]
        assert old.stop(timeout=90) == 0
        cluster.replicas[name] = start_replica(old.port)
        wait_up(cluster, name)


@pytest.mark.parametrize("shape", [("--no-stream",), ()], ids=["whole", "streamed"])
def test_a_rolling_restart_loses_nothing(cluster, shape):
    load = bench(cluster, "-c", 32, "-n", 0, "-d", 60, "-i", 48, "-o", 32, "-q", "fast", *shape)
    time.sleep(1)
    started = time.monotonic()
    restart_all(cluster)
    took = time.monotonic() - started
    assert load.poll() is None, "the load ended before the restarts did"
    load.send_signal(signal.SIGINT)
    report, complaints = load.communicate(timeout=120)
    point = json.loads(report)["points"][0]
    print(f"three restarts in {took:.1f} s: {point['completed']} requests, {point['failed']} failed")
    assert point["failed"] == 0, (point, complaints)
    assert point["completed"] > 50


class Stream(threading.Thread):
    """Streams, one after the other, until told to stop; what became of each."""

    def __init__(self, cluster, stop, outcomes):
        super().__init__()
        self.cluster, self.stop, self.outcomes, self.served_by = cluster, stop, outcomes, None

    def run(self):
        fields = {"model": self.cluster.model, "prompt": "x", "max_tokens": 200,
                  "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self.cluster.url, timeout=60) as client:
            while not self.stop.is_set():
                began = time.monotonic()
                try:
                    with client.stream("POST", "/v1/completions", json=fields) as answer:
                        self.served_by = answer.headers.get("x-served-by")
                        body = "".join(answer.iter_text())
                    whole = answer.status_code == 200 and body.endswith("data: [DONE]\n\n")
                except httpx.TransportError:
                    whole = False
                self.outcomes.append((whole, self.served_by, began))
                self.served_by = None


def test_a_kill_costs_only_its_streams(cluster):
    stop, outcomes = threading.Event(), []
    streams = [Stream(cluster, stop, outcomes) for _ in range(9)]
    plain = bench(cluster, "-c", 4, "-n", 0, "-d", 60, "-i", 16, "-o", 16, "--no-stream")
    for stream in streams:
        stream.start()
    while sum(stream.served_by == "b" for stream in streams) < 2 or len(outcomes) < 20:
        time.sleep(0.002)
    cluster.replicas["b"].process.kill()
    killed_at = time.monotonic()
    cluster.replicas["b"].process.wait()
    # The others go on while it is away.
    deadline = killed_at + 60
    while not {"a", "c"} <= {name for _, name, began in list(outcomes) if began > killed_at}:
        assert time.monotonic() < deadline, outcomes
        time.sleep(0.1)
    cluster.replicas["b"] = start_replica(cluster.replicas["b"].port)
    wait_up(cluster, "b")
    stop.set()
    for stream in streams:
        stream.join()
    plain.send_signal(signal.SIGINT)
    point = json.loads(plain.communicate(timeout=120)[0])["points"][0]
    lost = [outcome for outcome in outcomes if not outcome[0]]
    print(f"{len(outcomes)} streams, {len(lost)} lost, all of the killed server's; "
          f"{point['completed']} whole answers, {point['failed']} failed")
    assert 1 <= len(lost) <= len(streams)
    assert all(name == "b" and began < killed_at for _, name, began in lost), lost
    assert point["failed"] == 0 and point["completed"] > 20, point
