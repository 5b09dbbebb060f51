"""The alerts of deploy/ speak of what exists; tests/live has the programs that read them."""

import pathlib
import re

RULES = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"


def test_alerts_watch_what_is_exported(server):
    page = server.get("/metrics").text
    for name in set(re.findall(r"\bfathom_\w+", RULES.read_text())):
        assert f"# TYPE {name.removesuffix('_bucket')} " in page, name
