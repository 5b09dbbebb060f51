"""The examples of docs/api.md do what they say, and its links lead somewhere."""

import os
import re
import subprocess
import sys

import pytest

from live import ROOT, find_program

TEXT = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"^```(sh|python|js)\n(.*?)^```", TEXT, re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "deploy").glob("**/*.md"))]


@pytest.fixture(scope="module")
def talkative():
    from serving import Server

    running = Server(chat_format="plain")
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("number", range(len(EXAMPLES)),
                         ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(EXAMPLES)])
def test_example(talkative, number, tmp_path):
    kind, code = EXAMPLES[number]
    assert "127.0.0.1:8080" in code
    code = code.replace("127.0.0.1:8080", f"{talkative.host}:{talkative.port}")
    if kind == "sh":
        find_program("curl", package="curl")
        command = ["bash", "-euo", "pipefail", "-c", code]
    elif kind == "python":
        command = [sys.executable, "-c", code]
    else:
        node = find_program("node", package="nodejs")
        version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
        if int(version.lstrip("v").split(".")[0]) < 18:
            pytest.skip(f"Node {version.strip()} has no fetch; 18 and later have")
        (tmp_path / "example.mjs").write_text(code)
        command = [node, tmp_path / "example.mjs"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "FATHOM_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    talkative.wait_idle()  # a stream that was left was cancelled


def test_there_are_examples_of_each_kind():
    kinds = [kind for kind, _ in EXAMPLES]
    assert all(kinds.count(kind) >= 2 for kind in ("sh", "python", "js"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, section = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert section in plain, target
