"""The commands beside serve: what they print, in words and as JSON, and what they refuse."""

import json
import pathlib
import shutil
import subprocess

import pytest

from conftest import BINARY, find_model

MODEL = find_model()
TEXT = pathlib.Path(__file__).resolve().parents[2] / "README.md"


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
    assert rows[0] == 1 and rows == sorted(rows) and len(rows) > 3
    assert str(tmp_path) in cost["note"]  # read again: the same figures
    for point in cost["points"]:
        assert min(point.values()) > 0
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


def test_generate_is_what_the_server_answers(server):
    prompt = "The old man looked at the sea"
    for tier in ("full", "fast"):
        answer = server.complete(prompt=prompt, max_tokens=24, temperature=0, quality=tier).json()
        assert run("generate", MODEL, "-p", prompt, "-n", 24, "--temperature", 0, "-q", tier) == \
            prompt + answer["choices"][0]["text"] + "\n"
