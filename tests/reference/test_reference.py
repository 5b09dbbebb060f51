"""The reference against itself and against slower, plainer forms of the same formulas.

    python -m pytest tests/reference

Everything that other tests take from the reference is checked here: its algebra on the golden
checkpoints, its attention against loops, the files in golden/, and both converters. Arithmetic is
float64, so that a property either holds to about 1e-10 or does not hold.
"""

import json
import math
import pathlib
import sys

import pytest
import torch
import torch.nn.functional as F

import nag

HERE = pathlib.Path(__file__).parent
MODELS = HERE.parents[1] / "models"
sys.path.append(str(MODELS))

GOLDEN = sorted(path.parent for path in HERE.glob("golden/*/config.json"))
TIERED = [folder for folder in GOLDEN if (folder / "depth.json").exists()]


def each(folders):
    return pytest.mark.parametrize("folder", folders, ids=lambda folder: folder.name)


def load(folder, dtype=torch.float64):
    return nag.load(folder, dtype), nag.read_safetensors(folder / "expected.safetensors")


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def some_tier(model):
    return "half" if "half" in model.tiers else "full"


# ---- Golden files -------------------------------------------------------------------------------


def test_golden_files_cover_every_setting():
    configs = [nag.load(folder).config for folder in GOLDEN]
    assert {c.act for c in configs} == {"silu", "relu2", "gelu"}
    assert {c.qk_norm for c in configs} == {"none", "before_rope", "after_rope"}
    assert {c.head for c in configs} == {"cosine_scale", "rmsnorm"}
    assert {nag.load(folder).kv_policy for folder in GOLDEN} == {"compute", "omit"}
    assert {c.kv_heads == c.heads for c in configs} == {True, False}
    stored = [t.dtype for f in GOLDEN for t in nag.read_weights(f).values()]
    assert set(stored) == {torch.float32, torch.bfloat16, torch.float16}


@each(GOLDEN)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("f32", "f64"))
def test_golden_files_are_what_the_reference_computes(folder, dtype):
    model, expected = load(folder, dtype)
    for tier in model.tiers:
        result = model.forward(expected["tokens"], tier)
        assert torch.equal(result.run.to(torch.uint8), expected[f"run.{tier}"])
        assert close(result.mix.float(), expected[f"mix.{tier}"], 1e-5)
        assert close(result.s.float(), expected[f"s.{tier}"], 1e-5)
        assert close(result.logits.float(), expected[f"logits.{tier}"], 2e-4)
        greedy = expected[f"greedy.{tier}"].tolist()
        assert model.generate(expected["tokens"], len(greedy), tier) == greedy


@each(TIERED)
def test_the_half_tier_skips_a_good_share_of_both_kinds_without_close_calls(folder):
    model, expected = load(folder)
    result = model.forward(expected["tokens"], "half")
    assert (0.2 < result.run.double().mean(1)).all() and (result.run.double().mean(1) < 0.8).all()
    theta = torch.tensor(model.tiers["half"], dtype=torch.float64).unsqueeze(-1)
    assert torch.equal(theta, theta.float().double())
    assert (result.mix - theta).abs().min() > 0.01


# ---- The algebra of one step --------------------------------------------------------------------


@each(GOLDEN)
def test_an_update_is_orthogonal_and_has_rms_one(folder):
    model, expected = load(folder)
    for step in model.forward(expected["tokens"], "full", trace=True).steps:
        d = step.r.shape[-1]
        assert close((step.r * step.r).sum(-1), torch.full_like(step.s, d))
        assert (step.u * step.r).sum(-1).abs().max() < 1e-9
        assert close((step.u * step.u).sum(-1), torch.full_like(step.s, d))


@each(GOLDEN)
def test_the_norm_grows_by_the_root_of_one_plus_g_squared_and_a_skip_changes_nothing(folder):
    model, expected = load(folder)
    result = model.forward(expected["tokens"], some_tier(model), trace=True)
    after = [(step.r, step.s) for step in result.steps[1:]] + [(result.r, result.s)]
    for step, run, (r, s) in zip(result.steps, result.run, after):
        assert torch.equal(r[~run], step.r[~run]) and torch.equal(s[~run], step.s[~run])
        gain = (step.r + step.g.unsqueeze(-1) * step.u).norm(dim=-1) / step.r.norm(dim=-1)
        assert close(s[run], (step.s + gain.log())[run])
        assert close(gain, (1 + step.g**2).sqrt())


