"""TLS: what works without it works with it, and whoever speaks it badly disturbs nobody."""

import json
import random
import re
import socket
import ssl
import subprocess
import time

import pytest

import test_disconnect
import test_http
from conftest import (BINARY, HandMade, Server, certificate, client_context, find_model,
                      make_certificate, read_response)
from test_http import GET, POST, completion, length


def hello(server):
    """The first bytes of a handshake."""
    with HandMade(server) as client:
        with pytest.raises(ssl.SSLWantReadError):
            client.tls.do_handshake()
        return client.outgoing.read()


# ---- What works without TLS works with it --------------------------------------------------------


@pytest.mark.parametrize("check", [
    test_http.test_head, test_http.test_keep_alive_and_close, test_http.test_pipelining,
    test_http.test_expect_continue, test_http.test_streams_over_http_1_0,
    test_http.test_request_id])
def test_http_over_tls(secure, check):
    check(secure)


@pytest.mark.parametrize("check", [
    test_http.test_connection_limit, test_disconnect.test_leaving_cancels_at_once,
    test_disconnect.test_slow_reader_is_cancelled,
    test_disconnect.test_large_answer_to_a_slow_but_steady_reader])
def test_servers_with_tls(start_server, check):
    check(lambda **flags: start_server(tls=True, **flags))


def test_table_over_tls(secure):
    for name, data, status in test_http.TABLE:
        if len(data) < 100_000 and not data.startswith(b"HEAD"):
            with secure.connect() as connection:
                connection.sendall(data)
                assert read_response(connection)[0] == status, name


def test_sdk(server, secure):
    """The same answers as without TLS, whole and streamed, one connection for all."""
    fields = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 1}
    plain = server.client().completions.create(model=server.model_id, **fields)
    with secure.client() as client:
        whole = client.completions.create(model=secure.model_id, **fields)
        stream = client.completions.create(model=secure.model_id, stream=True, **fields)
        pieces = [chunk.choices[0].text for chunk in stream]
        assert client.models.list().data[0].id == secure.model_id
    assert whole.choices[0].text == plain.choices[0].text == "".join(pieces)


