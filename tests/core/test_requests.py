"""Bad input changes nothing, a repeat has no second effect, time doesn't run backwards; reports, stories, stats."""

import gc
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpin import limits
from kvpin.master.core import reports, stories
from kvpin.master.core.counters import COUNTERS, GAUGES
from kvpin.protocol import (
    BatchEvict,
    Body,
    Check,
    Checked,
    Clear,
    Ended,
    EndStatus,
    Exists,
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    GetReplicas,
    Grant,
    Hello,
    ListPrefixes,
    Mark,
    MarkReport,
    Protect,
    PutEnd,
    PutItem,
    PutRevoke,
    PutStart,
    Release,
    Remove,
    Renew,
    Report,
    Reported,
    RequestBody,
    Stats,
    StatsReply,
    Stories,
    Story,
)

from .scenario import BLOCK, PAGE, Client, World, chain, mark, pid

DOC = chain("doc", 4)
KEYS = [b"k"]
MARK = Mark(b"p" * 16, 16, 1000)
TOO_MANY = [b"%d" % n for n in range(limits.BATCH_KEYS_MAX + 1)]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (PutStart([PutItem(b"", 1)]), "a key has 0 bytes: give 1 to 256"),
        (PutStart([PutItem(b"x" * 257, 1)]), "a key has 257 bytes"),
        (PutStart([PutItem(b"x", 1), PutItem(b"x", 1)]), "send each key of a batch once"),
        (PutStart([PutItem(b"x", 0)]), "give 1 to"),
        (PutStart([PutItem(b"x", -1)]), "give 1 to"),
        (PutStart([PutItem(b"x", 17 * PAGE)]), f"give 1 to {16 * PAGE}"),
        (PutStart([PutItem(b"x", 1, -1)]), "end_tokens from -1"),
        (PutStart([PutItem(b"x", 1, 1 << 63)]), "end_tokens from"),
        (PutStart([PutItem(key, 1) for key in TOO_MANY]), "send at most 8192"),
        (PutStart([PutItem(b"x", 1)], cache="c" * 101), "cache id"),
        (PutStart([PutItem(b"x", 1)], [MARK], report=b"r" * 33), "report token"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"short", 16, 1000)]), "a prefix id has 5 bytes: give 16"),
        (PutStart([PutItem(b"x", 1)], [MARK, MARK]), "a prefix id is there twice"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"p" * 16, 16, 0)]), "ttl_ms = 0"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"p" * 16, 16, 86_400_001)]), "ttl_ms = 86400001: give 1 to 86400000"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"p" * 16, -16, 1000)]), "end_tokens from -16"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"p" * 16, 16, 1000, "l" * 201)]), "shorten it"),
        (PutStart([PutItem(b"x", 1)], [Mark(b"%016d" % n, 16, 1000) for n in range(9)]), "send at most 8"),
        (PutEnd([b""]), "a key has 0 bytes"),
        (PutRevoke(TOO_MANY), "send at most 8192"),
        (GetReplicas([b"k", b"k"], 10), "send each key of a batch once"),
        (GetReplicas(KEYS, 0), "lease_ms = 0"),
        (GetReplicas(KEYS, 10, [MARK]), "0 end_tokens for 1 keys"),
        (GetReplicas(KEYS, 10, [], [16, 32]), "2 end_tokens for 1 keys"),
        (GetReplicas(KEYS, 10, [Mark(b"", 16, 1000)], [16]), "a prefix id has 0 bytes"),
        (Exists(TOO_MANY), "send at most 8192"),
        (Release(list(range(8193))), "8193 lease ids"),
        (Protect(KEYS, [], [MARK]), "0 end_tokens for 1 keys"),
        (Protect(KEYS, [16], [Mark(b"p" * 16, 16, -5)]), "ttl_ms = -5"),
        (ExpireGuaranteed([b"short"]), "a prefix id has 5 bytes"),
        (ExpireGuaranteed([b"p" * 16] * 2), "a prefix id is there twice"),
        (Renew(b"p" * 16, 0), "ttl_ms = 0"),
        (Renew(b"", 10), "a prefix id has 0 bytes"),
        (Remove([b""]), "a key has 0 bytes"),
        (Clear(b"x" * 257), "key prefix of 257 bytes"),
        (BatchEvict(0), "bytes = 0: give 1 or more"),
        (ListPrefixes(limit=0), "limit = 0: give 1 to 1000"),
        (ListPrefixes(limit=1001), "limit = 1001"),
        (ListPrefixes(prefix_ids=[b"x"]), "a prefix id has 1 bytes"),
        (Report(b""), "an empty report token"),
        (Report(b"r" * 33), "report token of 33 bytes"),
        (Story(b""), "a key has 0 bytes"),
        (Hello(1, "again", 1), "Hello is no command"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_and_changes_nothing(body: RequestBody, text: str) -> None:
    world = World()
    alice = world.client()
    alice.put(DOC, mark("p"))
    before = world.state.stats(world.now) | {"requests_refused": 1}
    assert alice.refused(body).startswith("BAD_REQUEST: ")
    assert text in alice.refused(body)
    assert world.state.stats(world.now) == before | {"requests_refused": 2}


class TestRepeats:
    def test_the_same_request_id_has_one_effect(self) -> None:
        world = World()
        alice = world.client()
        body = PutStart([PutItem(b"x", PAGE)])
        first = alice.send(body, request_id=7)
        assert alice.send(body, request_id=7) == first
        assert world.stat("puts_started") == 1
        assert alice.send(PutEnd([b"x"]), request_id=8) == Ended([EndStatus.OK])
        assert alice.send(PutEnd([b"x"]), request_id=8) == Ended([EndStatus.OK])
        assert world.stat("requests_repeated") == 2

    def test_a_repeated_get_grants_one_lease(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC)
        body = GetReplicas([DOC[0].key], 100)
        assert alice.send(body, request_id=99) == alice.send(body, request_id=99)
        assert world.stat("leases") == 1

    def test_another_clients_id_is_another_request(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(DOC[:1])
        assert bob.end(DOC[:1]) == "NOT_OWNER"
        assert alice.end(DOC[:1]) == "OK"

    def test_a_bounded_number_of_answers_is_kept(self) -> None:
        world = World()
        alice = world.client()
        for _ in range(limits.REPLIES_KEPT_PER_CLIENT + 10):
            alice.get(DOC)
        assert len(world.state.tables.sessions[b"alice"].replies) == limits.REPLIES_KEPT_PER_CLIENT


def test_time_never_runs_backwards() -> None:
    world = World()
    alice = world.client()
    alice.put(DOC, mark("p", ttl=100))
    world.later(60)
    world.now -= 50
    assert alice.prefix("p").remaining_ms == 40
    assert world.state.tick(0) == world.now + 50 + 40
    world.now += 90
    alice.found(DOC)
    assert world.guaranteed == 0


def test_expiry_asks_for_the_next_wake_up() -> None:
    world = World(put_timeout_ms=500, quarantine_ms=900)
    alice = world.client()
    alice.start(chain("x", 1))
    assert world.later(0) == world.now + 500
    alice.put(DOC, mark("p", ttl=300))
    assert world.later(0) == world.now + 300
    alice.get(DOC, lease=20)
    assert world.later(0) == world.now + 20
    assert world.later(20) == world.now + 280
    assert world.later(280) == world.now + 200
    assert world.later(200) == world.now + 900
    assert world.later(900) is None


class TestRemoval:
    def test_remove_tells_what_it_did(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC[:1], mark("p"))
        alice.put(DOC[1:3])
        alice.get(DOC[2:3])
        assert alice.remove(DOC) == "GUARANTEED OK LEASED NOT_FOUND"
        assert alice.remove(DOC, force=True) == "OK NOT_FOUND OK NOT_FOUND"
        assert world.stat("windows_forced") == 1

    def test_clear_spares_open_windows_unless_forced(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC, mark("p", blocks=2))
        alice.put(chain("x", 1))
        assert alice.send(Clear(b"doc")) == Expired(0, 2, 2 * PAGE, kept_blocks=2)
        assert alice.found(DOC + chain("x", 1)) == "++--+"
        assert alice.send(Clear(b"doc", force=True)) == Expired(0, 2, 2 * PAGE)
        assert alice.send(Clear(b"")) == Expired(0, 1, PAGE)
        assert world.free == 16

    def test_what_was_begun_before_a_clear_does_not_appear_after_it(self) -> None:
        world = World()
        alice = world.client()
        alice.start(DOC[:1])
        alice.start(DOC[1:2], mark("p"))
        alice.send(Clear(b"doc"))
        alice.send(Clear(b"doc"))
        assert world.stat("puts_cancelled") == 1
        assert alice.end(DOC[:2]) == "NOT_FOUND OK"
        assert alice.found(DOC[:2]) == "-+"


class TestReports:
    def achieved(self, client: Client) -> list[tuple[int, int, int, Grant]]:
        return [
            (mark.covered_tokens // BLOCK, mark.opened_tokens // BLOCK, mark.renewed_tokens // BLOCK, mark.refusal)
            for mark in client.report(b"r")
        ]

    def test_an_unknown_token_is_not_known(self) -> None:
        assert World().client().send(Report(b"r")) == Reported(False, [])

    def test_chunks_add_up(self) -> None:
        alice = World().client()
        alice.put(DOC[:2], mark("p", blocks=4), report=b"r")
        assert self.achieved(alice) == [(2, 2, 0, Grant.NONE)]
        alice.put(DOC[2:], mark("p", blocks=4), report=b"r")
        assert alice.report(b"r") == [MarkReport(pid("p"), 64, 64, 64, 0, Grant.NONE)]

    def test_renewed_by_a_lookup_and_again_by_a_put_counts_once(self) -> None:
        alice = World().client()
        alice.put(DOC[:2], mark("p"))
        alice.get(DOC, mark("p"), report=b"r")
        assert self.achieved(alice) == [(2, 0, 2, Grant.NONE)]
        alice.put(DOC, mark("p"), report=b"r")
        assert self.achieved(alice) == [(4, 2, 2, Grant.NONE)]

    def test_opened_stays_opened_when_a_later_chunk_renews_it(self) -> None:
        alice = World().client()
        alice.put(DOC[:2], mark("p"), report=b"r")
        alice.put(DOC, mark("p"), report=b"r")
        alice.get(DOC, mark("p"), report=b"r")
        assert self.achieved(alice) == [(4, 4, 0, Grant.NONE)]
        alice.expire("p")
        alice.get(DOC, mark("p"), report=b"r")  # renews nothing: says nothing
        assert self.achieved(alice) == [(4, 4, 0, Grant.NONE)]

    def test_it_says_why_a_mark_was_not_reached(self) -> None:
        alice = World(limit=2).client()
        alice.put(DOC, mark("p"), report=b"r")
        assert self.achieved(alice) == [(2, 2, 0, Grant.CAPACITY_EXCEEDED)]
        alice.put(DOC[:1], mark("q"), report=b"s")
        assert alice.report(b"s")[0].renewed_tokens == BLOCK

    def test_a_gap_is_told(self) -> None:
        alice = World().client()
        alice.put(DOC[:1])
        alice.protect(DOC, mark("p"), report=b"r")
        assert self.achieved(alice) == [(1, 1, 0, Grant.GAP)]

    def test_marks_have_their_own_lines_in_order_of_depth(self) -> None:
        alice = World().client()
        alice.put(DOC, mark("deep", blocks=4), mark("flat", blocks=1), report=b"r")
        assert [(mark.prefix_id, mark.covered_tokens) for mark in alice.report(b"r")] == [
            (pid("flat"), BLOCK),
            (pid("deep"), 4 * BLOCK),
        ]

    def test_a_block_of_several_groups_is_granted_with_the_last_of_them(self) -> None:
        alice = World(limit=3).client()
        groups = [block for pair in zip(chain("k", 2), chain("v", 2), strict=True) for block in pair]
        alice.put(groups, mark("p"), report=b"r")
        assert self.achieved(alice) == [(1, 1, 0, Grant.CAPACITY_EXCEEDED)]

    def test_the_oldest_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "REPORTS_MAX", 2)
        alice = World().client()
        for token in (b"a", b"b", b"c"):
            alice.put(DOC, mark("p"), report=token)
        assert alice.send(Report(b"a")) == Reported(False, [])
        assert alice.report(b"c")

    def test_long_ones_push_out_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "REPORT_ENDS_MAX", 4)
        alice = World().client()
        alice.put(DOC[:1], mark("p"), report=b"a")
        alice.put(DOC, mark("p"), report=b"b")
        assert alice.send(Report(b"a")) == Reported(False, [])
        assert alice.report(b"b")

    def test_one_token_used_for_ever_takes_no_more_than_a_request_can(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "REPORT_ENDS_MAX", 4)
        monkeypatch.setattr(reports, "MARKS_MAX", 2)
        alice = World().client()
        for name in ("p", "q", "s"):
            alice.put(DOC[:1], mark(name), report=b"r")
        assert {found.prefix_id for found in alice.report(b"r")} == {pid("p"), pid("q")}
        alice.put(chain("long", 5), mark("p"), report=b"r")
        assert alice.send(Report(b"r")) == Reported(False, [])


class TestStories:
    def events(self, client: Client, key: bytes) -> list[tuple[int, str]]:
        reply = client.send(Story(key))
        assert isinstance(reply, Stories)
        return [(line.age_ms, line.event) for line in reply.lines]

    def test_a_life_oldest_first(self) -> None:
        world = World(pool=2, limit=1)
        alice = world.client()
        alice.put(DOC[:1], mark("p", ttl=100))
        world.later(100)
        alice.put(chain("other", 2))
        name = pid("p").hex()
        assert self.events(alice, DOC[0].key) == [
            (100, f"marked by {name}: OPENED"),
            (100, "put_start by alice"),
            (100, "put_end by alice"),
            (0, f"window of {name} ended"),
            (0, "evicted"),
        ]
        assert self.events(alice, b"unknown") == []

    def test_loss_removal_and_expiry_are_told(self) -> None:
        world = World(put_timeout_ms=10)
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(DOC)
        world.later(10)
        alice.start(DOC)
        alice.revoke(DOC[:1])
        alice.leaves()
        bob.put(DOC, mark("p"))
        bob.expire("p")
        bob.remove(DOC)
        told = [event for _, event in self.events(bob, DOC[1].key)]
        assert [event for event in told if not event.startswith(("put_start", "put_end", "marked"))] == [
            "put timed out",
            "put void: alice left",
            "expire by bob",
            "removed by bob",
        ]
        assert "put_revoke by alice" in [event for _, event in self.events(bob, DOC[0].key)]

    def test_lines_and_keys_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stories, "STORY_KEYS_MAX", 100)
        world = World()
        alice = world.client()
        for _ in range(60):
            alice.put(DOC[:1])
            alice.remove(DOC[:1])
        assert len(self.events(alice, DOC[0].key)) == limits.STORY_LINES_MAX
        assert len(world.state.tables.stories) == 100


