"""What the docs tell to run runs, what they name exists, and their links lead somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from live import ROOT, find_program
from serving import BINARY

TEXT = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"^```(sh|python|js)\n(.*?)^```", TEXT, re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "deploy").glob("**/*.md"))]
COMMAND = re.compile(r"^    fathom ((?:bench|eval|calibrate) \S+ -.*)$", re.M)
COMMANDS = [line for page in PAGES for line in COMMAND.findall(page.read_text())]
# Of other programs: ./test, curl, cmake, docker, systemctl, numactl, kubectl, mmdebstrap, llama-server.
OTHER_FLAGS = set("""--all --fail-with-body --build --build-arg --now --cpunodebind --membind
    --from-literal --variant --help --quick --no-cache-prompt""".split())
# Variables that tests read rather than the program: those that some file under tests/ asks the environment for.
TEST_VARIABLES = {name for file in (ROOT / "tests").rglob("*.py")
                  for name in re.findall(r"environ(?:\.get\(|\[)\"FATHOM_(\w+)\"", file.read_text())}


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


# ---- What runs, and what is named ------------------------------------------------------------------


@pytest.fixture(scope="module")
def yours(tmp_path_factory):
    """A folder with the names that the docs use for what is the reader's own."""
    folder = tmp_path_factory.mktemp("yours")
    text = " ".join((ROOT / "README.md").read_text().split()) * 4
    (folder / "yours.txt").write_text(text)
    shutil.copytree(ROOT / "models" / "fathom-tiny", folder / "MODEL")
    return folder


def fewer(arguments):
    """Less of the same: enough to see that it works."""
    return arguments + {"bench": ["-n", "6", "--lag-limit", "60000"],
                        "eval": ["--max-tokens", "600"],
                        "calibrate": ["--max-tokens", "600", "--measure-tokens", "600"]}[arguments[0]]


@pytest.mark.parametrize("line", COMMANDS, ids=[line.split(" ")[0] for line in COMMANDS])
def test_command(talkative, yours, line):
    arguments = shlex.split(line.replace("HOST:8080", f"{talkative.host}:{talkative.port}"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    done = subprocess.run([BINARY, *fewer(arguments)], capture_output=True, text=True, cwd=yours,
                          timeout=300, env=clean)
    assert done.returncode == 0, done.stderr
    if "--html" in arguments:
        assert (yours / arguments[arguments.index("--html") + 1]).stat().st_size > 0


def test_flags_and_variables_exist():
    helps = "".join(subprocess.run([BINARY, command, "--help"], capture_output=True, text=True).stdout
                    for command in ("serve", "generate", "eval", "calibrate", "inspect", "bench"))
    flags = set(re.findall(r"(--[a-z][a-z0-9-]*) ", helps)) | OTHER_FLAGS
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        assert named <= flags, (page, named - flags)
        variables = {f"--{name.lower().replace('_', '-')}"
                     for name in set(re.findall(r"(?<![\w-])FATHOM_(\w+)=", text)) - TEST_VARIABLES}
        assert variables <= flags, (page, variables - flags)


def test_every_alert_is_explained():
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    explained = re.findall(r"\bFathom[A-Z]\w+", (ROOT / "docs" / "operations.md").read_text())
    assert sorted(explained) == sorted(re.findall(r"alert: (\w+)", rules))


def test_memory_of_the_bundled_model():
    """Scratch depends on the processor's instructions; the rest is the model's."""
    said = subprocess.run([BINARY, "inspect", ROOT / "models" / "fathom-tiny"], capture_output=True,
                          text=True).stdout
    figures = [re.search(r"^ *memory +(weights .*?), scratch .*?, (.*)$", text, re.M).groups()
               for text in (said, (ROOT / "deploy" / "README.md").read_text())]
    assert figures[0] == figures[1]
