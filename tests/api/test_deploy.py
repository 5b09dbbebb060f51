"""What deploy/ holds is accepted by the programs that will read it, and speaks of what exists."""

import pathlib
import re
import shutil
import subprocess

import pytest

PROMETHEUS = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


@pytest.mark.parametrize("arguments", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool(arguments):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run(["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_watch_what_is_exported(server):
    page = server.get("/metrics").text
    rules = (PROMETHEUS / "alerts.yml").read_text()
    for name in set(re.findall(r"\bfathom_\w+", rules)):
        assert f"# TYPE {name.removesuffix('_bucket')} " in page, name
