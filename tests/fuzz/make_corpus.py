#!/usr/bin/env python3
"""Writes the seeds of tests/fuzz/corpus: one small valid input per feature, and the nasty ones.

A seed shows a fuzzer one feature that it would take long to find; everything else it makes itself.
Inputs that a fuzzer found a bug with stand beside them as found-*, and are left alone here.
"""
import json
import pathlib
import struct

HERE = pathlib.Path(__file__).parent / "corpus"


def text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


# ---- JSON: syntax and bounds -------------------------------------------------------------------

JSON = {
    "object": b'{"a":[1,2.5,-3e4,true,false,null],"b":{"c":"d"},"":""}',
    "strings": rb'{"s":"[,:{\"\\\u0000\u20ac\ud83d\ude00\/\b\f\n\r\t"}',
    "lone-surrogate": rb'{"s":"\ud800"}',
    "duplicate": b'{"a":1,"a":2}',
    "top-array": b"[1,[2,[3]]]",
    "depth-64": b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
    "depth-65": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "deep": b"[" * 3000,
    "many": b'{"a":[' + b"[]," * 300 + b"[]]}",
    "huge-integer": b'{"a":123456789012345678901234567890}',
    "huge-real": b'{"a":1e999}',
    "torn": b'{"a":"never ends\\',
    "bad-utf8": b'{"a":"\xc3\x28\xf0\x9f\x98"}',
    "spaces": b' \t\r\n{ "a" : [ ] } ',
}

# ---- Requests ----------------------------------------------------------------------------------
# Without model and prompt (or messages): the target puts them before what does not begin with '{'.

MEMBERS = {
    "limits": {"max_tokens": 16, "min_tokens": 2, "n": 2, "best_of": 2, "priority": -1, "seed": 2**63 - 1},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 2,
                 "frequency_penalty": -2, "repetition_penalty": 1.1},
    "stop": {"stop": ["a", "ab", "\n"], "max_tokens": 40},
    "stop-one": {"stop": "ell", "stop_token_ids": [0, 4095], "ignore_eos": True},
    "bias": {"logit_bias": {"0": -100, "4095": 100, "17": 0.5}},
    "stream": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "tier": {"quality": "fast", "return_depth": True, "service_tier": "auto", "user": "u"},
    "auto": {"quality": "auto", "cache_salt": "s", "metadata": {"a": "b"}, "store": False},
    "nulls": {"max_tokens": None, "stop": None, "logit_bias": None, "stream": None, "seed": None},
    "floats": {"max_tokens": 3.0, "n": 1.0, "top_k": 1e1},
    "refused": {"suffix": "x", "tools": [], "response_format": {"type": "json_object"}},
    "extremes": {"max_tokens": -1, "temperature": 1e308, "n": 1e6, "seed": -(2**63), "top_p": 0},
    "wrong": {"max_tokens": "3", "stop": [""], "logit_bias": {"x": 1}, "stream": 1, "n": True},
}


def members(value):
    return b"," + text(value)[1:]


COMPLETIONS = {name: members(value) for name, value in MEMBERS.items()} | {
    "prompt-text": text({"model": "m", "prompt": "The lamp's  12\n\u6c34 e\u0301"}),
    "prompt-texts": text({"model": "m:fast", "prompt": ["a", "", "b c"], "n": 2}),
    "prompt-ids": text({"model": "m", "prompt": [0, 1, 4095], "max_tokens": 0}),
    "prompt-lists": text({"model": "m", "prompt": [[1, 2], [3]]}),
    "prompt-special": text({"model": "m", "prompt": "a<|endoftext|>b"}),
    "prompt-empty": text({"model": "m", "prompt": ""}),
    "prompt-mixed": text({"model": "m", "prompt": [1, "a", [2]]}),
    "prompt-wrong": text({"model": "m", "prompt": [-1, 4096, 1.5, True, 2**63]}),
    "prompt-long": text({"model": "m", "prompt": "word " * 200}),
    "echo": members({"echo": True, "logprobs": 3, "max_tokens": 20}),
    "score": members({"echo": True, "logprobs": 1, "max_tokens": 0}),
    "echo-plain": members({"echo": True, "stop": "a"}),
    "logprobs": members({"logprobs": 0, "stop": ["!", "\ufffd"], "max_tokens": 60}),
    "other-model": text({"model": "x", "prompt": "a"}),
}