def test_every_declared_number_is_told_and_no_other() -> None:
    world = World()
    reply = world.client().send(Stats())
    assert isinstance(reply, StatsReply)
    assert reply.values.keys() == COUNTERS.keys() | GAUGES.keys()
    assert not COUNTERS.keys() & GAUGES.keys()
    assert reply.values == world.state.stats(world.now)


def test_check_answers_violations() -> None:
    world = World()
    alice = world.client()
    assert alice.send(Check()) == Checked([])
    world.state.tables.ledger.object_bytes += 1
    reply = world.state.handle(world.now, b"alice", 99, Check())
    assert reply == Checked(["I3: object_bytes is 1, but the objects make 0"])


def test_what_leaves_leaves_no_reference_cycles() -> None:
    world = World(pool=8, put_timeout_ms=50, quarantine_ms=50)
    alice, bob = world.client("alice"), world.client("bob")
    gc.collect()
    for _ in range(5):
        alice.put(DOC, mark("p", ttl=20), mark("q", ttl=30), report=b"r")
        alice.get(DOC, mark("r", ttl=20), lease=5)
        alice.start(chain("lost", 2), mark("p", ttl=10))
        bob.expire("q", mode=ExpireMode.DELETE)
        world.later(100)
        alice.put(chain("flood", 8))
        bob.leaves()
        bob = world.client("bob")
        world.later(100)
    assert gc.collect() == 0


