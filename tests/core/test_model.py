"""Random commands and time against the naive model, with all invariants after every step."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpin.protocol import (
    BatchEvict,
    Clear,
    Ended,
    Exists,
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    Found,
    GetReplicas,
    ListPrefixes,
    Mark,
    Ping,
    Prefixes,
    Protect,
    Protected,
    PutEnd,
    PutItem,
    PutRevoke,
    PutStart,
    PutStarted,
    Release,
    Remove,
    Renew,
    Replicas,
    ReplyBody,
    RequestBody,
)

from .model import Model
from .scenario import BLOCK, PAGE, Block, Chain, World, chain, pid

TRUNK = chain("t", 2)
CHAINS = [chain("a", 3, after=TRUNK), chain("b", 2, pages=2, after=TRUNK), [Block(b"x%d" % n, 0, n) for n in (1, 2, 3)]]
ALL = list({block.key: block for blocks in CHAINS for block in blocks}.values())
NAMES = ["p", "q", "r"]
POOL, LIMIT, PUT_TIMEOUT, QUARANTINE = 10, 5, 60, 90

clients = st.sampled_from(["alice", "bob"])
ttls = st.sampled_from([5, 40, 200])
parts = st.sampled_from(CHAINS).flatmap(
    lambda blocks: st.lists(st.sampled_from(blocks), min_size=1, unique=True) | st.just(blocks)
)
some = st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True)
marks = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(1, 5), ttls), max_size=2).map(
    lambda chosen: [Mark(pid(name), blocks * BLOCK, ttl) for name, (blocks, ttl) in chosen.items()]
)


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World(
            POOL, LIMIT, put_timeout_ms=PUT_TIMEOUT, quarantine_ms=QUARANTINE, high_watermark=0.9, low_watermark=0.6
        )
        self.model = Model(POOL, LIMIT, PUT_TIMEOUT, QUARANTINE)
        self.clients = {name: self.world.client(name) for name in ("alice", "bob")}
        self.last: tuple[str, int, RequestBody, ReplyBody] | None = None
        self.requests = 0

    def send(self, name: str, body: RequestBody, released: list[int] | None = None) -> Any:
        self.requests += 1
        self.model.advance(self.world.now)
        for lease_id in released or []:
            if lease_id in self.model.leases and self.model.leases[lease_id].owner == name:
                del self.model.leases[lease_id]
        self.model.settle()
        reply = self.clients[name].send(body, request_id=self.requests, released=released or [])
        self.last = (name, self.requests, body, reply)
        return reply

    def visible(self) -> set[bytes]:
        found = self.clients["alice"].send(Exists([block.key for block in ALL]), request_id=10**9)
        assert isinstance(found, Found)
        return {block.key for block, there in zip(ALL, found.found, strict=True) if there}

    @rule(name=clients, blocks=parts, marks=marks, soft=st.booleans(), replace=st.booleans(), force=st.booleans())
    def put_start(self, name: str, blocks: Chain, marks: list[Mark], soft: bool, replace: bool, force: bool) -> None:
        blocks = blocks[:1] if replace else blocks
        items = [PutItem(block.key, block.pages * PAGE, block.end, soft) for block in blocks]
        reply = self.send(name, PutStart(items, marks, replace=replace, force=force))
        assert isinstance(reply, PutStarted)
        self.model.put_start(name, blocks, marks, soft, replace, force, reply, self.visible())

    @rule(name=clients, blocks=parts, marks=marks)
    def put(self, name: str, blocks: Chain, marks: list[Mark]) -> None:
        self.put_start(name, blocks, marks, False, False, False)
        self.agrees_with_the_model()
        self.put_end(name, blocks)

    @rule(name=clients, blocks=parts)
    def put_end(self, name: str, blocks: Chain) -> None:
        reply = self.send(name, PutEnd([block.key for block in blocks]))
        assert reply == Ended(self.model.put_end(name, blocks))

    @rule(name=clients, blocks=some)
    def put_revoke(self, name: str, blocks: Chain) -> None:
        reply = self.send(name, PutRevoke([block.key for block in blocks]))
        assert reply == Ended(self.model.put_revoke(name, blocks))

    @rule(name=clients, blocks=parts, marks=marks, lease=st.sampled_from([1, 30, 100]))
    def get(self, name: str, blocks: Chain, marks: list[Mark], lease: int) -> None:
        ends = [block.end for block in blocks]
        reply = self.send(name, GetReplicas([block.key for block in blocks], lease, marks, ends))
        assert isinstance(reply, Replicas)
        self.model.get(name, blocks, marks, lease, reply)

    @rule(name=clients, released=st.lists(st.integers(1, 12), max_size=4), piggyback=st.booleans())
    def release(self, name: str, released: list[int], piggyback: bool) -> None:
        if piggyback:
            self.send(name, Ping(), released)
        else:
            self.send(name, Release(released))
            for lease_id in set(released):
                if lease_id in self.model.leases and self.model.leases[lease_id].owner == name:
                    del self.model.leases[lease_id]

    @rule(name=clients, blocks=parts, marks=marks)
    def protect(self, name: str, blocks: Chain, marks: list[Mark]) -> None:
        reply = self.send(name, Protect([block.key for block in blocks], [block.end for block in blocks], marks))
        grants = {}
        for block in sorted(blocks, key=lambda block: block.end):
            grants[block] = self.model.protect(marks, block, self.model.objects.get(block.key))
        assert reply == Protected([grants[block] for block in blocks])

    @rule(
        name=clients,
        prefixes=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        mode=st.sampled_from(ExpireMode),
        dry_run=st.booleans(),
    )
    def expire(self, name: str, prefixes: list[str], mode: ExpireMode, dry_run: bool) -> None:
        ids = [pid(prefix) for prefix in prefixes]
        reply = self.send(name, ExpireGuaranteed(ids, mode, dry_run))
        assert reply == self.model.expire(ids, mode, dry_run)

    @rule(name=clients, prefix=st.sampled_from(NAMES), ttl=ttls)
    def renew(self, name: str, prefix: str, ttl: int) -> None:
        assert self.send(name, Renew(pid(prefix), ttl)) == self.model.renew(pid(prefix), ttl)

    @rule(name=clients, blocks=some, force=st.booleans())
    def remove(self, name: str, blocks: Chain, force: bool) -> None:
        reply = self.send(name, Remove([block.key for block in blocks], force))
        assert reply == Ended(self.model.remove(blocks, force))

    @rule(name=clients, start=st.sampled_from([b"t", b"a", b"x1"]), force=st.booleans())
    def clear(self, name: str, start: bytes, force: bool) -> None:
        assert self.send(name, Clear(start, force)) == self.model.clear(start, force)

    @rule(name=clients, pages=st.integers(1, POOL))
    def evict(self, name: str, pages: int) -> None:
        self.model.advance(self.world.now)
        evictable = sum(item.block.pages for item in self.model.objects.values() if self.model.evictable(item))
        reply = self.send(name, BatchEvict(pages * PAGE))
        assert isinstance(reply, Expired)
        assert (reply.memory_blocks > 0) == (evictable >= pages)
        assert not reply.memory_blocks or reply.memory_bytes >= pages * PAGE

    @rule(ms=st.sampled_from([1, 4, 5, 30, 59, 60, 90, 200]), wakes=st.booleans())
    def later(self, ms: int, wakes: bool) -> None:
        if wakes:
            self.world.later(ms)
        else:
            self.world.now += ms  # the master is busy: the next command must see to what is due
            self.world.state.stats(self.world.now)
        self.model.advance(self.world.now)

    @rule()
    def repeat(self) -> None:
        if self.last is not None:
            name, request_id, body, reply = self.last
            again = self.clients[name].send(body, request_id=request_id)
            assert again == reply or isinstance(body, Ping)
            self.model.advance(self.world.now)

    @rule(name=clients, dead=st.booleans())
    def leave(self, name: str, dead: bool) -> None:
        self.clients[name].leaves(writer_dead=dead)
        self.model.advance(self.world.now)
        self.model.leave(name, dead)
        self.world.client(name)
        self.last = None

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        model, stats = self.model, self.world.state.stats(self.world.now)
        model.settle()
        visible = self.visible()
        model.observe_eviction(visible)
        assert visible == model.objects.keys()
        assert stats["writes"] == len(model.writes)
        assert stats["leases"] == len(model.leases)
        assert stats["guaranteed_bytes"] == model.guaranteed() * PAGE
        assert stats["lingering_bytes"] == sum(item.block.pages for item in model.lingering) * PAGE
        assert stats["quarantined_bytes"] == sum(item.block.pages for _, _, item in model.quarantine) * PAGE
        ranges = model.ranges()
        assert stats["free_bytes"] == POOL * PAGE - sum(size for _, size in ranges)
        assert all(left + size <= right for (left, size), (right, _) in pairwise(ranges))

    @invariant()
    def lists_the_prefixes_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        reply = self.clients["alice"].send(ListPrefixes(), request_id=10**9)
        assert isinstance(reply, Prefixes)
        told = {
            info.prefix_id: (info.blocks, info.bytes, info.remaining_ms, info.covered_tokens) for info in reply.prefixes
        }
        expected = {}
        for prefix in map(pid, NAMES):
            if self.model.live(prefix):
                held = self.model.blocks_of(prefix)
                gap = min(self.model.gaps.get(prefix, {}).values(), default=1 << 62)
                expected[prefix] = (
                    len(held),
                    sum(item.block.pages for item in held) * PAGE,
                    max((item.windows[prefix] for item in held), default=self.model.now) - self.model.now,
                    max((item.block.end for item in held if item.block.end < gap), default=0),
                )
        assert told == expected

    def teardown(self) -> None:
        """When all that runs has run out, nothing is left but ordinary objects."""
        if not hasattr(self, "world"):
            return
        for _ in range(10):
            due = self.world.later(1000)
        assert due is None
        for name in ("guaranteed_bytes", "lingering_bytes", "quarantined_bytes", "leases", "prefixes", "writes"):
            assert self.world.stat(name) == 0


TestModel = Machine.TestCase
TestModel.settings = settings(stateful_step_count=50, phases=[phase for phase in Phase if phase is not Phase.explain])
TestModel.pytestmark = [pytest.mark.timeout(600)]  # it may take a while to shrink what it finds
