"""What a JSON Schema cannot say: rules between fields, and sums over them.

schemathesis loads this and hands over every body before it is sent. A body that is valid by the
schema is bent until it keeps the rules as well, so that the server must accept it; it is also made
small enough to be answered soon. What is wrong in a body stays wrong: only valid values are
touched.
"""

import json
import os

import schemathesis

VOCABULARY = int(os.environ["FATHOM_VOCABULARY"])
CHOICES = 32  # prompts x n
PROMPT = 64  # characters or ids
TOKENS = 16


def is_count(value, low, high):
    return type(value) in (int, float) and value == int(value) and low <= value <= high


def are_ids(value):
    return isinstance(value, list) and all(is_count(item, 0, VOCABULARY - 1) for item in value)


def without_nul(value):
    """A member's name holds no NUL."""
    if isinstance(value, dict):
        return {key.replace("\0", ""): without_nul(item) for key, item in value.items()}
    return [without_nul(item) for item in value] if isinstance(value, list) else value


def shorten(prompt):
    if isinstance(prompt, str) or are_ids(prompt):
        return prompt[:PROMPT]
    if isinstance(prompt, list) and len(prompt) <= 256:
        if all(isinstance(item, str) for item in prompt) or all(are_ids(item) for item in prompt):
            return [item[:PROMPT] for item in prompt[:CHOICES]]
    return prompt


def shorten_message(message):
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content[:PROMPT]}
    if isinstance(content, list):
        content = [
            {**part, "text": part["text"][:PROMPT]}
            if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content
        ]
        valid = all(isinstance(part, dict) and part.get("type") == "text" and
                    isinstance(part.get("text"), str) for part in content)
        return {**message, "content": content[:2] if valid else content}
    return message


def shorten_stop(stop):
    """The limit is in bytes, the schema's in characters."""
    if isinstance(stop, str) and len(stop) <= 1024:
        return stop[:256]
    return [shorten_stop(item) for item in stop] if isinstance(stop, list) else stop


def keep_lengths(body, least):
    names = ("max_tokens", "max_completion_tokens")
    given = [name for name in names if is_count(body.get(name), least, 2**31 - 1)]
    if given:
        length = min(int(body[given[0]]), TOKENS)
        length = length if body.get("echo") is True else max(length, 1)
        body.update({name: length for name in given})
    elif all(body.get(name) is None for name in names):
        body["max_tokens"] = length = TOKENS
    else:
        return
    if is_count(body.get("min_tokens"), 0, 2**31 - 1):
        body["min_tokens"] = min(int(body["min_tokens"]), length)


def keep_counts(body):
    prompt, n = body.get("prompt"), body.get("n")
    prompts = 1 if not isinstance(prompt, list) or are_ids(prompt) else len(prompt)
    if is_count(n, 1, 128) and prompts * n > CHOICES:
        body["n"] = max(CHOICES // prompts, 1)
    n = 1 if body.get("n") is None else body["n"]
    if is_count(body.get("best_of"), 1, 128) and is_count(n, 1, 128):
        body["best_of"] = n


def keep_pairs(body, is_chat):
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    if is_chat and body.get("top_logprobs") is not None and body.get("logprobs") in (None, False):
        body["logprobs"] = True
    if body.get("continue_final_message") is True and body.get("add_generation_prompt") is True:
        body["add_generation_prompt"] = False
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        body["logit_bias"] = {
            str(int(key) % VOCABULARY) if key.isascii() and key.isdigit() and str(int(key)) == key
            else key: value for key, value in bias.items()
        }


def keep_seed(body):
    """64 bits: the format of the schema says so, its numbers do not."""
    if is_count(body.get("seed"), -float("inf"), float("inf")):
        body["seed"] = (int(body["seed"]) + 2**63) % 2**64 - 2**63


def keep_rules(body, is_chat):
    if "prompt" in body:
        body["prompt"] = shorten(body["prompt"])
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) <= 1024:
        body["messages"] = [shorten_message(message) for message in messages]
    if "stop" in body:
        body["stop"] = shorten_stop(body["stop"])
    salt = body.get("cache_salt")
    if isinstance(salt, str) and len(salt) <= 256:
        body["cache_salt"] = salt[:PROMPT]
    keep_lengths(body, 1 if is_chat else 0)
    keep_counts(body)
    keep_pairs(body, is_chat)
    keep_seed(body)


def keep_quality(body, headers):
    """The header is looked at where the body is silent."""
    if "X-Quality" in headers and isinstance(body.get("quality"), str):
        del body["quality"]


def without_control(headers):
    """HTTP allows no control character in a header."""
    return {name: "".join(c for c in value if c >= " " and c != "\x7f")
            if isinstance(value, str) else value for name, value in headers.items()}


@schemathesis.deserializer("text/event-stream")
def read_events(context, response):
    """The objects of a stream, which must end as it should."""
    events = [event for event in response.content.decode().split("\n\n") if event != ": ping"]
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@schemathesis.hook
def before_call(context, case, kwargs):
    case.headers = without_control(case.headers or {})
    if not isinstance(case.body, (dict, list)):
        return
    case.body = without_nul(case.body)
    if isinstance(case.body, dict) and "completions" in case.operation.path:
        keep_rules(case.body, "chat" in case.operation.path)
        keep_quality(case.body, case.headers)
