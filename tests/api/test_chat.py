"""Chat completions over the wire. The bundled model is no chat model: it has no template, so its
format is `plain`, and what it says is not judged here."""

import openai
import pytest

MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": [{"type": "text", "text": "Begin."}]},
]


def test_client_completes(server):
    answer = server.client().chat.completions.create(
        model=server.model_id, messages=MESSAGES, max_completion_tokens=12, seed=3, logprobs=True,
        top_logprobs=2, extra_body={"ignore_eos": True},
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 12
    assert 0 < len(choice.logprobs.content) <= 12  # an end-of-text that was drawn has no content
    assert all(len(entry.top_logprobs) >= 2 for entry in choice.logprobs.content)
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_stream_equals_whole(server):
    fields = {"model": server.model_id, "messages": MESSAGES, "max_tokens": 20, "seed": 7, "n": 2}
    whole = server.client().chat.completions.create(**fields)
    texts, roles, reasons = {}, {}, {}
    for chunk in server.client().chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            roles.setdefault(choice.index, choice.delta.role)
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert roles == {0: "assistant", 1: "assistant"}
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason


def test_tier(server):
    tier = server.model["fathom"]["tiers"][-1]["name"]
    answer = server.client().chat.completions.create(
        model=f"{server.model_id}:{tier}", messages=MESSAGES, max_tokens=2
    )
    assert answer.quality == tier and answer.model == server.model_id


@pytest.mark.parametrize(
    "param, fields",
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("n", {"n": 0}),
    ],
)
def test_refusals_name_the_field(server, param, fields):
    answer = server.post(
        "/v1/chat/completions", json={"model": server.model_id, "messages": MESSAGES, **fields}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_client_reads_errors(server):
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(model="other", messages=MESSAGES)


def test_chat_format_flag(start_server):
    """A format named by flag is used although the model's files name none."""
    server = start_server(chat_format="chatml")
    plain = {"model": server.model_id, "messages": MESSAGES, "max_tokens": 1}
    tokens = server.post("/v1/chat/completions", json=plain).json()["usage"]["prompt_tokens"]
    text = "<|im_start|>system\nYou tell stories.<|im_end|>\n"
    assert tokens > len(text) / 4