CHAT = {name: members(value) for name, value in MEMBERS.items()} | {
    "conversation": text({"model": "m", "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": " \n"}]}),
    "parts": text({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "<|endoftext|>"}]}]}),
    "image": text({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:"}}]}]}),
    "special": text({"model": "m", "messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system"}]}),
    "developer": text({"model": "m", "messages": [{"role": "developer", "content": "d"},
                                                   {"role": "user", "content": "u", "name": "n"}]}),
    "tool": text({"model": "m", "messages": [{"role": "tool", "content": "t", "tool_call_id": "1"}]}),
    "empty": text({"model": "m", "messages": []}),
    "wrong": text({"model": "m", "messages": [{"role": "user"}, 1, None, "a"]}),
    "logprobs": members({"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 20}),
    "logprobs-wrong": members({"top_logprobs": 3}),
}

TOKENIZE = {
    "text": text({"prompt": "The lamp's <|endoftext|> \u6c34"}),
    "strings": text({"model": "m", "prompt": "e\u0301", "add_special_tokens": False, "return_token_strs": True}),
    "escapes": rb'{"prompt":"\u0000\ud83d\ude00"}',
    "ids": text({"tokens": [0, 1, 2, 4095]}),
    "ids-real": b'{"tokens":[1.0,2e0]}',
    "ids-wrong": text({"tokens": [-1, 4096, 1.5, "1", None, True]}),
    "both": text({"prompt": "a", "tokens": []}),
    "members": b',"add_special_tokens":false}',
    "wrong": text({"prompt": 5, "tokens": "a", "model": 7}),
}

# ---- Tokenizer ---------------------------------------------------------------------------------

TOKENIZER = {
    "words": b"The lamp's light, and the dark: 12 345 a  b   c\n\n\td\r\ne",
    "scripts": "h\u00e9llo \u6c34\u6df1 \u0440\u0435\u043a\u0430 \U0001f600\u200d\U0001f680 \u0645\u0627\u0621".encode(),
    "special": b"a<|endoftext|><|endoftext|> b <|endoftext",
    "marks": "e\u0301\u0327\u0300\u0315".encode() * 4,
    "bytes": bytes(range(256)),
    "torn": b"\xe2\x82\xf0\x9f\xff\xc0\x80\xed\xa0\x80",
    "run": b"a" * 200 + b" " * 100 + b"\n" * 50,
}

TOKENIZER_LOAD = {
    "nothing": b"{}",
    "nfc": text({"normalizer": {"type": "NFC"}, "added_tokens": [
        {"id": 301, "content": "Caf\u00e9", "normalized": True}]}),
    "added": text({"added_tokens": [{"id": 300, "content": "<a>", "lstrip": True, "rstrip": True},
                                    {"id": 300000, "content": "<ab>", "special": True}]}),
    "split": text({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s+(?!\\S)"}, "behavior": "Removed", "invert": True},
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}}),
    "prefix": text({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}),
    "template": text({"post_processor": {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}}),
    "processors": text({"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}]}}),
    "merges": text({"model": {"ignore_merges": True, "vocab": {"ab": 400, "abab": 401},
                              "merges": [["a", "b"], ["ab", "ab"]]}}),
    "merges-wrong": text({"model": {"merges": ["a", "a b c", "", [1], {}]}}),
    "config": text({"config": {"bos_token": "<end>", "eos_token": {"content": "<end>"}, "add_bos_token": True,
                               "chat_format": "chatml", "chat_template": "{{ bos_token }}"}}),
    "templates": text({"config": {"chat_template": [{"name": "default", "template": "x"},
                                                    {"name": "tool_use", "template": "y"}]}}),
    "config-wrong": text({"config": {"bos_token": 1, "chat_template": 3}}),
    "far": text({"model": {"vocab": {"far": 4194303}}}),
    "vocab-wrong": text({"model": {"vocab": {"x": -1, "y": 1.5, "z": 7}}}),
    "not-json": b'{"model": {"type": "BPE"',
    "array": b"[[],[],[]]",
}

PRETOKENIZER = {
    "words": rb"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "contractions": rb"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+",
    "possessive": rb"a*+b?+c++d{1,3}e{2,}f{,4}",
    "explosive": rb"(?:a|aa)+b",
    "classes": rb"[\]\-a-z&&x][^\w\d]\h\H[[:alpha:]]",
    "groups": rb"(?:a(?=b)(?!c)(?<=d)(?<!e)|(?>f))*",
    "escapes": rb"\x41\u0041\x{41}\101\A\z\b\K\R\X",
    "empty-match": rb"a*",
    "unicode": "\u6c34+|[\u00e9-\u00ff]".encode(),
    "open": rb"(((([[[[",
}

# ---- Files of a checkpoint ---------------------------------------------------------------------

CONFIG_TEXT = {
    "model_type": "nag", "vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 16,
    "hidden_act": "relu2", "rope_theta": 100000.0, "max_position_embeddings": 64,
    "qk_norm": "after_rope", "qk_scale": 1.25, "nag_directions": 4, "nag_head": "rmsnorm",
    "bos_token_id": 1, "eos_token_id": [2, 3],
}
DEPTH_TEXT = {
    "format": 1, "kv_policy": "omit", "tiers": [
        {"name": "fast", "target_skip": 0.4, "theta": [0, 0.25, 1e-3, 1.5]},
        {"name": "full", "target_skip": 0, "theta": [0, 0, 0, 0.0]}],
    "default": "full", "measured": {"fast": {"perplexity": 3.5, "attn_skip": 0.25, "mlp_skip": 0.5,
                                             "flops_per_token": 1e6}},
}
CONFIG = {
    "config": text(CONFIG_TEXT),
    "config-least": text({key: CONFIG_TEXT[key] for key in (
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings")}),
    "config-most": text(CONFIG_TEXT | {"vocab_size": 4194304, "hidden_size": 32768, "head_dim": 1024,
                                       "num_hidden_layers": 1024, "intermediate_size": 262144,
                                       "max_position_embeddings": 1048576, "rope_theta": 1e12}),
    "config-over": text(CONFIG_TEXT | {"rope_theta": 1e300}),
    "config-odd": text(CONFIG_TEXT | {"head_dim": 7}),
    "config-scaling": text(CONFIG_TEXT | {"rope_scaling": {"type": "linear"}}),
    "depth": text(DEPTH_TEXT),
    "depth-compute": text(DEPTH_TEXT | {"kv_policy": "compute", "measured": None}),
    "depth-twice": text(DEPTH_TEXT | {"tiers": DEPTH_TEXT["tiers"] + DEPTH_TEXT["tiers"][:1]}),
}


def safetensors(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else text(header)
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


FLOATS = struct.pack("<4f", 1.5, -2.0, 0.0, 3e38)
SAFETENSORS = {
    "f32": safetensors({"w": tensor("F32", [2, 2], 0, 16)}, FLOATS),
    "halves": safetensors({"__metadata__": {"format": "pt"}, "a": tensor("BF16", [3], 0, 6),
                           "b": tensor("F16", [1, 1], 6, 8)},
                          struct.pack("<4H", 0x3F80, 0x7F80, 0xC000, 0x0001)),
    "not-finite": safetensors({"w": tensor("F32", [1], 0, 4)}, struct.pack("<f", float("nan"))),
    "scalar": safetensors({"s": tensor("F32", [], 0, 4)}, FLOATS[:4]),
    "empty-tensor": safetensors({"e": tensor("F32", [0, 5], 0, 0)}),
    "other-types": safetensors({"i": tensor("I64", [1], 0, 8), "u": tensor("U8", [4], 8, 12)}, bytes(12)),
    "rank-5": safetensors({"w": tensor("F32", [1, 1, 1, 1, 1], 0, 4)}, FLOATS[:4]),
    "overlap": safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, FLOATS),
    "overflow": safetensors({"w": tensor("F32", [2**62, 4], 0, 16)}, FLOATS),
    "outside": safetensors({"w": tensor("F32", [4], 0, 16)}, FLOATS[:8]),
    "no-tensors": safetensors({}),
    "long-header": safetensors({}, length=2**63),
    "not-json": safetensors(b"{"),
    "short": b"\0\0\0",
}

# ---- HTTP --------------------------------------------------------------------------------------


def http(*lines, body=b""):
    return b"".join(line.encode("latin-1") + b"\r\n" for line in lines) + b"\r\n" + body


POST = ("POST /v1/completions HTTP/1.1", "Host: h")
CHUNKED = (*POST, "Transfer-Encoding: chunked")
HTTP = {
    "get": http("GET /health?a=b HTTP/1.1", "Host: h", "X-Empty:", "Accept: */*"),
    "old": http("GET / HTTP/1.0", "Connection: Keep-Alive"),
    "absolute": http("GET http://h/p HTTP/1.1", "Host: h", "Connection: x, close"),
    "options": http("OPTIONS * HTTP/1.1", "Host: h"),
    "length": http(*POST, "Content-Length: 5", "Expect: 100-continue", body=b"hello"),
    "chunked": http(*CHUNKED, body=b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nA: b\r\n\r\n"),
    "pipelined": http(*POST, "Content-Length: 2", body=b"hi") + http(*CHUNKED, body=b"1\r\nx\r\n0\r\n\r\n")
    + b"\r\n" + http("GET /c HTTP/1.1", "Host: h"),
    "upgrade": http("GET / HTTP/1.1", "Host: h", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings"),
    "two-lengths": http(*POST, "Content-Length: 2", "Content-Length: 3", body=b"hi!"),
    "list-length": http(*POST, "Content-Length: 2, 2", body=b"hi"),
    "signed-length": http(*POST, "Content-Length: +2", body=b"hi"),
    "both": http(*CHUNKED, "Content-Length: 5", body=b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
    "coding-obscured": http(*POST, "Transfer-Encoding: xchunked", "Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "chunk-spaces": http(*CHUNKED, body=b"1 \r\nx\r\n1\t;e\r\ny\r\n0\r\n\r\n"),
    "chunk-bare-lf": http(*CHUNKED, body=b"1\nx\n0\n\n"),
    "chunk-extension": http(*CHUNKED, body=b'1;a="\n\r";b\r\nx\r\n0\r\n\r\n'),
    "chunk-huge": http(*CHUNKED, body=b"ffffffffffffffff\r\nx"),
    "chunk-zeros": http(*CHUNKED, body=b"0000000000000000001\r\nx\r\n000\r\n\r\n"),
    "trailer-fold": http(*CHUNKED, body=b"0\r\nA: b\r\n c\r\nContent-Length: 5\r\n\r\n"),
    "trailer-bare": http(*CHUNKED, body=b"0\r\nA: b\rc\nd\r\n\r\n"),
    "bare-cr": b"GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n",
    "bare-lf": b"GET / HTTP/1.1\nHost: h\n\n",
    "fold": http("GET / HTTP/1.1", "Host: h", "A: b", " c"),
    "method": http("CONNECT h:1 HTTP/1.1", "Host: h"),
    "version": http("PRI * HTTP/2.0") + b"SM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00",
}

# ---- Answers that a load generator reads -------------------------------------------------------


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else text(value)) + b"\n\n"


OK_STREAM = ("HTTP/1.1 200 OK", "Content-Type: text/event-stream")
OK_JSON = ("HTTP/1.1 200 OK", "Content-Type: application/json")
TOKEN = {"choices": [{"index": 0, "text": "a", "finish_reason": None}], "quality": "fast"}
LAST = {"choices": [{"text": "b", "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4,
                                  "prompt_tokens_details": {"cached_tokens": 2}}}
EVENTS = event(TOKEN) + event(LAST) + event(USAGE) + event(b"[DONE]")
WHOLE = text({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 9}})


def chunks(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


ANSWER = {
    "stream": http(*OK_STREAM, body=EVENTS),
    "stream-chunked": http(*OK_STREAM, "Transfer-Encoding: chunked", body=chunks(EVENTS[:30], EVENTS[30:])),
    "stream-lines": http(*OK_STREAM, body=b': ping\r\n\r\nevent: x\r\nid: 1\r\ndata: {"choices":\r\n'
                         b'data:[{"text":"a"}]}\r\rdata:[DONE]\r\n\r\n'),
    "chat": http(*OK_STREAM, body=event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                 + event({"choices": [{"delta": {"reasoning_content": "r"}}]}) + event(b"[DONE]")),
    "json": http(*OK_JSON, f"Content-Length: {len(WHOLE)}", body=WHOLE),
    "json-to-the-end": http(*OK_JSON, "Connection: close", body=WHOLE),
    "continue": http("HTTP/1.1 100 Continue") + http(*OK_JSON, f"Content-Length: {len(WHOLE)}", body=WHOLE),
    "behind": http(*OK_JSON, "Content-Length: 2", body=b"{}HTTP/1.1 200 OK\r\n"),
    "error-event": http(*OK_STREAM, body=event(TOKEN) + event({"error": {"message": "no\u0001"}})),
    "error": http("HTTP/1.1 500 Oh", "Content-Length: 27", body=b'{"error":{"message":"oops"}}'),
    "overloaded": http("HTTP/1.1 429 Later", "Retry-After: 1", "Content-Length: 0"),
    "usage-wrong": http(*OK_STREAM, body=event({"usage": {"completion_tokens": -1}, "choices": []})),
    "types-wrong": http(*OK_STREAM, body=event({"choices": 7, "usage": [], "quality": {}, "error": None})),
    "many": http(*OK_JSON, "Content-Length: 601", body=b"[" + b"[]," * 199 + b"[]]"),
    "protocol": http("HTTP/1.1 101 Switch", "Upgrade: x", "Connection: upgrade"),
    "torn": http(*OK_STREAM, body=event(TOKEN) + b'data: {"choi'),
    "not-http": b"SSH-2.0-x\r\n",
}

# ---- GGUF ---------------------------------------------------------------------------------------

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def gguf_string(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def gguf_value(kind, value):
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(gguf_value(element, i) for i in items)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def gguf(values, tensors, version=3, alignment=32):
    """tensors: (name, dimensions innermost first, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, (kind, value) in values.items():
        out += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    offset = 0
    for name, dimensions, kind, size in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", kind, offset)
        offset += -(-size // alignment) * alignment
    out += bytes(-len(out) % alignment)
    return out + b"".join(bytes(size) + bytes(-size % alignment) for *_, size in tensors)


SHAPE = {
    "general.architecture": (STRING, "llama"), "llama.context_length": (U32, 16),
    "llama.embedding_length": (U32, 4), "llama.block_count": (U32, 1),
    "llama.feed_forward_length": (U32, 4), "llama.attention.head_count": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5), "llama.rope.freq_base": (F32, 1e4),
}
ASCII = [chr(byte) for byte in range(33, 127)] + ["\u0120"]
BYTES = {
    "tokenizer.ggml.model": (STRING, "gpt2"), "tokenizer.ggml.pre": (STRING, "smollm"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, [*ASCII, "ab", "<|end|>"])),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [1] * 96 + [3])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
    "tokenizer.ggml.eos_token_id": (U32, 96), "tokenizer.ggml.add_bos_token": (BOOL, False),
    "tokenizer.chat_template": (STRING, "{{ x }}"),
}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab", "\u2581"]
SCORED = {
    "tokenizer.ggml.model": (STRING, "llama"), "tokenizer.ggml.tokens": (ARRAY, (STRING, PIECES)),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [2, 3, 3] + [6] * 256 + [1] * 4)),
    "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * 259 + [-2.0, -3.0, -1.0, float("nan")])),
}
TABLE = ("token_embd.weight", (4, 97), 0, 1552)
GGUF = {
    "bytes": gguf({**SHAPE, **BYTES}, [TABLE, ("blk.0.attn_q.weight", (4, 4), 1, 32)]),
    "pieces": gguf({**SHAPE, **SCORED}, [("token_embd.weight", (4, 263), 30, 2104)]),
    "q8_0": gguf({**SHAPE, "llama.embedding_length": (U32, 32)}, [("token_embd.weight", (32, 2), 8, 68)]),
    "q4_1": gguf({**SHAPE, "llama.embedding_length": (U32, 32)}, [("token_embd.weight", (32, 2), 3, 40)]),
    "q6_k": gguf({**SHAPE, "llama.embedding_length": (U32, 256)}, [("token_embd.weight", (256, 1), 14, 210)]),
    "linear": gguf({**SHAPE, "llama.rope.scaling.type": (STRING, "linear"),
                    "llama.rope.scaling.factor": (F32, 2.0)}, [TABLE], version=2),
    "alignment": gguf({**SHAPE, "general.alignment": (U32, 8)}, [TABLE], alignment=8),
    "experts": gguf({**SHAPE, "llama.expert_count": (U32, 8)}, [TABLE]),
    "unknown-tensor": gguf(SHAPE, [TABLE, ("blk.0.ssm_a", (4,), 0, 16)]),
    "empty": gguf({}, []),
    "huge-counts": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**62),
    "huge-string": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1),
    "huge-array": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<IIQ", 9, 8, 2**61 + 1),
    "huge-tensor": gguf({}, [("t", (2**32, 2**31), 0, 0)]),
    "far-tensor": gguf({}, [("t", (64,), 0, 0)]),
    "torn": gguf({**SHAPE, **BYTES}, [TABLE])[:400],
}

TARGETS = {
    "json": JSON, "completions": COMPLETIONS, "chat": CHAT, "tokenize": TOKENIZE, "tokenizer": TOKENIZER,
    "tokenizer_load": TOKENIZER_LOAD, "pretokenizer": PRETOKENIZER, "config": CONFIG,
    "safetensors": SAFETENSORS, "gguf": GGUF, "http": HTTP, "answer": ANSWER,
}

for target, seeds in TARGETS.items():
    folder = HERE / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith("found-"):
            old.unlink()
    for name, seed in seeds.items():
        (folder / name).write_bytes(seed)
