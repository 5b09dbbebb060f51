"""The dashboard and the alerts, with a real Prometheus that scrapes a real server under load."""

import json
import math
import re
import subprocess
import threading
import time

import httpx
import pytest

from live import ROOT, find_program, free_port

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "fathom.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("arguments", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool(arguments):
    program = find_program("promtool", package="prometheus")
    done = subprocess.run([program, *arguments.split()], cwd=ROOT / "deploy" / "prometheus",
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_form():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert {"Depth", "Requests", "Latency", "KV cache", "Queue"} <= set(rows)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD).replace("$__all", "").replace("$__rate_interval", "")
    assert set(re.findall(r"\$\{?(\w+)", text)) == variables


def test_dashboard_shows_what_is_exported(server):
    page = server.get("/metrics").text
    for _, expression in EXPRESSIONS:
        for name in re.findall(r"\b(?:fathom|process)_\w+", expression):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            assert f"# TYPE {name} " in page or f"# TYPE {plain} histogram" in page, name


def work(server, done):
    """Every tier and auto, a queue, prompts that begin alike, a client that leaves."""
    for number in range(10**9):
        if done.is_set():
            return
        for quality in ("full", "high", "balanced", "fast", "auto"):
            server.complete(prompt="Once upon a time " * 10 + str(number), quality=quality, n=4,
                            max_tokens=24)
        try:
            httpx.post(server.url + "/v1/completions", timeout=0.05,
                       json={"model": server.model_id, "prompt": "x", "max_tokens": 400, "n": 8})
        except httpx.TimeoutException:
            pass


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A function that queries a Prometheus which has watched a busy server for a while."""
    from serving import Server

    program = find_program("prometheus", package="prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    server = Server(max_sequences=8)
    config = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    for old, new in (("127.0.0.1:8080", f"{server.host}:{server.port}"), ("15s", "1s"),
                     ("- alerts.yml", f"- {ROOT}/deploy/prometheus/alerts.yml")):
        assert old in config
        config = config.replace(old, new)
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    done = threading.Event()
    workers = [threading.Thread(target=work, args=[server, done]) for _ in range(3)]
    for worker in workers:
        worker.start()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def ask(path, **parameters):
        answer = client.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                seen = ask("/api/v1/query", query="count_over_time(fathom_ready[1m])")["result"]
                if seen and float(seen[0]["value"][1]) >= 8:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield ask
    finally:
        done.set()
        process.terminate()
        process.wait()
        for worker in workers:
            worker.join()
        assert server.stop() == 0


def test_the_server_is_scraped(prometheus):
    targets = prometheus("/api/v1/targets")["activeTargets"]
    assert [(one["health"], one["labels"]["job"]) for one in targets] == [("up", "fathom")]


def test_every_panel_has_data(prometheus):
    empty = []
    for title, expression in EXPRESSIONS:
        query = expression.replace("$instance", ".*").replace("$__rate_interval", "30s")
        result = prometheus("/api/v1/query", query=query)["result"]
        values = [float(series["value"][1]) for series in result]
        if not any(math.isfinite(value) for value in values):
            empty.append((title, query, values))
    assert not empty


def test_every_alert_is_evaluated(prometheus):
    deadline = time.monotonic() + 30
    while True:
        rules = prometheus("/api/v1/rules")["groups"][0]["rules"]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
