"""Mixed load for a while: random tiers, lengths, streams, disconnects, preemptions, bad requests.

FATHOM_SOAK_SECONDS (default 10) says for how long. Every answer that comes whole must be the one
that the same request got when it was alone; nothing may be left behind.
"""

import http.client
import json
import os
import random
import threading
import time

CONNECTIONS = 32
SECONDS = float(os.environ.get("FATHOM_SOAK_SECONDS", "10"))


def random_request(server, tiers, dice):
    return {
        "model": server.model_id,
        "prompt": "Once upon a time " * dice.choice([1, 1, 2, 8]),
        "max_tokens": dice.choice([1, 8, 40, 100]),
        "temperature": dice.choice([0, 1]),
        "seed": dice.randrange(4),
        "quality": dice.choice(tiers),
        "logprobs": dice.choice([None, None, 3]),
        "ignore_eos": True,
    }


def whole_answer(server, fields):
    """Text, logprobs and depth of an answer: what must not depend on load. How much of the prompt
    was found in the prefix cache does."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    body = json.dumps(fields)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.status == 200, data
    if not fields.get("stream"):
        answer = json.loads(data)
        del answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["text"], answer["usage"]
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line[:7] == "data: {"]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    del events[-1]["usage"]["prompt_tokens_details"]
    return text, events[-1]["usage"]


def leave_early(server, fields, dice):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"}
    )
    time.sleep(dice.random() ** 2 * 0.1)
    connection.close()


class Client(threading.Thread):
    def __init__(self, server, requests, answers, number, end):
        super().__init__()
        self.server, self.requests, self.answers, self.end = server, requests, answers, end
        self.dice = random.Random(number)
        self.done, self.failure = 0, None

    def run(self):
        try:
            while time.monotonic() < self.end and self.failure is None:
                self.one_request()
        except Exception as failure:  # told by the test, on its own thread
            self.failure = failure

    def one_request(self):
        which = self.dice.randrange(len(self.requests))
        fields, kind = dict(self.requests[which]), self.dice.random()
        if kind < 0.25:
            leave_early(self.server, {**fields, "n": 3, "stream": kind < 0.12}, self.dice)
            return
        if kind < 0.30:
            assert self.server.complete(temperature=9).status_code == 400
            return
        if kind < 0.65:
            fields.update(stream=True, stream_options={"include_usage": True})
        assert whole_answer(self.server, fields) == self.answers[which]
        self.done += 1


def test_mixed_load(start_server):
    """With a KV budget that is too small for everybody, so that sequences are preempted."""
    server = start_server(kv_budget="4MiB", queue_limit=4096, log_level="warning")
    tiers = [tier["name"] for tier in server.model["fathom"]["tiers"]]
    dice = random.Random(1)
    requests = [random_request(server, tiers, dice) for _ in range(60)]
    answers = [whole_answer(server, fields) for fields in requests]
    memory = []
    for share in (0.2, 0.8):  # what is kept for good is there after the first
        end = time.monotonic() + share * SECONDS
        clients = [Client(server, requests, answers, n, end) for n in range(CONNECTIONS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        failures = [client.failure for client in clients if client.failure]
        assert not failures, failures[0]
        server.wait_idle()
        memory.append(server.metric("process_resident_memory_bytes"))
    done = sum(client.done for client in clients)
    preempted = server.metric("fathom_num_preemptions_total")
    print(f"{done} whole answers, {preempted:.0f} preemptions, memory {memory[1] - memory[0]:+.0f}")
    assert done > CONNECTIONS
    assert memory[1] - memory[0] < 8 << 20
    assert server.get("/health").status_code == 200