@each(GOLDEN)
def test_lane_form_is_additive_form(folder):
    model, expected = load(folder)
    for tier in model.tiers:
        lane = model.forward(expected["tokens"], tier)
        additive = model.forward(expected["tokens"], tier, additive=True)
        assert torch.equal(lane.run, additive.run)
        for name in ("logits", "mix", "s", "r"):
            assert close(getattr(lane, name), getattr(additive, name))


@each(GOLDEN)
def test_scaling_the_embedding_moves_s_and_no_decision(folder):
    model, expected = load(folder)
    before = model.forward(expected["tokens"], some_tier(model))
    model.weights["model.embed_tokens.weight"] = 7.5 * model.weights["model.embed_tokens.weight"]
    after = model.forward(expected["tokens"], some_tier(model))
    assert torch.equal(before.run, after.run) and close(before.r, after.r)
    assert close(after.s, before.s + math.log(7.5))
    factor = 7.5 if model.config.head == "cosine_scale" else 1.0
    assert close(after.logits, factor * before.logits)


def test_a_row_of_zeros_has_no_direction_and_the_start_norm():
    model, expected = load(GOLDEN[0])
    token = int(expected["tokens"][0])
    model.weights["model.embed_tokens.weight"][token] = 0
    result = model.forward([token], "none" if "none" in model.tiers else [2.0] * len(model.tiers))
    assert torch.equal(result.r, torch.zeros_like(result.r))
    assert torch.equal(result.s, model.weights["model.log_gain"])
    assert torch.isfinite(result.logits).all()


# ---- Decisions ----------------------------------------------------------------------------------


@each(GOLDEN)
def test_theta_zero_is_the_dense_model(folder):
    model, expected = load(folder)
    dense, full = (model.forward(expected["tokens"], theta) for theta in (None, "full"))
    assert full.run.all() and torch.equal(dense.logits, full.logits)


@each(GOLDEN)
def test_theta_above_one_leaves_the_start(folder):
    model, expected = load(folder)
    result = model.forward(expected["tokens"], [1.5] * len(model.tiers["full"]), trace=True)
    assert not result.run.any()
    assert torch.equal(result.r, result.steps[0].r) and torch.equal(result.s, result.steps[0].s)


