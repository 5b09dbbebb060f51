"""The trainer, run as its README says, small: text in, a folder that `fathom` serves out.

    python -m pytest tests/reference/test_train.py

Its model computes what the reference does, a stopped run goes on as if it had not stopped, several
processes train what one does.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import nag

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ROOT / "models" / "train"
sys.path.append(str(TRAIN))
import model as trainer  # noqa: E402

FATHOM = os.environ.get("FATHOM_BINARY", str(ROOT / "build" / "fathom"))
LENGTH, BATCH = 16, 2
PER_STEP = LENGTH * BATCH


# ---- Its model ----------------------------------------------------------------------------------


def small_trainer():
    """A trainer's model with everything moved from its start, small enough for a test."""
    torch.manual_seed(5)
    config = trainer.Config(
        vocab_size=70, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=40, max_position_embeddings=32,
        nag_directions=6,
    )
    network = trainer.Model(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * parameter.std(unbiased=False) * torch.randn_like(parameter)
        for block in network.blocks:
            for gate in (block.attn_gate, block.mlp_gate):
                gate.directions *= 3
                gate.mix_logits += torch.randn(6)
                gate.raw_beta += 0.3 * torch.randn(1)
                gate.alpha *= -1
    return network


@pytest.mark.skipif(torch.__version__ < "2", reason="its safe loader knows no floats")
def test_export_computes_what_the_trainer_computes(tmp_path):
    pytest.importorskip("safetensors.torch")
    import export

    network, tau = small_trainer(), {0.10: 0.08, 0.25: 0.16}
    file, out = tmp_path / "last.pt", tmp_path / "out"
    state = {"model": network.state_dict(), "config": vars(network.config), "tau": tau, "step": 9}
    torch.save(state, file)
    export.main(["--checkpoint", str(file), "--out", str(out)])
    model = nag.load(out, torch.float64)
    assert set(model.tiers) == {"full", "high", "balanced"}
    tokens = torch.randint(0, 70, (1, 25), generator=torch.Generator().manual_seed(6))
    for tier, rate in (("full", 0.0), ("high", 0.10), ("balanced", 0.25)):
        with torch.no_grad():
            threshold = torch.tensor([[tau.get(rate, 0.0)]])
            loss, _, _, sizes = network(tokens[:, :-1], tokens[:, 1:], threshold, torch.ones(1))
        result = model.forward(tokens[0, :-1], tier, trace=True)
        ours = F.cross_entropy(result.logits, tokens[0, 1:], reduction="none")
        # The trainer multiplies in bf16, so a row at a threshold may decide otherwise.
        assert (result.run == (sizes[:, 0] >= threshold)).double().mean() > 0.97
        assert abs(ours.mean() - loss.mean()) < 0.03 * loss.mean()
        g = torch.stack([step.g.abs() for step in result.steps])
        assert (g - sizes[:, 0]).abs().mean() < 0.02
    rows = model.weights["lm_head.weight"]
    assert rows.mean(-1).abs().max() < 1e-2
    assert torch.allclose(rows.pow(2).mean(-1), torch.ones(70).double(), atol=1e-2)


def test_export_refuses_a_tensor_without_a_place():
    pytest.importorskip("safetensors.torch")
    import export

    state = {**small_trainer().state_dict(), "blocks.0.extra": torch.zeros(1)}
    with pytest.raises(SystemExit, match="blocks.0.extra"):
        export.export_tensors(state, 3)


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(trainer, "PRODUCT", torch.float32)


def some_tokens():
    tokens = torch.randint(0, 70, (3, 25), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:]


def test_losses_are_what_torch_computes(exact):
    """Cross-entropy of the first pass, its distance from a teacher, and that of the second pass from it."""
    network, (inputs, targets) = small_trainer(), some_tokens()
    with torch.no_grad():
        taught = torch.log_softmax(torch.randn(3, 24, 70, generator=torch.Generator().manual_seed(8)), -1)
        full = network.predict(inputs)
        r, s, _ = network.run(inputs[:1], torch.full((1, 1), 0.16), torch.ones(1))
        skipping = network.log_probabilities(r, s)
    tau = torch.tensor([[0.0], [0.0], [0.0], [0.16]])
    loss, reduced, distance, _ = network(torch.cat((inputs, inputs[:1])), targets, tau, torch.ones(1), taught)
    expected = F.nll_loss(full.flatten(0, 1), targets.flatten(), reduction="none").view(3, 24)
    assert torch.allclose(loss, expected, atol=1e-5)
    assert torch.allclose(distance, F.kl_div(full, taught, reduction="none", log_target=True).sum(-1), atol=1e-5)
    assert torch.allclose(reduced, F.kl_div(skipping, full[:1], reduction="none", log_target=True).sum(-1), atol=1e-5)
    assert reduced.min() > -1e-5 and reduced.max() > 1e-3 and distance.min() > 0.1


def test_the_second_pass_teaches_the_first_nothing(exact):
    """Its loss reaches its own rows only."""
    network, (inputs, targets) = small_trainer(), some_tokens()
    r, s, _ = network.run(torch.cat((inputs, inputs)), torch.tensor([[0.0]] * 3 + [[0.16]] * 3), torch.ones(1))
    r.retain_grad()
    _, reduced, _ = network.loss(r, s, targets)
    reduced.sum().backward()
    assert r.grad[:3].abs().max() == 0 < r.grad[3:].abs().max()


@pytest.mark.skipif(not hasattr(F, "scaled_dot_product_attention"), reason="this torch has one way only")
def test_both_ways_to_attend_are_one(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(9))
    fused = trainer.causal_attention(q, k, v)
    monkeypatch.delattr(F, "scaled_dot_product_attention")
    assert torch.allclose(fused, trainer.causal_attention(q, k, v), atol=1e-6)


# ---- Its commands -------------------------------------------------------------------------------


def run(command, status=0, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def python(*command, **more):
    return run((sys.executable, *command), **more)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Token files and a tokenizer of the project's own documentation."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("data")
    pages = sorted(str(page) for page in (ROOT / "docs").glob("*.md"))
    python(TRAIN / "prepare.py", "--train", *pages, "--heldout", ROOT / "README.md", "--out", folder, "--vocab", 512)
    return folder


def command(data, out, steps, *more):
    """Trains up to `steps` of six; skipping begins with the third."""
    shape = ("--batch", BATCH, "--length", LENGTH, "--threads", 1, "--no-compile", "--skip-from", 2)
    end = ("--tokens", 6 * PER_STEP, "--stop-at", steps * PER_STEP)
    return (TRAIN / "train.py", "--data", data, "--out", out, *shape, *end, *more)


def state(out):
    return torch.load(out / "last.pt", map_location="cpu")


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("dense")
    python(*command(data, out, 6, "--again", "", "--seed", 2))
    assert state(out)["tau"] == {}
    return "--teacher", out / "last.pt"


@pytest.fixture(scope="module")
def straight(data, teacher, tmp_path_factory):
    """Six steps in one go, skipping and taught by a stranger."""
    out = tmp_path_factory.mktemp("straight")
    said = python(*command(data, out, 6, *teacher))
    assert float(re.search(r"teacher ([\d.]+)", said)[1]) > 0.01
    return out


@pytest.fixture(scope="module")
def halfway(data, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("halfway")
    python(*command(data, out, 3, *teacher))
    return out


def test_a_resumed_training_is_the_same_training(data, teacher, straight, halfway, tmp_path):
    shutil.copy(halfway / "last.pt", tmp_path)
    assert "resumed at step 3" in python(*command(data, tmp_path, 6, *teacher))
    one, other = state(straight), state(tmp_path)
    assert one["step"] == other["step"] == 6
    assert one["tau"] == other["tau"] and set(one["tau"]) == {0.25, 0.4}
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name


def test_two_processes_train_what_one_does(data, teacher, straight, halfway, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch runs in one process only")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor() as pool:  # what torchrun does; that of 1.13 does not run under Python 3.11
        both = [
            pool.submit(python, *command(data, tmp_path, 6, *teacher), env={**os.environ, **meeting, "RANK": rank})
            for rank in "01"
        ]
        for one in both:
            one.result()
    start, one, two = (state(out)["model"] for out in (halfway, straight, tmp_path))
    for name, tensor in one.items():
        # A gradient near zero may round to the other sign, and the optimizer steps by the sign at first.
        moved = (start[name] - tensor).abs().mean()
        assert (two[name] - tensor).abs().mean() < 0.05 * moved + 1e-6, name


def test_what_cannot_be_trained_is_refused_in_a_sentence(data, teacher, straight, tmp_path, monkeypatch, capsys):
    import train

    text = tmp_path / "text"
    text.write_text("no checkpoint")
    for path, config in (
        (straight / "last.pt", trainer.Config(max_position_embeddings=LENGTH)),  # it skips
        (teacher[1], trainer.Config()),  # of other windows
        (text, trainer.Config()),
        (tmp_path / "nothing", trainer.Config()),
    ):
        with pytest.raises(SystemExit, match=f"--teacher {path} is no last.pt of a run with --again '' like this one: .+"):
            train.load_teacher(path, config)
    for flag, value in (("--teacher-share", "1.5"), ("--skip-from", "0")):
        monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(data), "--out", str(tmp_path), flag, value])
        with pytest.raises(SystemExit):
            train.parse_arguments()
        assert f"{flag} is {value}" in capsys.readouterr().err
    said = python(*command(data, teacher[1].parent, 6), status=1)
    assert "without thresholds for [0.25, 0.4]" in said and "Traceback" not in said


@pytest.mark.skipif(torch.__version__ < "2", reason="its safe loader knows no floats")
def test_what_was_trained_is_exported_and_evaluated(data, straight, tmp_path):
    pytest.importorskip("safetensors.torch")
    python(TRAIN / "export.py", "--checkpoint", straight / "last.pt", "--tokenizer", data, "--out", tmp_path)
    text, window, count = ROOT / "README.md", LENGTH, 40 * LENGTH
    size = ("--window", window, "--max-tokens", count)
    tiers = json.loads(run((FATHOM, "eval", tmp_path, "--text", text, *size, "--weights", "f32", "--json")))
    assert [tier["tier"] for tier in tiers] == ["full", "balanced", "fast"]
    model = nag.load(tmp_path)
    tokens = nag.read_tokens(tmp_path, text)[:count]
    for tier in tiers:
        _, perplexity, attn, mlp = nag.perplexity(model, tokens, window, tier["tier"])
        assert abs(tier["perplexity"] / perplexity - 1) < 1e-3
        assert (attn + mlp > 0) == (tier["attn_skip"] + tier["mlp_skip"] > 0) == (tier["tier"] != "full")
