"""The commands beside serve: what they print, in words and as JSON, and what they refuse."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import time

import pytest

from conftest import BINARY, find_model

MODEL = find_model()
ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "README.md"


def run(command, *arguments, status=0):
    result = subprocess.run([BINARY, command, *map(str, arguments)], capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == status, result.stderr
    return result.stdout if status == 0 else result.stderr


@pytest.mark.parametrize("command", ["serve", "generate", "eval", "calibrate", "inspect", "bench"])
def test_help_is_one_screen(command):
    lines = run(command, "--help").splitlines()
    assert lines[0].startswith(f"usage: fathom {command}") and len(lines) < 60
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["generate", "eval", "calibrate", "inspect"])
def test_what_is_not_a_model_is_refused(command, tmp_path):
    needed = {"generate": ["-p", "a"], "eval": ["-t", TEXT], "calibrate": ["-t", TEXT]}
    said = run(command, tmp_path, *needed.get(command, []), status=1)
    assert "config.json" in said and len(said.splitlines()) <= 2


def test_inspect():
    said, told = run("inspect", MODEL), json.loads(run("inspect", MODEL, "--json"))
    assert f"{told['blocks']} blocks x {told['hidden_size']}" in said and "cost" not in told
    assert [tier["name"] for tier in told["tiers"]][0] == told["default_tier"] == "full"
    for tier in told["tiers"]:
        assert tier["name"] in said and f"{tier['perplexity']:.3f}" in said


def test_inspect_measures_costs(tmp_path):
    said = run("inspect", MODEL, "--cost", "--cost-cache", tmp_path)
    cost = json.loads(run("inspect", MODEL, "--cost", "--json", "--cost-cache", tmp_path))["cost"]
    rows = [point["rows"] for point in cost["points"]]
    assert rows[0] == 1 and rows == sorted(rows) and len(rows) >= 3
    assert str(tmp_path) in cost["note"]  # read again: the same figures
    for point in cost["points"]:
        assert min(point.values()) >= 0  # a part may drown in what else the machine does
        line = next(line.split() for line in said.splitlines()
                    if line.split()[:1] == [str(point["rows"])])
        assert [f"{point['step_us']:.1f}", f"{point['attn_us']:.2f}"] == line[1:3]
    assert cost["ridge_rows"] is None or cost["ridge_rows"] >= 1


def test_eval_of_one_tier_is_that_of_all():
    every = json.loads(run("eval", MODEL, "-t", TEXT, "--max-tokens", 600, "--json"))
    tiers = {row["tier"]: row for row in every}
    assert tiers["full"]["flops_skip"] == 0 < tiers["balanced"]["flops_skip"] < tiers["fast"]["flops_skip"]
    one, = json.loads(run("eval", MODEL, "-t", TEXT, "--max-tokens", 600, "--json", "-q", "fast"))
    del one["seconds"], tiers["fast"]["seconds"]
    assert one == tiers["fast"]
    assert "splendid" in run("eval", MODEL, "-t", TEXT, "-q", "splendid", status=1)


def test_eval_says_what_it_does_not_know():
    """Bits per byte are those of the whole text: of a part of its tokens there are none."""
    part = ["eval", MODEL, "-t", TEXT, "-q", "full", "--max-tokens"]
    line = run(*part, 600).splitlines()[1].split()
    assert line[0] == "full" and line[4] == "-"  # behind "+0.00 %"
    row, = json.loads(run(*part, 600, "--json"))
    assert row["bits_per_byte"] is None and row["perplexity"] > 1
    row, = json.loads(run(*part, 10**6, "--json"))
    assert row["bits_per_byte"] == pytest.approx(
        math.log2(row["perplexity"]) * row["tokens"] / TEXT.stat().st_size)


def test_eval_of_too_little_text_prints_no_table(tmp_path):
    (tmp_path / "short.txt").write_text("a")
    result = subprocess.run([BINARY, "eval", MODEL, "-t", tmp_path / "short.txt"], capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 1 and result.stdout == "" and "token" in result.stderr


@pytest.mark.parametrize("arguments", [
    ["--help"],
    ["serve", "--help"],
    ["inspect", MODEL],
    ["inspect", MODEL, "--json"],
    ["eval", MODEL, "-t", TEXT, "--max-tokens", 600, "-q", "fast"],
    ["eval", MODEL, "-t", TEXT, "--max-tokens", 600, "-q", "fast", "--json"],
    ["generate", MODEL, "-p", "a", "-n", 2],
], ids=lambda arguments: "-".join(str(a) for a in arguments if a not in (MODEL, TEXT)))
def test_output_that_is_lost_is_a_failure(arguments):
    with open("/dev/full", "w") as full:
        result = subprocess.run([BINARY, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE,
                                text=True, timeout=60)
    assert result.returncode == 1 and "fathom: standard output: " in result.stderr


def test_calibrate_writes_tiers_that_serve(tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "depth.json").unlink()
    assert len(json.loads(run("inspect", model, "--json"))["tiers"]) == 1
    run("calibrate", model, "-t", TEXT, "--max-tokens", 600, "--measure-tokens", 600,
        "--target", "shallow=0.3")
    full, shallow = json.loads(run("inspect", model, "--json"))["tiers"]
    assert (full["name"], shallow["name"]) == ("full", "shallow")
    assert shallow["flops_per_token"] < full["flops_per_token"] == pytest.approx(
        json.loads(run("eval", model, "-t", TEXT, "--max-tokens", 600, "--json"))[0]["flops_per_token"])


@pytest.mark.parametrize("target", ["a=2", "a=0", "a=nan", "a=-1", "a", "=0.5", ""])
def test_calibrate_refuses_targets_that_cannot_be(target):
    said = run("calibrate", MODEL, "-t", TEXT, "--target", target, status=2)
    assert said.startswith("fathom calibrate: --target ")


def test_generate_refuses_a_prompt_beyond_the_context():
    context = json.loads(run("inspect", MODEL, "--json"))["context"]
    said = run("generate", MODEL, "-p", "a b " * context, status=1)
    assert "the prompt has" in said and f"1 to {context}" in said


def test_generate_is_what_the_server_answers(server):
    prompt = "The old man looked at the sea"
    for tier in ("full", "fast"):
        answer = server.complete(prompt=prompt, max_tokens=24, temperature=0, quality=tier).json()
        assert run("generate", MODEL, "-p", prompt, "-n", 24, "--temperature", 0, "-q", tier) == \
            prompt + answer["choices"][0]["text"] + "\n"


# ---- ./run, with what it prepares taken as done ----------------------------------------------------


@pytest.fixture
def prepared(tmp_path):
    """Its own folder: packages and builds do nothing but leave a mark, the server ends at once."""
    shutil.copy(ROOT / "run", tmp_path)
    for folder in ("deploy", "build"):
        (tmp_path / folder).mkdir()
    (tmp_path / "deploy" / "prepare.sh").write_text(
        "PACKAGES=\nsay() { echo \"$*\" >&2; }\n"
        "install_packages() { touch installed; }\nbuild() { touch built; }\n")
    (tmp_path / "build" / "fathom").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "build" / "fathom").chmod(0o755)
    return tmp_path


def start_run(folder, *flags, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
    return subprocess.run([folder / "run", *flags], capture_output=True, text=True, timeout=30,
                          env=clean | variables)


@pytest.mark.parametrize("flags, variables, shown", [
    ([], {}, " http://127.0.0.1:8080/"),
    (["--port", "8099"], {}, " http://127.0.0.1:8099/"),
    (["--port=8099"], {}, " http://127.0.0.1:8099/"),
    (["-p", "8099"], {}, " http://127.0.0.1:8099/"),
    (["-p=8099", "--host", "0.0.0.0"], {}, " http://127.0.0.1:8099/"),
    (["-p", "0"], {}, " http://127.0.0.1:PORT/"),
    ([], {"FATHOM_PORT": "8099"}, " http://127.0.0.1:8099/"),
    (["--tls-cert", "c.pem", "--tls-key", "k.pem"], {}, " -k https://127.0.0.1:8080/"),
    (["--tls-cert=c.pem"], {}, " -k https://127.0.0.1:8080/"),
    ([], {"FATHOM_TLS_CERT": "c.pem"}, " -k https://127.0.0.1:8080/"),
])
def test_run_shows_a_request_to_what_it_serves(prepared, flags, variables, shown):
    done = start_run(prepared, *flags, **variables)
    assert done.returncode == 0
    assert f"curl{shown}v1/completions" in done.stderr and "ready" in done.stderr
    assert done.stdout.split() == ["serve", "models/fathom-tiny", *flags]
    assert (prepared / "installed").exists() and (prepared / "built").exists()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_run_explains_itself_before_it_does_anything(prepared, flag):
    done = start_run(prepared, "-p", "8099", flag)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: ./run") and "fathom serve" in done.stdout
    assert not (prepared / "installed").exists() and not (prepared / "built").exists()


def test_a_file_cut_short_while_it_is_read(tmp_path):
    """The weights are mapped: a page that is gone is an error with a sentence, on every thread."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    for attempt in range(24):
        (model / "model.safetensors").write_bytes(weights)
        process = subprocess.Popen([BINARY, "inspect", model], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        time.sleep(attempt * 0.002)
        os.truncate(model / "model.safetensors", 100_000)
        message = process.communicate(timeout=60)[1]
        assert process.returncode in (0, 1), message  # not ended by a signal
        assert process.returncode == 0 or message.startswith("fathom")
