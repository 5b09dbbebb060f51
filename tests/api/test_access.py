"""Keys and origins."""

import httpx
import pytest

from conftest import Server


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# for the tests\nalpha-key\n\n  \nbeta-key\r\n")
    server = Server(api_key_file=keys, environment={"FATHOM_API_KEY": "gamma-key"},
                    cors_origin="https://app.example")
    yield server
    assert server.stop() == 0


def with_key(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["alpha-key", "beta-key", "gamma-key"])
def test_keys_open(locked, key):
    assert locked.get("/v1/models", headers=with_key(key)).status_code == 200


@pytest.mark.parametrize("header", [{}, with_key("alpha-ke"), with_key("alpha-key2"),
                                    with_key("ALPHA-KEY"), with_key("# for the tests"),
                                    with_key("x" * 5000), {"Authorization": "Basic alpha-key"},
                                    {"Authorization": "alpha-key"}])
def test_keys_closed(locked, header):
    for path in ("/v1/models", "/metrics", "/version"):
        answer = locked.get(path, headers=header)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.post(json={}, headers=header).status_code == 401


def test_probes_are_open(locked):
    assert locked.get("/health").status_code == 200
    assert locked.get("/ready").status_code == 200


def test_origin(locked, server):
    mine = {"Origin": "https://app.example"}
    allowed = locked.get("/health", headers=mine)
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["vary"] == "Origin"
    other = locked.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.get("/health", headers=mine).headers
    # A browser asks first, without the key, and must be able to read errors.
    preflight = httpx.options(
        locked.url + "/v1/completions", headers={**mine, "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    refused = locked.post(json={}, headers=mine)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
