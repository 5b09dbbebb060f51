"""/openapi.json is the file, and leaves no path out. That it is true is for tests/clients."""

import json
import re

from conftest import ROOT


def test_served_as_written(server):
    answer = server.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == (ROOT / "api" / "openapi.yaml").read_bytes()


def test_no_path_is_left_out():
    """Every path of the router's table is described, and every described one is there; but not the
    page, which is for people."""
    table = (ROOT / "server" / "router.c").read_text().split("routes[] = {")[1].split("\n};")[0]
    served = set(re.findall(r'\.path = "([^"]+)"', table)) - {"/"}
    paths = json.loads((ROOT / "api" / "openapi.yaml").read_text())["paths"]
    assert served == {path.replace("{id}", "") for path in paths}