def test_leaving_the_sdk_stream_frees_all(secure):
    with secure.client() as client:
        stream = client.completions.create(model=secure.model_id, prompt="x", max_tokens=400, n=32,
                                           stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    secure.wait_idle()


def test_large_bodies(secure):
    text = "word " * 400_000
    answer = secure.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert answer.status_code == 200 and answer.json()["count"] >= 400_000
    assert len(answer.content) > 1 << 20
    with secure.connect() as connection:
        connection.sendall(POST + b"Content-Length: 99999999\r\n\r\n")
        assert read_response(connection)[0] == 413


def test_records_of_any_size(secure):
    """One byte each, and what is written in one piece read in many."""
    with HandMade(secure) as client:
        client.handshake()
        for byte in POST + length():
            client.sendall(bytes([byte]))
        assert read_response(client)[0] == 200
        client.sendall((GET + b"\r\n") * 2000)
        for _ in range(2000):
            assert read_response(client)[0] == 200


# ---- Versions, protocols, ends -------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions(secure, version):
    context = client_context(minimum_version=version, maximum_version=version)
    with HandMade(secure, context) as client:
        client.handshake()
        assert client.tls.version() == version.name.replace("_", ".")
        client.sendall(GET + b"Connection: close\r\n\r\n")
        assert read_response(client)[0] == 200
        assert client.recv(1) == b""  # a close_notify: the answer was not cut


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_versions_are_refused(secure):
    context = client_context(minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with HandMade(secure, context) as client, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        client.handshake()


def test_application_protocol(secure):
    for offered, chosen in ((["h2", "http/1.1"], "http/1.1"), ([], None)):
        context = client_context()
        context.set_alpn_protocols(offered)
        with HandMade(secure, context) as client:
            client.handshake()
            assert client.tls.selected_alpn_protocol() == chosen
    context.set_alpn_protocols(["h2"])
    refused = "alert no application protocol|unknown error"  # some of Python's versions lack its name
    with HandMade(secure, context) as client, pytest.raises(ssl.SSLError, match=refused):
        client.handshake()


def test_renegotiation_is_refused(secure):
    """The client may ask (TLS 1.2); the connection goes on or ends, but is not renegotiated."""
    command = ["openssl", "s_client", "-connect", f"{secure.host}:{secure.port}", "-tls1_2",
               "-CAfile", certificate()[0]]
    done = subprocess.run(command, input=b"R\n", capture_output=True, timeout=30)
    assert b"no renegotiation" in done.stderr and b"Verification: OK" in done.stdout
    assert secure.complete().status_code == 200


def test_idle_connections_are_closed_in_order(start_server):
    server = start_server(tls=True, idle_timeout=0.5)
    with HandMade(server) as client:
        client.handshake()
        client.sendall(GET + b"\r\n")
        assert read_response(client)[0] == 200
        assert client.recv(1) == b""


def test_half_close_gets_the_answers(secure):
    with HandMade(secure) as client:
        client.handshake()
        client.sendall((GET + b"\r\n") * 2000)  # many turns
        client.end()
        assert [read_response(client)[0] for _ in range(2000)] == [200] * 2000
        assert client.recv(1) == b""


def test_half_close_in_the_middle_cancels(start_server):
    server = start_server(tls=True, max_sequences=1)
    fields = server.fields_lasting(20)
    with HandMade(server) as client:
        client.handshake()
        client.sendall(completion(server, **fields))
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.01)
        client.end()
        start = time.monotonic()
        server.wait_idle()
        assert time.monotonic() - start < 5


# ---- Clients that speak it badly -----------------------------------------------------------------


def closes(connection):
    """Reads to the end, which must come."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def test_plain_http(secure):
    """Told in its own language, then closed."""
    for request in (GET + b"\r\n", completion(secure), b"HEAD / HTTP/1.1\r\n\r\n"):
        with secure.connect_plain() as connection:
            connection.sendall(request)
            status, headers, body = read_response(connection)
            assert (status, headers["connection"]) == (400, "close")
            assert "https://" in json.loads(body)["error"]["message"]
            assert closes(connection) == b""


def test_bad_handshakes(secure):
    """Garbage, a hello with one bit changed, a hello cut anywhere; then a normal request."""
    dice = random.Random(1)
    start = hello(secure)
    assert secure.complete(max_tokens=1).status_code == 200
    time.sleep(0.2)
    before = secure.descriptors()
    for i in range(100):
        flipped = bytearray(start)
        flipped[dice.randrange(len(start))] ^= 1 << dice.randrange(8)
        for data in (dice.randbytes(dice.randrange(1, 3000)), bytes(flipped), start[:-1 - i],
                     start + dice.randbytes(100), b"\x16\x03\x01\x40\x00" + bytes(16384)):
            with secure.connect_plain() as connection:
                connection.sendall(data)
                if dice.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    closes(connection)
                elif dice.random() < 0.5:
                    test_disconnect.leave(connection, True)
    assert secure.complete(max_tokens=1).status_code == 200
    secure.wait_descriptors(before)
    secure.wait_idle()


def test_bad_records_after_the_handshake(secure):
    """In the middle of a request and of an answer; what was computed is cancelled."""
    for request in (b"", GET[:-1], completion(secure, max_tokens=400, n=32, stream=True)):
        with HandMade(secure) as client:
            client.handshake()
            client.sendall(request or GET + b"\r\n")
            time.sleep(0.02)
            client.socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
            closes(client.socket)
    secure.wait_idle()
    assert secure.complete(max_tokens=1).status_code == 200


def test_handshakes_that_stall(start_server):
    server = start_server(tls=True, header_timeout=0.5)
    start = hello(server)
    for data in (b"", start[:1], start[:100], start):
        with server.connect_plain() as connection:
            connection.sendall(data)
            before = time.monotonic()
            closes(connection)
            assert time.monotonic() - before < 10
    # Nobody waits for them meanwhile.
    held = [server.connect_plain() for _ in range(50)]
    assert server.complete(max_tokens=1).status_code == 200
    for connection in held:
        connection.close()


def test_probes_behind_mute_connections(start_server):
    """Those beyond the limit have a moment for their handshake, not the whole header timeout."""
    server = start_server(tls=True, max_connections=1, header_timeout=3600)
    with server.connect():
        mute = [server.connect_plain() for _ in range(100)]
        assert server.get("/health").status_code == 200
        for connection in mute:
            connection.close()


# ---- Files ---------------------------------------------------------------------------------------


def test_kinds_of_keys(start_server, tmp_path):
    for key in ("rsa:2048", "ed25519"):
        certificate_path, key_path = make_certificate(tmp_path, key)
        server = start_server(tls_cert=certificate_path, tls_key=key_path, tls=False, wait="listening")
        trust = ssl.create_default_context(cafile=certificate_path)
        with trust.wrap_socket(server.connect(), server_hostname=server.host) as connection:
            connection.sendall(GET + b"\r\n")
            assert read_response(connection)[0] == 200


def test_files_that_do_not_fit(tmp_path):
    good, key = certificate()
    other = make_certificate(tmp_path)[1]
    locked, empty = tmp_path / "locked.pem", tmp_path / "empty.pem"
    empty.touch()
    subprocess.run(["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:x"],
                   check=True)
    table = [
        ({"tls-cert": good}, 2, "--tls-key"),
        ({"tls-key": key}, 2, "--tls-cert"),
        ({"tls-cert": "/nowhere", "tls-key": key}, 1, "--tls-cert /nowhere: No such file"),
        ({"tls-cert": good, "tls-key": "/nowhere"}, 1, "--tls-key /nowhere: No such file"),
        ({"tls-cert": tmp_path, "tls-key": key}, 1, f"--tls-cert {tmp_path}: "),
        ({"tls-cert": empty, "tls-key": key}, 1, f"--tls-cert {empty}: "),
        ({"tls-cert": key, "tls-key": key}, 1, f"--tls-cert {key}: "),
        ({"tls-cert": good, "tls-key": good}, 1, f"--tls-key {good}: "),
        ({"tls-cert": good, "tls-key": empty}, 1, f"--tls-key {empty}: "),
        ({"tls-cert": good, "tls-key": locked}, 1, f"--tls-key {locked}: "),
        ({"tls-cert": good, "tls-key": other}, 1, "is not the key of"),
    ]
    for flags, code, message in table:
        command = [BINARY, "serve", find_model(), "--port", "0"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == code and message in done.stderr, (flags, done.stderr)
        assert not re.search("listening", done.stderr)
