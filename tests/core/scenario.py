"""Scenarios that read like stories: a world with a clock, named clients, and chains of blocks.

    world = World(pool=8, limit=4)
    alice = world.client("alice")
    alice.put(chain("sys", 3), mark("p", ttl=100))
    world.later(100)
    assert alice.found(chain("sys", 3)) == "+++"

Sizes are in pages, a block spans BLOCK tokens, times are in ms. The invariants are checked after every step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpin.limits import PAGE_BYTES
from kvpin.master.core.config import CoreConfig
from kvpin.master.core.state import State
from kvpin.protocol import (
    Ended,
    EndStatus,
    Exists,
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    Failure,
    Found,
    GetReplicas,
    Grant,
    ListPrefixes,
    Mark,
    MarkReport,
    Prefixes,
    PrefixInfo,
    Protect,
    Protected,
    PutEnd,
    PutItem,
    PutRevoke,
    PutStart,
    PutStarted,
    PutStatus,
    Remove,
    Replicas,
    ReplyBody,
    Report,
    Reported,
    RequestBody,
)

BLOCK = 16
PAGE = PAGE_BYTES


@dataclass(frozen=True)
class Block:
    key: bytes
    end: int
    pages: int = 1


Chain = Sequence[Block]


def chain(name: str, count: int, pages: int = 1, after: Chain = ()) -> list[Block]:
    """`after`, and then `count` blocks of its own: chains made of the same start share it."""
    start = len(after)
    own = [Block(f"{name}{n}".encode(), (start + n + 1) * BLOCK, pages) for n in range(count)]
    return [*after, *own]


def pid(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]


def mark(name: str, ttl: int = 1000, blocks: int = 100, label: str = "") -> Mark:
    """A mark over the first `blocks` blocks of a chain."""
    return Mark(pid(name), blocks * BLOCK, ttl, label)


def letters(statuses: Sequence[PutStatus] | Sequence[Grant] | Sequence[EndStatus]) -> str:
    """Outcomes as words, one per distinct run: 'OPENED*2 GAP'."""
    words: list[str] = []
    for status in statuses:
        name, _, times = words[-1].partition("*") if words else ("", "", "")
        if name == status.name:
            words[-1] = f"{name}*{int(times or 1) + 1}"
        else:
            words.append(status.name)
    return " ".join(words)


class World:
    def __init__(self, pool: int = 16, limit: int | None = None, **config: Any) -> None:
        limit = pool // 2 if limit is None else limit
        sizes = {"pool_bytes": pool * PAGE, "guaranteed_limit_bytes": limit * PAGE}
        # A full pool is no reason for background eviction here, unless a test says so.
        settings = sizes | {"high_watermark": 1.0, "low_watermark": 0.9} | config
        self.state = State(CoreConfig(**settings))
        self.now = 1000
        self.check()

    def client(self, name: str = "alice", tenant: str = "") -> "Client":
        self.state.client_joined(self.now, name.encode(), tenant, name)
        return Client(self, name)

    def later(self, ms: int) -> int | None:
        """Time passes and the master wakes; when it wants to wake again."""
        self.now += ms
        due = self.state.tick(self.now)
        self.check()
        return due

    def check(self) -> None:
        violations = self.state.check_invariants(self.now)
        assert not violations, violations

    def stat(self, name: str) -> int:
        return self.state.stats(self.now)[name]

    @property
    def guaranteed(self) -> int:
        """Pages in open windows or reserved for them."""
        return self.stat("guaranteed_bytes") // PAGE

    @property
    def free(self) -> int:
        return self.stat("free_bytes") // PAGE


class Client:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._requests = 0

    def send(self, body: RequestBody, *, request_id: int = 0, released: Sequence[int] = ()) -> ReplyBody:
        self._requests += 1
        world = self.world
        reply = world.state.handle(world.now, self.name.encode(), request_id or self._requests, body, released)
        world.check()
        return reply

    def refused(self, body: RequestBody) -> str:
        """Send what must be refused; the text of the refusal."""
        reply = self.send(body)
        assert isinstance(reply, Failure), reply
        return f"{reply.code.name}: {reply.message}"

    def leaves(self, *, writer_dead: bool = False) -> None:
        self.world.state.client_left(self.world.now, self.name.encode(), writer_dead)
        self.world.check()

    def start(self, blocks: Chain, *marks: Mark, soft: bool = False, **options: Any) -> PutStarted:
        items = [PutItem(block.key, block.pages * PAGE, block.end, soft) for block in blocks]
        reply = self.send(PutStart(items, list(marks), **options))
        assert isinstance(reply, PutStarted), reply
        return reply

    def end(self, blocks: Chain) -> str:
        reply = self.send(PutEnd([block.key for block in blocks]))
        assert isinstance(reply, Ended), reply
        return letters(reply.statuses)

    def revoke(self, blocks: Chain) -> str:
        reply = self.send(PutRevoke([block.key for block in blocks]))
        assert isinstance(reply, Ended), reply
        return letters(reply.statuses)

    def put(self, blocks: Chain, *marks: Mark, **options: Any) -> str:
        """Start, and end what is to be written; the statuses, and the grants if there were marks."""
        started = self.start(blocks, *marks, **options)
        written = [block for block, status in zip(blocks, started.statuses, strict=True) if status is PutStatus.WRITE]
        if written:
            assert set(self.end(written).split("*")[0].split()) == {"OK"}
        return letters(started.statuses) + (f" | {letters(started.grants)}" if marks else "")

    def get(self, blocks: Chain, *marks: Mark, lease: int = 10, report: bytes = b"") -> Replicas:
        ends = [block.end for block in blocks] if marks else []
        reply = self.send(GetReplicas([block.key for block in blocks], lease, list(marks), ends, report))
        assert isinstance(reply, Replicas), reply
        return reply

    def found(self, blocks: Chain) -> str:
        """One character a block: + is there, - isn't."""
        reply = self.send(Exists([block.key for block in blocks]))
        assert isinstance(reply, Found), reply
        return "".join("-+"[there] for there in reply.found)

    def protect(self, blocks: Chain, *marks: Mark, report: bytes = b"") -> str:
        keys, ends = [block.key for block in blocks], [block.end for block in blocks]
        reply = self.send(Protect(keys, ends, list(marks), report))
        assert isinstance(reply, Protected), reply
        return letters(reply.grants)

    def expire(self, *names: str, mode: ExpireMode = ExpireMode.EXPIRE, dry_run: bool = False) -> tuple[int, int, int]:
        """(prefixes, blocks, kept blocks)"""
        reply = self.send(ExpireGuaranteed([pid(name) for name in names], mode, dry_run))
        assert isinstance(reply, Expired), reply
        assert reply.memory_bytes == reply.memory_blocks * PAGE
        return reply.prefixes, reply.memory_blocks, reply.kept_blocks

    def remove(self, blocks: Chain, *, force: bool = False) -> str:
        reply = self.send(Remove([block.key for block in blocks], force))
        assert isinstance(reply, Ended), reply
        return letters(reply.statuses)

    def prefixes(self, **query: Any) -> list[PrefixInfo]:
        reply = self.send(ListPrefixes(**query))
        assert isinstance(reply, Prefixes), reply
        return reply.prefixes

    def prefix(self, name: str) -> PrefixInfo:
        (info,) = self.prefixes(prefix_ids=[pid(name)])
        return info

    def report(self, token: bytes) -> list[MarkReport]:
        reply = self.send(Report(token))
        assert isinstance(reply, Reported), reply
        assert reply.known
        return reply.marks