def test_a_mix_at_its_threshold_runs():
    model, expected = load(GOLDEN[0])
    theta = list(model.tiers["full"])
    mix = model.forward(expected["tokens"], theta).mix[0]
    theta[0] = mix.median().item()
    run = model.forward(expected["tokens"], theta).run[0]
    assert torch.equal(run, mix >= mix.median()) and run[mix.argsort()[(len(mix) - 1) // 2]]


@each(GOLDEN)
@pytest.mark.parametrize("chunk", (1, 7, 16))
def test_decode_and_chunked_prefill_are_prefill(folder, chunk):
    model, expected = load(folder)
    tokens, tier = expected["tokens"], some_tier(model)
    whole, cache = model.forward(tokens, tier), model.new_cache()
    parts = [model.forward(part, tier, cache) for part in tokens.split(chunk)]
    assert torch.equal(torch.cat([part.run for part in parts], 1), whole.run)
    assert close(torch.cat([part.logits for part in parts]), whole.logits)
    assert close(torch.cat([part.s for part in parts]), whole.s)


@each(GOLDEN)
def test_later_tokens_change_no_earlier_row(folder):
    model, expected = load(folder)
    tokens, tier = expected["tokens"], some_tier(model)
    other = torch.cat([tokens[:20], tokens[20:].flip(0)])
    a, b = model.forward(tokens, tier), model.forward(other, tier)
    assert torch.equal(a.run[:, :20], b.run[:, :20]) and close(a.logits[:20], b.logits[:20])
    assert not close(a.logits[20:], b.logits[20:])


@each(GOLDEN)
def test_run_everything_then_mask_is_gather_run_scatter(folder):
    model, expected = load(folder)
    for tier in model.tiers:
        masked = model.forward(expected["tokens"], tier)
        gathered = model.forward(expected["tokens"], tier, gather=True)
        assert torch.equal(masked.run, gathered.run) and close(masked.logits, gathered.logits)


@each(TIERED)
def test_the_kv_policy_matters(folder):
    model, expected = load(folder)
    before = model.forward(expected["tokens"], "half")
    model.kv_policy = {"omit": "compute", "compute": "omit"}[model.kv_policy]
    after = model.forward(expected["tokens"], "half")
    assert not close(before.logits, after.logits, 1e-3)


# ---- Branches, number by number -----------------------------------------------------------------


def rotated(model, vector, position):
    """Norm, rotation and scale of one head's vector, as complex numbers x1 + i x2."""
    config, half = model.config, len(vector) // 2

    def unit(x):
        return [v / math.sqrt(sum(abs(w) ** 2 for w in x) / (2 * half) + 1e-6) for v in x]

    x = [complex(vector[i], vector[i + half]) for i in range(half)]
    x = unit(x) if config.qk_norm == "before_rope" else x
    for i in range(half):
        angle = position * config.rope_theta ** (-2 * i / (2 * half))
        x[i] *= complex(math.cos(angle), math.sin(angle))
    x = unit(x) if config.qk_norm == "after_rope" else x
    return [config.qk_scale * v for v in x]


def slow_attention(model, r, present, row):
    """The first block's attention of one row, one score at a time."""
    config, w = model.config, model.weights
    size = config.head_size

    def head(name, position, number):
        matrix = w[f"model.layers.0.self_attn.{name}_proj.weight"]
        return (matrix[number * size : (number + 1) * size] @ r[position]).tolist()

    out = []
    seen = [p for p in range(row + 1) if present[p] or p == row]
    for h in range(config.heads):
        g = h * config.kv_heads // config.heads
        q, scores = rotated(model, head("q", row, h), row), []
        for p in seen:
            k = rotated(model, head("k", p, g), p)
            scores.append(sum((a * b.conjugate()).real for a, b in zip(q, k)) / math.sqrt(size))
        most = max(scores)
        weights = [math.exp(score - most) for score in scores]
        values = [head("v", p, g) for p in seen]
        out += [sum(a * v[i] for a, v in zip(weights, values)) / sum(weights) for i in range(size)]
    return w["model.layers.0.self_attn.o_proj.weight"] @ torch.tensor(out, dtype=torch.float64)


@each(GOLDEN)
def test_attention_is_what_loops_compute(folder):
    model, expected = load(folder)
    result = model.forward(expected["tokens"], some_tier(model), trace=True)
    present = result.run[0] if model.kv_policy == "omit" else torch.ones_like(result.run[0])
    for row in (0, 1, 17, 39):
        f = slow_attention(model, result.steps[0].r, present, row)
        r = result.steps[0].r[row]
        f = f - f.mean()
        f = f - (f @ r) / (r @ r) * r
        assert close(result.steps[0].u[row], f * math.sqrt(len(f)) / f.norm())


@each(GOLDEN)
def test_gate_mlp_and_head_are_what_loops_compute(folder):
    model, expected = load(folder)
    w, config, row = model.weights, model.config, 11
    result = model.forward(expected["tokens"], "full", trace=True)
    step = result.steps[1]
    r, gate = step.r[row], "model.layers.0.mlp_nag."
    alpha, beta = w[gate + "alpha"].item(), w[gate + "beta"].item()
    p = [math.exp(x) for x in w[gate + "mix_logits"].tolist()]
    mix = 0.0
    for c, share in enumerate(p):
        x = float(w[gate + "directions.weight"][c] @ r + w[gate + "directions.bias"][c])
        mix += share / sum(p) / (1 + math.exp(-x))
    assert abs(mix - result.mix[1, row].item()) < 1e-12
    assert abs(alpha * mix**beta - step.g[row].item()) < 1e-12
    hidden = []
    for i in range(config.inner):
        x = float(w["model.layers.0.mlp.up_proj.weight"][i] @ r)
        if config.act == "silu":
            y = float(w["model.layers.0.mlp.gate_proj.weight"][i] @ r)
            hidden.append(x * y / (1 + math.exp(-y)))
        elif config.act == "relu2":
            hidden.append(max(x, 0.0) ** 2)
        else:
            hidden.append(0.5 * x * (1 + math.erf(x / math.sqrt(2))))
    f = w["model.layers.0.mlp.down_proj.weight"] @ torch.tensor(hidden, dtype=torch.float64)
    assert close(model.direction(f, r), step.u[row])
    r, s, d = result.r[row], result.s[row].item(), config.hidden
    for v in (0, 5, config.vocab - 1):
        if config.head == "cosine_scale":
            logit = math.exp(s) * float(w["lm_head.weight"][v] @ r) / d
        else:
            x = r / math.sqrt(float(r @ r) / d + 1e-6) * w["model.norm.weight"]
            logit = float(w["lm_head.weight"][v] @ x)
        assert abs(logit - result.logits[row, v].item()) < 1e-10


def test_perplexity_cuts_into_windows():
    model, expected = load(GOLDEN[0])
    tokens, logs = expected["tokens"].tolist(), []
    for part in (tokens[:16], tokens[16:32], tokens[32:]):
        logits = model.forward(part, some_tier(model)).logits
        logs += [F.log_softmax(logits[i], 0)[part[i + 1]].item() for i in range(len(part) - 1)]
    predicted, value, _, _ = nag.perplexity(model, tokens, 16, some_tier(model))
    assert predicted == len(logs) == len(tokens) - 3
    assert abs(value - math.exp(-sum(logs) / len(logs))) < 1e-9 * value


# ---- Files --------------------------------------------------------------------------------------


def test_unknown_settings_are_refused():
    for key, value in (("model_type", "llama"), ("hidden_act", "tanh"), ("qk_norm", "both")):
        values = {**json.loads((GOLDEN[0] / "config.json").read_text()), key: value}
        with pytest.raises(ValueError, match=key):
            nag.Config(values)
    model = nag.load(GOLDEN[0])
    depth = {"kv_policy": "forget", "tiers": []}
    with pytest.raises(ValueError, match="kv_policy"):
        nag.Model(model.config, model.weights, depth, torch.float32)
    with pytest.raises(ValueError, match="thresholds"):
        model.forward([1, 2], [0.5])


def test_safetensors_files_are_those_of_the_package(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2).half(),
        "d": torch.arange(6, dtype=torch.int32).reshape(1, 6),
        "e": torch.tensor([1, 0, 255], dtype=torch.uint8),
    }
    nag.write_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
    package.save_file(tensors, str(tmp_path / "theirs"))
    ours = package.load_file(str(tmp_path / "ours"))
    theirs = nag.read_safetensors(tmp_path / "theirs")
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        for read in (ours[name], theirs[name]):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_the_golden_tokenizer_is_one():
    tokenizers = pytest.importorskip("tokenizers")
    folder = HERE / "golden" / "with-tokenizer"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == nag.load(folder).config.vocab
    text = "the tall  ship\nsailed 40 f\u00e4den \u2693"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.encode("of the").tokens == ["o", "f", "\u0120the"]


# ---- The third-party layout ---------------------------------------------------------------------

THIRD = {
    "hidden": 24, "heads": 3, "kv_heads": 1, "blocks": 2, "vocab": 50, "padded": 64,
    "context": 2048,
}


def third_party_state():
    """A random state dict of that layout; constrained as its training leaves it."""
    generator = torch.Generator().manual_seed(3)
    d, size = THIRD["hidden"], THIRD["hidden"] // THIRD["heads"]

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator)

    table, head = normal(THIRD["padded"], d), normal(THIRD["padded"], d)
    head = head - head.mean(-1, keepdim=True)
    state = {
        "transformer.wte.weight": table - table.mean(-1, keepdim=True),
        "lm_head.weight": head / head.pow(2).mean(-1, keepdim=True).sqrt(),
        "g_log_encode": torch.tensor([0.8]),
    }
    for i in range(THIRD["blocks"]):
        h = f"transformer.h.{i}."
        state[h + "attn.c_q.weight"] = normal(d, d, scale=0.3)
        state[h + "attn.c_k.weight"] = normal(THIRD["kv_heads"] * size, d, scale=0.3)
        state[h + "attn.c_v.weight"] = normal(THIRD["kv_heads"] * size, d, scale=0.3)
        state[h + "attn.c_proj.weight"] = normal(d, d, scale=0.3)
        state[h + "mlp.c_fc.weight"] = normal(4 * d, d, scale=0.3)
        state[h + "mlp.c_proj.weight"] = normal(d, 4 * d, scale=0.1)
        for branch in ("attn_branch.", "mlp_branch."):
            state[h + branch + "m_down.weight"] = normal(32, d, scale=0.4)
            state[h + branch + "m_down.bias"] = normal(32)
            state[h + branch + "coef"] = normal(32)
            state[h + branch + "beta"] = normal(1)
            state[h + branch + "alpha"] = normal(1)
    return state


