"""The trainer, run as its README says, small: text in, a folder that `fathom` serves out.

    python -m pytest tests/reference/test_train.py

Its model computes what the reference does, a stopped run goes on as if it had not stopped, several
processes train what one does.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import nag

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ROOT / "models" / "train"
sys.path.append(str(TRAIN))
import model as trainer  # noqa: E402

FATHOM = os.environ.get("FATHOM_BINARY", str(ROOT / "build" / "fathom"))
LENGTH, BATCH = 32, 4
PER_STEP = LENGTH * BATCH

pytestmark = pytest.mark.skipif(torch.__version__ < "1.13", reason="the trainer needs torch 1.13")


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
    export = pytest.importorskip("export", reason="needs safetensors")
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
    export = pytest.importorskip("export", reason="needs safetensors")
    state = {**small_trainer().state_dict(), "blocks.0.extra": torch.zeros(1)}
    with pytest.raises(SystemExit, match="blocks.0.extra"):
        export.export_tensors(state, 3)


def test_who_is_taught_by_itself_has_nothing_to_learn():
    """The distance is zero, and so is its gradient; the loss is the cross-entropy all the same."""
    network = small_trainer()
    tokens = torch.randint(0, 70, (3, 25), generator=torch.Generator().manual_seed(7))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    said = network.predict(inputs)
    again = torch.cat((inputs, inputs[:1]))  # the first one once more, at full depth as well
    loss, reduced, distance, _ = network(again, targets, torch.zeros(4, 1), torch.ones(1), said)
    assert loss.shape == distance.shape == (3, 24) and reduced.shape == (1, 24)
    expected = F.nll_loss(said.flatten(0, 1), targets.flatten(), reduction="none")
    assert torch.allclose(loss.flatten(), expected, atol=1e-5)
    assert distance.abs().max() < 1e-5 and reduced.abs().max() < 1e-5
    (distance.sum() + reduced.sum()).backward()
    assert max(p.grad.abs().max() for p in network.parameters()) < 1e-3


# ---- Its commands -------------------------------------------------------------------------------


def python(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Token files and a tokenizer of the project's own documentation."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("data")
    pages = sorted(str(page) for page in (ROOT / "docs").glob("*.md"))
    python(TRAIN / "prepare.py", "--train", *pages, "--heldout", ROOT / "README.md", "--out", folder, "--vocab", 512)
    return folder


def train(data, out, steps, *more, total=6, launch=()):
    """The state after `steps` steps of a training of `total`; skipping begins with the third."""
    shape = ["--batch", BATCH, "--length", LENGTH, "--threads", 1, "--no-compile", "--skip-from", 2]
    end = ["--tokens", total * PER_STEP, "--stop-at", steps * PER_STEP]
    python(*launch, TRAIN / "train.py", "--data", data, "--out", out, *shape, *end, *more)
    return torch.load(out / "last.pt", map_location="cpu")


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("dense")
    assert train(data, out, 6, "--again", "")["tau"] == {}
    return out / "last.pt"


@pytest.fixture(scope="module")
def straight(data, teacher, tmp_path_factory):
    """Six steps in one go, skipping and taught."""
    out = tmp_path_factory.mktemp("straight")
    return out, train(data, out, 6, "--teacher", teacher)


def test_a_resumed_training_is_the_same_training(data, teacher, straight, tmp_path):
    train(data, tmp_path, 3, "--teacher", teacher)
    resumed = train(data, tmp_path, 6, "--teacher", teacher)
    assert resumed["step"] == straight[1]["step"] == 6
    assert resumed["tau"] == straight[1]["tau"] and set(resumed["tau"]) == {0.25, 0.4}
    for name, tensor in straight[1]["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch runs in one process only")
def test_two_processes_train_what_one_does(data, teacher, straight, tmp_path):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    two = train(data, tmp_path, 6, "--teacher", teacher, launch=launch)
    for name, tensor in straight[1]["model"].items():
        assert torch.allclose(tensor, two["model"][name], rtol=1e-3, atol=1e-4), name


def test_a_teacher_changes_what_is_learnt(data, straight, tmp_path):
    alone = train(data, tmp_path, 6)
    assert any(not torch.equal(tensor, alone["model"][name]) for name, tensor in straight[1]["model"].items())


@pytest.mark.skipif(torch.__version__ < "2", reason="its safe loader knows no floats")
def test_what_was_trained_is_exported_and_evaluated(data, straight, tmp_path):
    folder = tmp_path / "model"
    python(TRAIN / "export.py", "--checkpoint", straight[0] / "last.pt", "--tokenizer", data, "--out", folder)
    text = ROOT / "README.md"
    command = [FATHOM, "eval", folder, "--text", text, "--window", "32", "--max-tokens", "640", "--weights", "f32", "--json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    model = nag.load(folder)
    tokens = nag.read_tokens(folder, pathlib.Path(text))[:640]
    tiers = {tier["tier"]: tier for tier in json.loads(done.stdout)}
    assert set(tiers) == {"full", "balanced", "fast"}
    for name, tier in tiers.items():
        _, perplexity, _, _ = nag.perplexity(model, tokens, 32, name)
        assert abs(tier["perplexity"] / perplexity - 1) < 1e-3
