"""Strict mode: what hosted APIs refuse is refused, in each dialect's own form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server.server import Server

REQUESTS = Path(__file__).parents[1] / "http" / "requests"
EDGES = json.loads((REQUESTS / "13_edge_cases.json").read_text())["cases"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Server]) -> Server:
    return make_server(KVPIN_HTTP_STRICT="true", KVPIN_HTTP_TTL_MAX="30m", KVPIN_HTTP_LABEL="strict")


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case["why"])
def test_anthropics_edge_cases(server: Server, case: dict[str, Any]) -> None:
    response = server.post("/v1/messages", {**case["body"], "model": "tiny"})
    assert response.status_code == case["status"]
    if case["status"] == 400:
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["error"]["message"]


def test_openais_form(server: Server) -> None:
    response = server.chat([{"role": "user", "content": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "cache_control", 400)
    assert "1800 s" in error["message"]


def test_what_is_right_is_protected_under_the_servers_label(server: Server) -> None:
    response = server.chat([{"role": "user", "content": TEXT, "cache_control": {"type": "ephemeral"}}])
    assert response.headers["x-kvpin-status"] == "ok", response.headers
    assert {prefix["label"] for prefix in server.prefixes().values()} == {"strict"}
