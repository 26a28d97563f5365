"""The operator's routes against a real master, with an engine that only renders."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kvpin.client import Client
from kvpin.http.middleware import CacheControlMiddleware
from kvpin.http.routes import routes
from kvpin.http.service import Service
from kvpin.http.settings import HttpConfig
from kvpin.keys import prefix_ids
from kvpin.protocol import Mark, PutEnd, PutItem, PutStart, PutStarted
from tests.http.fake_engine import TOKENIZER, FakeEngine
from tests.http.support import KEY, MARK, SYSTEM, ScriptedClient, gone
from tests.support.master import MasterProcess

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is parcel twelve? " * 8}]
BLOCK_BYTES = 4096


class Deployment:
    """The routes in an application, and a client of the master behind them."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.engine = FakeEngine()
        self.service: Service | None = Service(HttpConfig(ttl_max_ms=3_600_000), self.engine, client, KEY)
        app = Starlette(routes=routes(self))
        app.add_middleware(CacheControlMiddleware, holder=self)
        self.http = TestClient(app)

    def tokens(self, messages: list[dict[str, Any]] = MESSAGES) -> list[int]:
        text = self.engine.template.render(messages=messages, tools=None, add_generation_prompt=True, tool_calls=None)
        return TOKENIZER.encode(text).ids

    def protect(self, ends: list[int], messages: list[dict[str, Any]] = MESSAGES, label: str = "") -> list[str]:
        """What the engine's adapter does for a request with breakpoints at these tokens; the prefix ids."""
        ids = prefix_ids("m/", self.tokens(messages), ends)
        chain = range(16, ends[-1] + 1, 16)
        keys = prefix_ids("block", self.tokens(messages), chain)
        items = [PutItem(b"kv\0" + key, BLOCK_BYTES, end) for key, end in zip(keys, chain, strict=True)]
        marks = [Mark(prefix_id, end, 600_000, label) for prefix_id, end in zip(ids, ends, strict=True)]
        reply = self.client.call(PutStart(items, marks, "kv"))
        assert isinstance(reply, PutStarted)
        self.client.call(PutEnd([item.key for item in items]))
        return [prefix_id.hex() for prefix_id in ids]

    def evict(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/cache/evict", json=body)

    def live(self) -> set[str]:
        return {prefix["id"] for prefix in self.http.get("/v1/cache/prefixes").json()["prefixes"]}


@pytest.fixture
def deployment(master: MasterProcess) -> Iterator[Deployment]:
    with Client(master.address, name="http-test", writer=False) as client:
        assert client.wait_ready(10_000)
        yield Deployment(client)


def error(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def test_unmarked_messages_mean_every_prefix_that_they_begin_with(deployment: Deployment) -> None:
    ours = deployment.protect([16, 48])
    other = deployment.protect([32], [{"role": "user", "content": "Something else entirely, and long. " * 5}])
    answer = deployment.evict(messages=MESSAGES).json()
    assert sorted(answer["ids"]) == sorted(ours)
    assert (answer["prefixes"], answer["memory_blocks"], answer["memory_bytes"]) == (2, 3, 3 * BLOCK_BYTES)
    assert deployment.live() == set(other)


def test_a_shorter_conversation_leaves_longer_prefixes_alone(deployment: Deployment) -> None:
    end = len(deployment.tokens()) // 16 * 16
    short, long = deployment.protect([16, end])
    assert deployment.evict(messages=MESSAGES[:1]).json()["ids"] == [short]
    assert deployment.live() == {long}


def test_marked_messages_mean_exactly_their_prefixes(deployment: Deployment) -> None:
    marked = [{**MESSAGES[0], "cache_control": MARK}, MESSAGES[1]]
    (wanted,) = deployment.evict(messages=marked, dry_run=True).json()["ids"]
    end = next(end for end in range(16, 400, 16) if prefix_ids("m/", deployment.tokens(), [end])[0].hex() == wanted)
    deployment.protect([16, end])
    assert deployment.evict(messages=marked).json()["ids"] == [wanted]
    assert len(deployment.live()) == 1


def test_token_ids_an_id_and_a_label(deployment: Deployment) -> None:
    first, second = deployment.protect([16, 48], label="team-a")
    assert deployment.evict(token_ids=deployment.tokens()[:20]).json()["ids"] == [first]
    assert deployment.evict(prefixes=[second], dry_run=True).json()["prefixes"] == 1
    assert deployment.evict(label="nobody").json()["ids"] == []
    assert deployment.evict(label="team-a").json()["ids"] == [second]
    assert deployment.live() == set()


def test_the_anthropic_dialect_is_understood(deployment: Deployment) -> None:
    ids = deployment.protect([16, 48])
    answer = deployment.evict(system=SYSTEM, messages=MESSAGES[1:], dry_run=True).json()
    assert answer["ids"] == ids


def test_a_dry_run_changes_nothing_and_counts_the_same(deployment: Deployment) -> None:
    deployment.protect([16, 48])
    dry = deployment.evict(messages=MESSAGES, dry_run=True).json()
    assert len(deployment.live()) == 2
    wet = deployment.evict(messages=MESSAGES).json()
    assert {**dry, "dry_run": False} == wet


def test_mode_delete_removes_the_objects(deployment: Deployment) -> None:
    deployment.protect([48])
    assert deployment.client.stats()["objects"] == 3
    assert deployment.evict(messages=MESSAGES, mode="delete").json()["memory_blocks"] == 3
    assert deployment.client.stats()["objects"] == 0


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "exactly one of"),
        (b"[]", "JSON object"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({"messages": MESSAGES, "label": "a"}, "exactly one of"),
        ({"messages": []}, "at least one message"),
        ({"messages": "x"}, "at least one message"),
        ({"messages": [{"role": "user"}], "dialect": "latin"}, "openai, anthropic"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": "y"}]}, "must be"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": MARK}]}, "too_short"),
        ({"messages": [3]}, ""),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": "12"}, "token_ids"),
        ({"prefixes": []}, "prefixes"),
        ({"prefixes": ["xyz"]}, "32 hex digits"),
        ({"prefixes": [7]}, "32 hex digits"),
        ({"prefixes": "ab" * 16}, "prefixes"),
        ({"label": ""}, "label"),
        ({"label": 7}, "label"),
        ({"label": "x", "mode": "explode"}, "expire, delete, all_holders"),
        ({"label": "x", "mode": ["delete"]}, "expire, delete, all_holders"),
        ({"label": "x", "dry_run": "no"}, "dry_run"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_bad_input_gets_a_clear_400(body: Any, part: str) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = Deployment(ScriptedClient(gone)).http.post("/v1/cache/evict", **sent)
    assert response.status_code == 400
    assert part in error(response)


def test_prefixes_are_listed_page_by_page(deployment: Deployment) -> None:
    ids = sorted(
        deployment.protect([16, 32, 48], label="a") + deployment.protect([16], [{"role": "user", "content": "z" * 99}])
    )
    seen: list[str] = []
    after = ""
    while after is not None:
        page = deployment.http.get("/v1/cache/prefixes", params={"limit": 1, "after": after}).json()
        assert page["total"] == 4
        seen += [prefix["id"] for prefix in page["prefixes"]]
        after = page["next"]
    assert seen == ids
    labelled = deployment.http.get("/v1/cache/prefixes", params={"label": "a"}).json()["prefixes"]
    assert [prefix["covered_tokens"] for prefix in labelled] == [prefix["end_token"] for prefix in labelled]
    (one,) = deployment.http.get("/v1/cache/prefixes", params={"id": ids[0]}).json()["prefixes"]
    assert one["id"] == ids[0]
    assert 0 < one["remaining_ms"] <= 600_000


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "after=zz", "id=1"])
def test_a_bad_query_gets_a_400(query: str) -> None:
    assert Deployment(ScriptedClient(gone)).http.get(f"/v1/cache/prefixes?{query}").status_code == 400


