"""lm-evaluation-harness, unmodified, scores and generates through the server, at every tier.

The tokenizer is the checkpoint's folder; prompts are token ids; the tasks are local files.
"""

import json
import math
import subprocess

import pytest

from corpus import SENTENCES, documents

# The scores travel as nine digits and are sums of some hundred terms; the arithmetic is the same.
RELATIVE = 1e-5

TASKS = {
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "scored": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{rest}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "generated": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder, rows):
    for name in rows:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {"task": name, "dataset_path": "json", "test_split": "test",
                "dataset_kwargs": {"data_files": {"test": str(data)}}, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def evaluate(server, model_folder, tier, folder, tasks, **model_args):
    import lm_eval
    from lm_eval.tasks import TaskManager

    model_args = {
        "model": f"{server.model_id}:{tier}",
        "base_url": server.url + "/v1/completions",
        "tokenizer": str(model_folder),
        "tokenizer_backend": "huggingface",
        "max_length": server.model["max_model_len"],
        "num_concurrent": 4,
        **model_args,
    }
    return lm_eval.simple_evaluate(
        model="local-completions", model_args=model_args, batch_size=4, tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0, log_samples=True,
    )


def ids(server, text):
    answer = server.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    return answer.json()["tokens"]


def negative_log_likelihood(binary, model_folder, folder, text, tier):
    """Of all tokens but the first, by `fathom eval`."""
    path = folder / "text"
    path.write_text(text)
    command = [binary, "eval", str(model_folder), "--text", str(path), "--quality", tier, "--json"]
    row = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]
    return row["tokens"] * math.log(row["perplexity"])


@pytest.fixture(params=["full", "high", "balanced", "fast"])
def tier(request, server):
    names = [tier["name"] for tier in server.model["fathom"]["tiers"]]
    if request.param not in names:
        pytest.skip(f"this model's tiers are {names}")
    return request.param


def greedy(server, tier, context):
    answer = server.complete(model=f"{server.model_id}:{tier}", prompt=context, temperature=0,
                             max_tokens=24, stop=[".", "\n"])
    return answer.json()["choices"][0]["text"]


def test_perplexity_agrees_with_fathom_eval(server, binary, model_folder, tier, tmp_path):
    """A document's first word stands where the harness puts its prefix token, for `fathom eval`
    predicts everything behind the first token. It is shorter than the context: one window."""
    first, rest = "The", [text[3:] for text in documents(6, 12) if text.startswith("The ")]
    rest += [" " + text for text in documents(4, 12, seed=2)]
    assert all(ids(server, first + text) == ids(server, first) + ids(server, text) for text in rest)
    assert all(len(ids(server, text)) < server.model["max_model_len"] - 1 for text in rest)
    write_tasks(tmp_path, {"rolling": [{"text": text} for text in rest]})
    result = evaluate(server, model_folder, tier, tmp_path, ["rolling"],
                      custom_prefix_token_id=ids(server, first)[0])
    words = sum(len(text.split()) + 1 for text in rest)  # as the harness counts: a blank leads
    measured = words * math.log(result["results"]["rolling"]["word_perplexity,none"])
    expected = sum(negative_log_likelihood(binary, model_folder, tmp_path, first + text, tier)
                   for text in rest)
    assert measured == pytest.approx(expected, rel=RELATIVE)


def test_scores_and_generations(server, binary, model_folder, tier, tmp_path):
    """A continuation's score is what the whole text's lacks without it; a greedy text is found to
    be greedy, and comes out again."""
    halves = [(" ".join(words[:6]), " " + " ".join(words[6:]))
              for words in map(str.split, SENTENCES)]
    rows = [{"context": context, "rest": rest} for context, rest in halves[:6]]
    rows += [{"context": context, "rest": greedy(server, tier, context)} for context, _ in halves[-12:]]
    rows = [row for row in rows if row["rest"] and
            ids(server, row["context"] + row["rest"]) ==
            ids(server, row["context"]) + ids(server, row["rest"])]
    assert len(rows) > 8
    write_tasks(tmp_path, {"scored": rows, "generated": rows})
    result = evaluate(server, model_folder, tier, tmp_path, ["scored", "generated"])

    for sample in result["samples"]["scored"]:
        row, (score, is_greedy) = sample["doc"], sample["filtered_resps"][0]
        whole, part = (negative_log_likelihood(binary, model_folder, tmp_path, text, tier)
                       for text in (row["context"] + row["rest"], row["context"]))
        assert -score == pytest.approx(whole - part, rel=RELATIVE, abs=RELATIVE * whole)
        assert is_greedy == greedy(server, tier, row["context"]).startswith(row["rest"])
    for sample in result["samples"]["generated"]:
        assert sample["filtered_resps"][0] == greedy(server, tier, sample["doc"]["context"])
