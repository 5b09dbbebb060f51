"""api/openapi.yaml is what the server does, as schemathesis sees it."""

import copy
import json
import os
import pathlib
import subprocess
import sys

from conftest import ROOT

EXAMPLES = 25  # per operation and way of generating

# A wrong name in a path is an array, say, of which the right name is left once it is written down.
SETTINGS = """\
[[operations]]
include-path = "/v1/models/{id}"
checks.negative_data_rejection.enabled = false
"""


def description():
    return json.loads((ROOT / "api" / "openapi.yaml").read_text())


def close(schema):
    """An object of an answer holds what is described and nothing else."""
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, (dict, list)):
            close(value)
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)


def narrow(document, model, vocabulary):
    """The same description with what is known of one model: its name, tiers and vocabulary."""
    document = copy.deepcopy(document)
    components = document["components"]
    schemas = components["schemas"]
    tiers = [tier["name"] for tier in model["fathom"]["tiers"]] + ["auto"]
    names = [model["id"]] + [f"{model['id']}:{tier}" for tier in tiers]
    schemas["TokenId"]["maximum"] = vocabulary - 1
    components["parameters"]["Quality"]["schema"] = {"enum": tiers}
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["model"] = {"enum": names}
        schemas[name]["properties"]["quality"] = {"enum": [*tiers, None]}
    for path in ("/tokenize", "/detokenize"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body["schema"]["properties"]["model"] = {"enum": [*names, None]}
    for path, chunk in (("completions", "CompletionChunk"), ("chat/completions", "ChatChunk")):
        answer = document["paths"][f"/v1/{path}"]["post"]["responses"]["200"]["content"]
        event = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in (chunk, "Error")]}
        answer["text/event-stream"]["schema"] = {"type": "array", "minItems": 1, "items": event}
    document["security"] = [{"key": []}]
    # What comes back also holds nothing that is not described.
    for name, schema in schemas.items():
        if not name.endswith("Request") and name != "Message":
            close(schema)
    for path, operations in document["paths"].items():
        if path != "/openapi.json":
            for operation in operations.values():
                close(operation["responses"])
    return document


def run_schemathesis(server, folder, *arguments, **environment):
    command = [
        str(pathlib.Path(sys.executable).with_name("schemathesis")), *arguments, "--seed", "1",
        "--request-timeout", "30", "--continue-on-failure", "--no-color",
        "--generation-database", "none", "--output-sanitize", "false",
        "--suppress-health-check", "all",  # a busy machine is no fault of the description
    ]
    result = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, timeout=900,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    assert server.get("/health").status_code == 200


def test_description_as_served(server, tmp_path):
    """No knowledge but /openapi.json, as anyone would run it. It cannot say what is valid for this
    model, so that requests that were meant to be right may be refused; the next test knows more."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    run_schemathesis(server, tmp_path, "--config-file", "settings.toml", "run",
                     f"{server.url}/openapi.json", "--phases", "fuzzing", "--max-examples", "15",
                     "--exclude-checks", "positive_data_acceptance", "--warnings", "off")


def test_description_and_what_is_known_of_the_model(start_server, model_folder, tmp_path):
    """What is valid by the description, the model's tiers and vocabulary, and the rules between
    fields is accepted; what is not is refused; every answer is as described and holds nothing else."""
    key = {"Authorization": "Bearer alpha-key"}
    server = start_server(environment={"FATHOM_API_KEY": "alpha-key"}, debug_steps=4)
    model = server.get("/v1/models", headers=key).json()["data"][0]
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(narrow(description(), model, vocabulary)))
    (tmp_path / "settings.toml").write_text(SETTINGS)
    run_schemathesis(
        server, tmp_path, "--config-file", "settings.toml", "run", str(document),
        "--url", server.url, "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES),
        "--header", f"Authorization: {key['Authorization']}",
        "--generation-with-security-parameters", "false",
        SCHEMATHESIS_HOOKS="rules", PYTHONPATH=str(pathlib.Path(__file__).parent),
        FATHOM_VOCABULARY=str(vocabulary))