def test_renew(deployment: Deployment) -> None:
    (prefix_id,) = deployment.protect([48])
    answer = deployment.http.post(f"/v1/cache/prefixes/{prefix_id}/renew", json={"ttl": "1h"}).json()
    assert answer["memory_blocks"] == 3
    (prefix,) = deployment.http.get("/v1/cache/prefixes").json()["prefixes"]
    assert prefix["remaining_ms"] > 3_500_000


def test_renewing_what_is_not_there_or_not_allowed(deployment: Deployment) -> None:
    def renew(prefix_id: str, ttl: Any) -> httpx.Response:
        return deployment.http.post(f"/v1/cache/prefixes/{prefix_id}/renew", json={"ttl": ttl})

    assert renew("00" * 16, "5m").status_code == 404
    assert renew("00", "5m").status_code == 400
    assert "at most 3600 s" in error(renew("00" * 16, "2h"))
    assert renew("00" * 16, "soon").status_code == 400


def test_status(deployment: Deployment, master: MasterProcess) -> None:
    shown = deployment.http.get("/v1/cache/status").json()
    assert shown["connected"] is True
    assert shown["epoch"] == deployment.client.epoch
    assert shown["config"] == {"strict": False, "ttl_max_ms": 3_600_000, "report_wait_ms": 50, "label": ""}
    assert shown["master"]["objects"] == 0
    master.kill()
    shown = deployment.http.get("/v1/cache/status").json()
    assert shown["master"] is None
    assert shown["error"]


def test_without_a_master_routes_say_what_to_do() -> None:
    response = Deployment(ScriptedClient(gone)).evict(label="x")
    assert response.status_code == 503
    assert "kvpin status" in error(response)


def test_without_a_connector_routes_say_what_to_do() -> None:
    deployment = Deployment(ScriptedClient(gone))
    deployment.service = None
    response = deployment.evict(label="x")
    assert response.status_code == 503
    assert "connector" in error(response)