# --- fuzz ------------------------------------------------------------------------------------------------------------

_bytes = st.one_of(st.sampled_from([b"", b"a", b"b", b"p" * 16, b"q" * 16, b"x" * 300]), st.binary(max_size=40))
_ints = st.one_of(st.integers(-2, 40), st.sampled_from([PAGE, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63)]))
_words = {bytes: _bytes, int: _ints, str: st.text(max_size=3) | st.just("x" * 300), bool: st.booleans()}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of that type, defaults or not: what a well-formed message can carry."""
    if get_origin(hint) is list:
        return st.lists(_values(get_args(hint)[0]), max_size=4)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{name: _values(kind) for name, kind in get_type_hints(hint).items()})
    return _words[hint] if hint in _words else st.sampled_from(hint)


_bodies = st.one_of([_values(kind) for kind in get_args(RequestBody)])


@given(st.lists(st.tuples(_ints, _bodies, _ints, st.lists(_ints, max_size=3)), max_size=25))
def test_nothing_that_a_client_sends_raises(steps: list[tuple[int, RequestBody, int, list[int]]]) -> None:
    world = World(pool=4, limit=2)
    world.client("alice")
    for now_ms, body, request_id, released in steps:
        reply = world.state.handle(min(now_ms, 10**12), b"alice", request_id, body, released)
        assert isinstance(reply, Body)
        world.state.client_joined(world.now, b"alice", "", "alice")
        world.check()
