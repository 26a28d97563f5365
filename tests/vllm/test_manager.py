"""The scheduler's side against a scripted master and clock: deadlines, leases, puts, faults."""

import dataclasses

import pytest
from fakes import EPOCH, Clock, FakeClient, Store
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvpin.config import ClientConfig
from kvpin.errors import Unavailable
from kvpin.http.sidefield import MarkedPrefix, SideField, sign
from kvpin.keys import kv_key, kv_namespace_prefix
from kvpin.limits import LEASE_MARGIN_MS, PUT_MARGIN_MS, STEP_STORE_WAITS
from kvpin.protocol import Clear, GetReplicas, Mark, PutEnd, PutRevoke, PutStart, Replicas, SegmentInfo
from kvpin.vllm_connector import lookups, metrics, stores
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.manager import KVPinManager

BLOCK_TOKENS = 32
LAYOUT = ObjectLayout(slot_bytes=4096, slots=2, blocks_per_chunk=1)
CONFIG = ClientConfig(lookup_deadline_ms=50, put_deadline_ms=10, lease_ms=10_000, retry_ms=500)
NAMESPACE = b"n" * 16
SECRET = b"s" * 32
PREFIX = bytes(range(16))


class Harness:
    """A manager, its clock, and a store behind a client that may be told to be silent."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Store(LAYOUT.object_bytes)
        self.silent = False
        self.client = FakeClient(self.clock, lambda body: None if self.silent else self.store(body))
        self.manager = KVPinManager(self.client, CONFIG, LAYOUT, SECRET, self.clock)

    def request(self, name: str = "r", params: dict | None = None, keys: list[OffloadKey] | None = None) -> ReqContext:
        context = ReqContext(name, kv_transfer_params=params)
        self.manager.on_new_request(context)
        chain = keys or KEYS
        for index, key in enumerate(chain, 1):
            context.set_offload_key_position(key, index * BLOCK_TOKENS)
        self.manager.arrived(context, lambda: NAMESPACE, lambda: chain)
        return context

    def refresh(self, context: ReqContext, keys: list[OffloadKey] | None = None) -> list[LookupResult]:
        chain = keys or KEYS
        self.manager.refresh(context, lambda: chain)
        return [self.manager.lookup(key, context) for key in chain]

    def has(self, *keys: OffloadKey) -> None:
        for key in keys:
            self.store.offsets[object_key(key)] = len(self.store.offsets) * LAYOUT.object_bytes

    def count(self, name: str, *labels: str) -> int:
        return self.manager.counters.totals[name, labels]


def key_of(index: int) -> OffloadKey:
    return make_offload_key(index.to_bytes(32, "big"), 0)


def object_key(key: OffloadKey) -> bytes:
    return kv_key(NAMESPACE, key[:-4], 0)


def side_field(end_token: int = 64, secret: bytes = SECRET) -> dict:
    return {"kvpin": sign(SideField([MarkedPrefix(PREFIX.hex(), end_token, 5000, "doc")], "ab" * 16), secret)}


KEYS = [key_of(index) for index in range(3)]
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


@pytest.fixture
def h() -> Harness:
    return Harness()


# --- lookups ----------------------------------------------------------------------------------------------------------


def test_one_message_is_sent_when_the_request_arrives_and_answers_every_lookup(h: Harness) -> None:
    h.has(KEYS[0], KEYS[1])
    context = h.request()
    assert h.refresh(context) == [HIT, HIT, MISS]
    (asked,) = h.client.bodies(GetReplicas)
    assert asked == GetReplicas(keys=[object_key(key) for key in KEYS], lease_ms=10_000)


def test_a_marked_request_renews_and_offers_its_whole_chain(h: Harness) -> None:
    context = ReqContext("r", kv_transfer_params=side_field())
    assert h.manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    h.request("m", side_field())
    (asked,) = h.client.bodies(GetReplicas)
    assert asked.marks == [Mark(PREFIX, 64, 5000, "doc")]
    assert asked.end_tokens == [32, 64, 96]
    assert asked.report == b"\xab" * 16


@pytest.mark.parametrize("params", [side_field(secret=b"x" * 32), {"kvpin": {"prefixes": "all"}}, {"kvpin": 3}])
def test_a_side_field_that_is_not_ours_marks_nothing(h: Harness, params: dict) -> None:
    context = ReqContext("r", kv_transfer_params=params)
    assert h.manager.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    h.request("m", params)
    assert h.client.bodies(GetReplicas)[0].marks == []
    assert h.count(metrics.SIDE_FIELDS_REJECTED) == 2


def test_without_an_answer_it_is_retry_until_the_deadline_then_a_miss(h: Harness) -> None:
    h.silent = True
    context = h.request()
    h.clock.advance_ms(49)
    assert h.refresh(context) == [RETRY] * 3
    h.clock.advance_ms(1)
    assert h.refresh(context) == [MISS] * 3
    assert h.client.calls[0].abandoned
    assert h.count(metrics.LOOKUPS, "timeout") == 1
    h.clock.advance_ms(499)
    h.refresh(context)
    assert len(h.client.calls) == 1
    h.clock.advance_ms(1)
    h.refresh(context)
    assert len(h.client.calls) == 2


def test_a_late_answer_that_is_there_when_asked_counts(h: Harness) -> None:
    h.has(*KEYS)
    h.silent = True
    context = h.request()
    h.clock.advance_ms(3000)  # the request waited in the engine's queue
    h.client.calls[0].answer = h.store(h.client.calls[0].body)
    assert h.refresh(context) == [HIT] * 3


def test_an_open_breaker_is_a_miss_at_once(h: Harness) -> None:
    h.client.ready = False
    context = h.request()
    assert h.refresh(context) == [MISS] * 3
    assert h.count(metrics.LOOKUPS, "unavailable") == 1


def test_an_answer_is_used_for_half_its_lease_then_asked_again(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.clock.advance_ms(4999)
    assert h.refresh(context) == [HIT] * 3
    assert len(h.client.calls) == 1
    h.clock.advance_ms(1)
    h.store.offsets.clear()
    assert h.refresh(context) == [MISS] * 3
    assert h.client.released == [1]


def test_a_request_that_has_grown_is_asked_about_again(h: Harness) -> None:
    h.has(*KEYS, key_of(3))
    context = h.request()
    grown = [*KEYS, key_of(3)]
    context.set_offload_key_position(grown[3], 128)
    assert h.refresh(context, grown) == [HIT] * 4


def test_an_answer_of_another_epoch_is_void(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.client.segment = SegmentInfo("/dev/shm/new", 1 << 30, EPOCH + 1)
    h.store.offsets.clear()
    assert h.refresh(context) == [MISS] * 3
    assert len(h.client.calls) == 2


def test_a_master_started_anew_while_it_was_asked_is_a_miss(h: Harness) -> None:
    h.has(*KEYS)
    h.silent = True
    context = h.request()
    h.client.calls[0].answer = h.store(h.client.calls[0].body)
    h.client.segment = SegmentInfo("/dev/shm/new", 1 << 30, EPOCH + 1)
    assert h.refresh(context) == [MISS] * 3
    assert h.count(metrics.LOOKUPS, "epoch_changed") == 1
    assert h.client.released == [1]


def test_an_object_of_another_size_is_a_miss(h: Harness) -> None:
    h.has(*KEYS)
    h.store.object_bytes += 4096
    assert h.refresh(h.request()) == [MISS] * 3


def test_long_chains_are_asked_in_batches(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "BATCH_KEYS_MAX", 2)
    h.has(KEYS[0], KEYS[2])
    context = h.request()
    assert h.refresh(context) == [HIT, MISS, HIT]
    assert [len(body.keys) for body in h.client.bodies(GetReplicas)] == [2, 1]


def test_one_batch_without_hits_does_not_shorten_the_lease_of_another(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "BATCH_KEYS_MAX", 2)
    h.has(KEYS[0])
    context = h.request()
    h.refresh(context)
    spec = h.manager.prepare_load(KEYS[:1], context)
    assert spec.deadline_s == pytest.approx(1000 + 10 - LEASE_MARGIN_MS / 1000)


# --- loads ------------------------------------------------------------------------------------------------------------


def test_a_load_gets_the_ranges_in_order_and_a_deadline_before_the_leases_end(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.clock.advance_ms(100)
    h.refresh(context)
    spec = h.manager.prepare_load([KEYS[2], KEYS[0]], context)
    assert spec.offsets == (2 * LAYOUT.object_bytes, 0)
    assert (spec.segment_path, spec.epoch, spec.slot_bytes) == ("/dev/shm/fake", EPOCH, LAYOUT.slot_bytes)
    assert spec.deadline_s == pytest.approx(1000 + 10 - LEASE_MARGIN_MS / 1000)
    h.manager.on_schedule_end(ScheduleEndContext(["r"], []))
    assert h.client.released == []
    h.manager.complete_load({KEYS[0], KEYS[2]}, context)
    assert h.client.released == [1]


def test_a_load_that_nobody_looked_up_is_refused_by_workers_and_not_tried_again(h: Harness) -> None:
    h.has(KEYS[0])
    context = h.request()
    h.refresh(context)
    spec = h.manager.prepare_load(KEYS, context)
    assert spec.deadline_s <= h.clock()
    h.manager.complete_load(set(KEYS), context)
    assert h.refresh(context) == [MISS] * 3
    assert h.count(metrics.FAULTS, "prepare_load") == 1


def test_after_a_failed_load_the_rest_of_the_request_is_computed(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.refresh(context)
    spec = h.manager.prepare_load(KEYS, context)
    h.manager.note_failures({spec.ticket: "expired", 999: "unknown tickets are ignored"})
    h.manager.complete_load(set(KEYS), context)
    h.clock.advance_ms(60_000)
    assert h.refresh(context) == [MISS] * 3
    assert h.count(metrics.TRANSFER_FAILURES, "load", "expired") == 1
    assert h.client.released == [1]


def test_a_lease_that_no_load_uses_ends_when_the_request_runs(h: Harness) -> None:
    h.has(*KEYS)
    h.request()
    h.manager.on_schedule_end(ScheduleEndContext(["other"], []))
    assert h.client.released == []
    h.manager.on_schedule_end(ScheduleEndContext(["r"], []))
    assert h.client.released == [1]


def test_a_finished_request_leaves_nothing_behind(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.refresh(context)
    h.silent = True
    waiting = h.request("w")
    h.manager.on_request_finished(context)
    h.manager.on_request_finished(waiting)
    assert h.client.released == [1]
    assert h.client.calls[1].abandoned
    assert h.manager._states == {}


def test_a_request_aborted_during_its_load_keeps_the_lease_until_the_copy_ends(h: Harness) -> None:
    h.has(*KEYS)
    context = h.request()
    h.refresh(context)
    h.manager.prepare_load(KEYS, context)
    h.manager.on_request_finished(context)
    assert h.client.released == []
    h.manager.complete_load(set(KEYS), context)
    assert h.client.released == [1]


# --- stores -----------------------------------------------------------------------------------------------------------


def test_a_store_writes_what_is_missing_and_ends_it(h: Harness) -> None:
    h.has(KEYS[1])
    context = h.request(params=side_field())
    output = h.manager.prepare_store(KEYS, context)
    assert output.keys_to_store == [KEYS[0], KEYS[2]]
    assert output.store_spec.offsets == (LAYOUT.object_bytes, 2 * LAYOUT.object_bytes)
    assert output.store_spec.deadline_s == pytest.approx(1000 + 30 - PUT_MARGIN_MS / 1000)
    (body,) = h.client.bodies(PutStart)
    assert [(item.size_bytes, item.end_token) for item in body.items] == [
        (LAYOUT.object_bytes, n) for n in (32, 64, 96)
    ]
    assert (body.marks, body.report) == ([Mark(PREFIX, 64, 5000, "doc")], b"\xab" * 16)
    h.manager.complete_store({KEYS[0], KEYS[2]}, context)
    assert h.client.bodies(PutEnd) == [PutEnd([object_key(KEYS[0]), object_key(KEYS[2])])]
    h.manager.on_schedule_end(ScheduleEndContext([], []))
    assert h.count(metrics.STORE_BLOCKS, "granted") == h.count(metrics.STORE_BLOCKS, "stored") == 2
    assert h.count(metrics.STORE_BLOCKS, "exists") == 1
    assert h.count(metrics.GRANTS, "opened") == 3


def test_marks_that_end_before_the_batch_are_not_sent(h: Harness) -> None:
    context = h.request(params=side_field(end_token=64))
    h.manager.prepare_store(KEYS[2:], context)
    (body,) = h.client.bodies(PutStart)
    assert (body.marks, body.report) == ([], b"")


def test_a_silent_master_costs_one_put_deadline_and_one_retry(h: Harness) -> None:
    context = h.request()
    h.silent = True
    assert h.manager.prepare_store(KEYS, context) is None
    assert h.clock() == pytest.approx(1000.010)
    assert h.client.calls[-1].abandoned
    h.client.ready = False  # the breaker has opened
    output = h.manager.prepare_store(KEYS, context)
    assert output.keys_to_store == []
    assert h.clock() == pytest.approx(1000.010)
    assert h.count(metrics.STORE_BLOCKS, "timeout") == h.count(metrics.STORE_BLOCKS, "unavailable") == 3


def test_one_step_waits_for_a_slow_master_only_so_often(h: Harness) -> None:
    contexts = [h.request(str(index)) for index in range(STEP_STORE_WAITS + 3)]
    h.silent = True
    for context in contexts:
        h.manager.prepare_store(KEYS, context)
    assert h.clock() - 1000 == pytest.approx(STEP_STORE_WAITS * 0.010)
    h.manager.on_schedule_end(ScheduleEndContext([], []))
    h.silent = False
    assert h.manager.prepare_store(KEYS, contexts[-1]).keys_to_store == KEYS


def test_a_failed_copy_is_revoked_and_never_ended(h: Harness) -> None:
    context = h.request()
    output = h.manager.prepare_store(KEYS, context)
    h.manager.note_failures({output.store_spec.ticket: "fault"})
    h.manager.complete_store(set(KEYS), context)
    assert h.client.bodies(PutRevoke) == [PutRevoke([object_key(key) for key in KEYS])]
    assert h.client.bodies(PutEnd) == []
    assert h.count(metrics.STORE_BLOCKS, "failed") == 3


def test_a_store_that_ends_after_its_put_timed_out_touches_nothing(h: Harness) -> None:
    context = h.request()
    output = h.manager.prepare_store(KEYS, context)
    h.manager.note_failures({output.store_spec.ticket: "expired"})
    h.clock.advance_ms(30_000 - PUT_MARGIN_MS)
    h.manager.complete_store(set(KEYS), context)
    assert h.client.bodies(PutRevoke) == h.client.bodies(PutEnd) == []
    assert h.count(metrics.STORE_BLOCKS, "lost") == 3


def test_a_store_of_another_epoch_touches_nothing(h: Harness) -> None:
    context = h.request()
    h.manager.prepare_store(KEYS, context)
    h.client.segment = SegmentInfo("/dev/shm/new", 1 << 30, EPOCH + 1)
    h.manager.complete_store(set(KEYS), context)
    assert h.client.bodies(PutRevoke) == h.client.bodies(PutEnd) == []


def test_a_store_of_an_ended_session_does_not_end_a_later_put_of_the_same_keys(h: Harness) -> None:
    early, late = h.request("early"), h.request("late")
    h.manager.prepare_store(KEYS, early)
    h.client.session = object()  # the master took the silent client for gone, and its puts for lost
    h.store.writing.clear()
    assert h.manager.prepare_store(KEYS, late).keys_to_store == KEYS
    h.manager.complete_store(set(KEYS), early)
    assert h.store.offsets == {}, "bytes that nobody has written yet are visible"
    h.manager.complete_store(set(KEYS), late)
    assert len(h.store.offsets) == len(KEYS)


def test_ranges_of_a_batch_that_was_answered_before_a_timeout_are_given_back(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "BATCH_KEYS_MAX", 2)
    context = h.request()
    answers = iter([True, False, True, True])
    h.client.master = lambda body: h.store(body) if next(answers) else None
    assert h.manager.prepare_store(KEYS, context) is None
    assert h.store.writing == {}
    assert h.client.bodies(PutRevoke) == [PutRevoke([object_key(key) for key in KEYS[:2]])]


def test_blocks_that_another_put_writes_are_left_to_it(h: Harness) -> None:
    first, second = h.request("1"), h.request("2")
    assert h.manager.prepare_store(KEYS, first).keys_to_store == KEYS
    assert h.manager.prepare_store(KEYS, second).keys_to_store == []
    assert h.count(metrics.STORE_BLOCKS, "busy") == 3


# --- faults, reset, end -----------------------------------------------------------------------------------------------


def test_no_fault_reaches_the_engine(h: Harness, caplog: pytest.LogCaptureFixture) -> None:
    stranger = ReqContext("never announced")
    assert h.manager.lookup(KEYS[0], stranger) is MISS
    assert h.manager.lookup(KEYS[0], stranger) is MISS
    assert h.manager.prepare_load(KEYS, stranger).deadline_s == 0
    assert h.manager.prepare_store(KEYS, stranger).keys_to_store == []
    h.manager.complete_load(KEYS, stranger)
    h.manager.complete_store(KEYS, stranger)
    h.manager.on_request_finished(stranger)
    assert h.count(metrics.FAULTS, "lookup") == 2
    assert sum("entry=lookup" in line for line in caplog.messages) == 1


def test_reset_clears_this_engines_objects_without_force(h: Harness) -> None:
    h.has(*KEYS)
    h.request()
    h.manager.reset_cache()
    assert h.client.bodies(Clear) == [Clear(kv_namespace_prefix(NAMESPACE), force=False)]
    assert h.manager.reset_confirmed
    assert h.client.released == [1]
    h.client.master = lambda body: Unavailable("gone")
    h.manager.reset_cache()
    assert not h.manager.reset_confirmed
    assert h.count(metrics.FAULTS, "reset_cache") == 0


def test_a_store_under_way_during_a_reset_is_revoked_when_its_ranks_are_done(h: Harness) -> None:
    context = h.request()
    h.manager.prepare_store(KEYS, context)
    (ticket,) = h.manager.disown(context, set(KEYS))
    h.manager.reset_cache()
    assert h.client.bodies(PutRevoke) == []
    h.manager.orphan_ended(ticket)
    assert h.client.bodies(PutRevoke) == [PutRevoke([object_key(key) for key in KEYS])]
    assert h.client.bodies(PutEnd) == []


def test_stats_are_increments_and_all_declared(h: Harness) -> None:
    h.has(KEYS[0])
    context = h.request(params=side_field())
    h.refresh(context)
    h.manager.prepare_store(KEYS, context)
    h.manager.lookup(KEYS[0], ReqContext("stranger"))
    stats = h.manager.get_stats()
    for name, values in stats.data["data"].items():
        assert all(len(labels) == len(metrics.DEFINITIONS[name].labelnames) for labels in values)
    assert stats.data["data"][metrics.CONNECTED] == {(): 1}
    assert h.manager.get_stats() is None
    h.client.ready = False
    assert h.manager.get_stats().data["data"] == {metrics.CONNECTED: {(): 0}}


def test_a_reply_of_the_wrong_kind_is_a_miss(h: Harness) -> None:
    h.client.master = lambda body: Replicas([], [], 0, 0, []) if isinstance(body, PutStart) else h.store(body)
    context = h.request()
    assert h.manager.prepare_store(KEYS, context).keys_to_store == []


def test_shutdown_says_goodbye(h: Harness) -> None:
    h.manager.shutdown()
    assert h.client.closed


def test_layout_sizes_an_object_for_all_ranks() -> None:
    assert LAYOUT.object_bytes == 8192
    assert dataclasses.replace(LAYOUT, slots=1).object_bytes == 4096