def third_party_forward(state, tokens):
    """What that layout computes, from its description alone: no name or helper of ours."""
    state = {name: tensor.double() for name, tensor in state.items()}
    d, heads, count = THIRD["hidden"], THIRD["heads"], len(tokens)
    half = d // heads // 2

    def root_mean_square(x):
        return x.pow(2).mean(-1, keepdim=True).sqrt()

    def turn(x):  # [T, heads, D], clockwise, then normed, then 1.2
        angle = torch.outer(
            torch.arange(count).double(), 100000.0 ** (-torch.arange(half).double() / half)
        )
        z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(-1j * angle).unsqueeze(1)
        x = torch.cat([z.real, z.imag], -1)
        return 1.2 * x / root_mean_square(x)

    def attend(h, x):
        q, k, v = ((x @ state[f"{h}attn.c_{n}.weight"].T).view(count, -1, 2 * half) for n in "qkv")
        q, k = turn(q), turn(k)
        out = torch.zeros(count, heads, 2 * half, dtype=torch.float64)
        for t in range(count):
            for n in range(heads):
                g = n * k.shape[1] // heads
                scores = k[: t + 1, g] @ q[t, n] / math.sqrt(2 * half)
                out[t, n] = torch.softmax(scores, 0) @ v[: t + 1, g]
        return out.view(count, d) @ state[h + "attn.c_proj.weight"].T

    def feed(h, x):
        hidden = F.relu(x @ state[h + "mlp.c_fc.weight"].T).square()
        return hidden @ state[h + "mlp.c_proj.weight"].T

    x = state["transformer.wte.weight"][tokens]
    log_norm = root_mean_square(x).log() + state["g_log_encode"]
    x = x / root_mean_square(x)
    for i in range(THIRD["blocks"]):
        h = f"transformer.h.{i}."
        for kind, branch in (("attn", attend), ("mlp", feed)):
            b = f"{h}{kind}_branch."
            lanes = torch.sigmoid(x @ state[b + "m_down.weight"].T + state[b + "m_down.bias"])
            mixed = (lanes * torch.softmax(state[b + "coef"], 0)).sum(-1, keepdim=True)
            g = state[b + "alpha"] * mixed ** F.softplus(state[b + "beta"])
            y = branch(h, x)
            y = y - y.mean(-1, keepdim=True)
            y = y - x * (x * y).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)
            x = x + g * y / root_mean_square(y)
            x = x / root_mean_square(x)
            log_norm = log_norm + 0.5 * torch.log(1 + g * g)
    return (log_norm.exp() * (x @ state["lm_head.weight"].T) / d)[:, : THIRD["vocab"]]


