"""The files of deploy/ that other programs read, each checked by its own or by its schema."""

import pathlib
import re
import subprocess

import pytest

from live import ROOT, find_program
from serving import BINARY

DEPLOY = ROOT / "deploy"
KUBERNETES = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml"))


def run(*command, **arguments):
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- Kubernetes -----------------------------------------------------------------------------------

# What kubernetes_validate does not know: of each, what this project uses, as its API defines it.
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(required, **properties):
    return {"type": "object", "required": required.split(), "properties": properties,
            "additionalProperties": False}


POOL = closed(
    "selector targetPorts endpointPickerRef",
    selector=closed("matchLabels", matchLabels={"type": "object",
                                                "additionalProperties": {"type": "string"}}),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": closed("number", number=PORT)},
    endpointPickerRef=closed("name port", name=NAME, group={"type": "string"}, kind=NAME,
                             port=closed("number", number=PORT),
                             failureMode={"enum": ["FailOpen", "FailClose"]}))
MATCH = closed("path", path=closed("type value", type={"enum": ["Exact", "PathPrefix"]},
                                   value={"type": "string", "pattern": "^/"}))
ROUTE = closed(
    "parentRefs rules",
    parentRefs={"type": "array", "minItems": 1, "items": closed("name", name=NAME)},
    rules={"type": "array", "items": closed(
        "backendRefs", matches={"type": "array", "items": MATCH},
        backendRefs={"type": "array", "items": closed("name", group={"type": "string"},
                                                      kind={"type": "string"}, name=NAME)},
        timeouts=closed("request", request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}))})
OTHERS = {("inference.networking.k8s.io/v1", "InferencePool"): POOL,
          ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE}


def documents(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (PyPI)")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_kubernetes_schema(path):
    checker = pytest.importorskip("kubernetes_validate",
                                  reason="kubernetes-validate is not installed (PyPI)")
    jsonschema = pytest.importorskip("jsonschema")
    for document in documents(path):
        kind = document["apiVersion"], document["kind"]
        if kind in OTHERS:
            jsonschema.validate(document, closed(
                "apiVersion kind metadata spec", apiVersion={}, kind={},
                metadata=closed("name", name=NAME), spec=OTHERS[kind]))
        elif kind[1] == "Kustomization":
            assert all((path.parent / name).exists() for name in document["resources"])
        else:
            for version in ("1.34", checker.latest_version()):
                checker.validate(document, version, strict=True)


def test_kubernetes_files_fit_together():
    by_kind = {document["kind"]: document for path in KUBERNETES for document in documents(path)}
    deployment = by_kind["Deployment"]["spec"]
    pod, container = deployment["template"]["spec"], deployment["template"]["spec"]["containers"][0]
    labels = deployment["template"]["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget", "InferencePool"):
        assert by_kind[kind]["spec"]["selector"]["matchLabels"].items() <= labels
    assert by_kind["Service"]["spec"]["selector"].items() <= labels
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert by_kind["InferencePool"]["spec"]["targetPorts"][0]["number"] in ports.values()
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == \
        by_kind["Deployment"]["metadata"]["name"]
    # The server has time to drain before it is killed.
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > \
        container["lifecycle"]["preStop"]["sleep"]["seconds"] + float(environment["FATHOM_DRAIN_TIMEOUT"])
    # Every variable is a flag, and every probe a path, of the server.
    flags = run(BINARY, "serve", "--help")
    for name in environment.keys() - {"FATHOM_API_KEY"}:
        assert f"--{name.removeprefix('FATHOM_').lower().replace('_', '-')} " in flags, name
    probes = [container[name]["httpGet"]["path"]
              for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["/health", "/health", "/ready"]


def test_the_autoscalers_metric_is_exported(server):
    text = (DEPLOY / "kubernetes" / "autoscaler.yaml").read_text()
    server.metric(re.search(r"name: (fathom_\w+)", text).group(1))


# ---- systemd --------------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path):
    """The units, with the binary of this build: what is verified must exist."""
    for name in ("fathom.service", "fathom.socket"):
        text = (DEPLOY / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/usr/local/bin/fathom", BINARY))
    return tmp_path


def test_systemd_verify(units):
    program = find_program("systemd-analyze", package="systemd")
    said = run(program, "verify", units / "fathom.service", units / "fathom.socket")
    # It reads the machine's own units as well: only what is said of these counts.
    assert "fathom" not in said, said


def test_systemd_hardening(units):
    program = find_program("systemd-analyze", package="systemd")
    said = run(program, "security", "--offline=true", "--threshold=15", "--no-pager",
               units / "fathom.service")
    print(said.strip().splitlines()[-1])


def test_systemd_settings_are_flags():
    text = (DEPLOY / "systemd" / "fathom.service").read_text()
    flags = run(BINARY, "serve", "--help")
    for name in set(re.findall(r"FATHOM_\w+", text)) - {"FATHOM_MODEL"}:
        assert f"--{name.removeprefix('FATHOM_').lower().replace('_', '-')} " in flags, name
    stop = int(re.search(r"TimeoutStopSec=(\d+)", text).group(1))
    assert stop > float(re.search(r"--drain-timeout S .*\((\d+)\)", flags).group(1))


# ---- Shell ----------------------------------------------------------------------------------------


def test_shellcheck():
    program = find_program("shellcheck", package="shellcheck")
    run(program, "-S", "warning", "-s", "bash", "-e", "SC2034,SC1091", ROOT / "run", ROOT / "test",
        DEPLOY / "prepare.sh", ROOT / "tests" / "live" / "run")