def third_party_meta(path, pattern):
    config = {
        "n_head": THIRD["heads"], "n_layer": THIRD["blocks"], "vocab_size": THIRD["vocab"],
        "sequence_len": THIRD["context"], "window_pattern": pattern,
    }
    path.write_text(json.dumps({"model_config": config}))
    return path


@pytest.mark.parametrize("kind", ("pt", "safetensors"))
def test_nanochat_conversion_keeps_the_function(tmp_path, kind):
    package = pytest.importorskip("safetensors.torch")
    import convert_nanochat

    state, file = third_party_state(), tmp_path / f"state.{kind}"
    if kind == "pt":
        torch.save({"_orig_mod." + name: tensor for name, tensor in state.items()}, file)
    else:
        package.save_file(state, str(file))
    meta, out = third_party_meta(tmp_path / "meta.json", "L"), tmp_path / "out"
    arguments = ["--state", str(file), "--meta", str(meta), "--out", str(out)]
    convert_nanochat.main(arguments + ["--dtype", "float32"])
    tokens = torch.randint(0, THIRD["vocab"], (21,), generator=torch.Generator().manual_seed(4))
    wanted = third_party_forward(state, tokens)
    assert close(nag.load(out, torch.float64).forward(tokens).logits, wanted, 2e-5)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 2048
    convert_nanochat.main(arguments)  # bf16
    assert close(nag.load(out, torch.float64).forward(tokens).logits, wanted, 0.2)
    assert (nag.load(out, torch.float64).forward(tokens).logits - wanted).abs().mean() < 0.02


def test_nanochat_conversion_refuses_what_it_does_not_understand(tmp_path):
    pytest.importorskip("safetensors.torch")
    import convert_nanochat

    state = {**third_party_state(), "value_embeds.0.weight": torch.zeros(1)}
    with pytest.raises(SystemExit, match="value_embeds"):
        convert_nanochat.convert(state, 3, 50, 2048, torch.float32)
    torch.save(third_party_state(), tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="heads"):
        convert_nanochat.main(["--state", str(tmp_path / "state.pt"), "--out", str(tmp_path)])


def test_nanochat_short_windows_bound_the_context(tmp_path):
    pytest.importorskip("safetensors.torch")
    import convert_nanochat

    arguments = ["--state", "unused", "--out", "unused", "--meta"]
    # The last layer is long whatever the pattern says.
    for pattern, context in (("L", 2048), ("LS", 2048), ("SL", 512)):
        meta = third_party_meta(tmp_path / "meta.json", pattern)
        args = convert_nanochat.parse_arguments(arguments + [str(meta)])
        assert convert_nanochat.read_settings(args) == (3, 50, context)
