"""Whole objects, with a real master: what is put comes back, however large, however many, from whichever thread."""

import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpin.client import Client, PutOutcome, PutResult
from kvpin.errors import ProtocolError, SegmentError, Unavailable
from kvpin.keys import named_prefix_id
from kvpin.limits import BATCH_KEYS_MAX, GIL_KEPT_BYTES_MAX, PAGE_BYTES
from kvpin.protocol import EndStatus, ExpireMode, Grant, PutEnd, PutItem, PutStart
from tests.support.master import MasterProcess, wait_until

STORED = PutOutcome(PutResult.STORED)
EXISTS = PutOutcome(PutResult.EXISTS)
MIB = 1 << 20


@pytest.fixture
def client(master: MasterProcess, make_client: Callable[..., Client]) -> Client:
    client = make_client(address=master.address, call_timeout_ms=10_000)
    assert client.wait_ready(10_000)
    return client


def pattern(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


# --- put and get -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, GIL_KEPT_BYTES_MAX, GIL_KEPT_BYTES_MAX + 1, 20 * MIB]
)
def test_what_is_put_comes_back(client: Client, size: int) -> None:
    data = pattern(size, size)
    assert client.put("key", data) == STORED
    assert client.get("key") == data
    buffer = bytearray(size + 10)
    assert client.get_into(["key"], [buffer]) == [size]
    assert buffer[:size] == data
    assert buffer[size:] == bytes(10)


def test_a_key_is_stored_once(client: Client) -> None:
    assert client.put("key", b"one") == STORED
    assert client.put("key", b"two") == EXISTS
    assert client.get(b"key") == b"one"
    assert client.put("key", b"three", replace=True) == STORED
    assert client.get("key") == b"three"
    assert client.get("no such key") is None


def test_batches_mix_hits_and_misses(client: Client) -> None:
    keys = [f"key {index}" for index in range(100)]
    sources = [pattern(1000 + index, index) for index in range(100)]
    assert client.put_from(keys[::2], sources[::2]) == [STORED] * 50
    assert client.put_from(keys[:4], sources[:4]) == [EXISTS, STORED, EXISTS, STORED]
    assert client.exists(keys) == [index % 2 == 0 or index < 4 for index in range(100)]
    targets = [bytearray(2000) for _ in keys]
    sizes = client.get_into(keys, targets)
    for index, size in enumerate(sizes):
        if index % 2 == 0 or index < 4:
            assert size == 1000 + index
            assert targets[index][:size] == sources[index]
        else:
            assert size is None


def test_a_call_may_exceed_one_message(client: Client) -> None:
    keys = [b"%d" % index for index in range(BATCH_KEYS_MAX + 100)]
    found = client.exists(keys)
    assert found == [False] * len(keys)
    assert client.put_from(keys, keys) == [STORED] * len(keys)
    assert all(client.exists(keys))
    targets = [bytearray(8) for _ in keys]
    assert client.get_into(keys, targets) == [len(key) for key in keys]
    assert client.remove(keys) == [EndStatus.OK] * len(keys)


@pytest.mark.parametrize("size", [64, GIL_KEPT_BYTES_MAX + 4096])
def test_buffers_of_every_kind(client: Client, size: int) -> None:
    data = pattern(size, 1)
    longs = array("q", data)
    matrix = np.frombuffer(data, dtype=np.float16).reshape(-1, 4)
    read_only_part = memoryview(data + b"!")[:size]
    sources: list[object] = [data, bytearray(data), memoryview(data), longs, matrix, read_only_part]
    keys = [str(index) for index in range(len(sources))]
    assert client.put_from(keys, sources) == [STORED] * len(keys)
    for key in keys:
        assert client.get(key) == data
    target = np.zeros((2, size), dtype=np.uint8)
    assert client.get_into(keys[:1], [target[1]]) == [size]
    assert target[1].tobytes() == data
    assert not target[0].any()


def test_bad_arguments_say_what_to_do(client: Client) -> None:
    client.put("key", b"12345")
    strided = np.zeros((4, 4))[:, 1]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: client.get_into(["key"], [bytearray(4)]), "has 5 bytes, its buffer only 4"),
        (lambda: client.get_into(["key"], [b"12345"]), "give writable ones"),
        (lambda: client.get_into(["key"], []), "1 keys and 0 buffers"),
        (lambda: client.put_from(["a", "b"], [b"1"]), "2 keys and 1 buffers"),
        (lambda: client.put("a", strided), "give contiguous bytes"),
        (lambda: client.exists("key"), "give a list of keys, not the single key"),
        (lambda: client.put("a", b"1", prefix="p"), "without a ttl does nothing"),
        (lambda: client.put("a", b"1", guaranteed_ttl_ms=-1), "give 1 or more"),
        (lambda: client.get("a", prefix="p"), "without a ttl does nothing"),
        (lambda: client.protect(["a"], 0), "give 1 or more"),
        (lambda: client.expire(b"short"), "a prefix id has 5 bytes"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: client.put("", b"1"), "a key has 0 bytes"),
        (lambda: client.put("a", b""), "give 1 to"),
        (lambda: client.exists(["a", "a"]), "twice"),
        (lambda: client.put("a", b"1", guaranteed_ttl_ms=1 << 40), "ttl_ms"),
    ]
    for call, text in refused:
        with pytest.raises(ProtocolError, match=text):
            call()
    assert client.put("a", b"1") == STORED  # and the client works on


def test_a_full_pool_is_a_result(make_master: Callable[..., MasterProcess], make_client: Callable[..., Client]) -> None:
    master = make_master(pool_size="16MiB", guaranteed_limit="8MiB")
    client = make_client(address=master.address)
    outcomes = client.put_from(
        [str(index) for index in range(6)], [bytes(2 * MIB)] * 6, guaranteed_ttl_ms=60_000, prefix="p"
    )
    assert [outcome.guaranteed for outcome in outcomes] == [True] * 4 + [False] * 2
    assert {outcome.grant for outcome in outcomes[4:]} == {Grant.CAPACITY_EXCEEDED}
    assert client.put("too large", bytes(10 * MIB)) == PutOutcome(PutResult.NO_SPACE)
    assert client.put("0", b"x", replace=True) == PutOutcome(PutResult.GUARANTEED)


def test_many_threads_share_a_client(client: Client) -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        for index in range(30):
            key, data = f"{number} {index}", pattern(3000 + index, number * 100 + index)
            if client.put(key, data) != STORED or client.get(key) != data or client.exists([key]) != [True]:
                faults.append(key)
            client.get_into([key], [bytearray(4000)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    wait_until(lambda: client.stats()["leases"] == 0, "all leases are released")


# --- guarantees ------------------------------------------------------------------------------------------------------


def test_a_guarantee_by_key(client: Client) -> None:
    assert client.put("key", b"data", guaranteed_ttl_ms=60_000) == PutOutcome(PutResult.STORED, Grant.OPENED)
    assert client.put("key", b"data", guaranteed_ttl_ms=60_000).guaranteed
    assert client.remove(["key"]) == [EndStatus.GUARANTEED]
    (prefix,) = client.prefixes()
    assert (prefix.prefix_id, prefix.label, prefix.blocks) == (named_prefix_id("key"), "key", 1)
    assert 0 < prefix.remaining_ms <= 60_000
    assert client.expire("key").memory_blocks == 1
    assert client.remove(["key"]) == [EndStatus.OK]


def test_a_guarantee_by_named_prefix(client: Client) -> None:
    keys = ["a", "b", "c"]
    client.put_from(keys, [b"1"] * 3, guaranteed_ttl_ms=60_000, prefix="mine")
    client.put("plain", b"1")
    assert client.protect(["plain", "absent"], 60_000, prefix="yours")[0] is Grant.OPENED
    assert [prefix.label for prefix in client.prefixes(label="mine")] == ["mine"]
    assert client.prefixes("yours")[0].blocks == 1
    assert client.expire("mine", dry_run=True).memory_blocks == 3
    assert client.expire("mine", ExpireMode.DELETE).memory_blocks == 3
    assert client.exists([*keys, "plain"]) == [False, False, False, True]
    assert client.expire(named_prefix_id("yours")).memory_blocks == 1
    assert client.expire("unknown").prefixes == 0


def test_protect_gives_each_key_its_own_prefix(client: Client) -> None:
    client.put_from(["a", "b"], [b"1", b"2"])
    assert client.protect(["a", b"\xff\xfe", "b"], 60_000) == [Grant.OPENED, Grant.GAP, Grant.OPENED]
    assert client.protect(["a"], 60_000) == [Grant.RENEWED]
    client.expire("a")
    assert client.remove(["a", "b"]) == [EndStatus.OK, EndStatus.GUARANTEED]


def test_a_get_renews_and_never_creates(client: Client) -> None:
    client.put("key", b"data")
    assert client.get("key", guaranteed_ttl_ms=60_000) == b"data"
    assert client.prefixes() == []
    client.protect(["key"], 10_000)
    client.get("key")
    assert client.prefixes()[0].remaining_ms <= 10_000
    client.get("key", guaranteed_ttl_ms=60_000)
    assert client.prefixes()[0].remaining_ms > 10_000


def test_prefixes_come_in_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [str(index) for index in range(2500)]
    client.put_from(keys, [b"x"] * 2500, guaranteed_ttl_ms=60_000)
    assert len({prefix.prefix_id for prefix in client.prefixes()}) == 2500


# --- too late --------------------------------------------------------------------------------------------------------


class SlowCopy:
    """Copies, after something else has happened."""

    def __init__(self, happening: Callable[[], None]) -> None:
        self.happening = happening

    def __call__(self, target: memoryview, source: memoryview) -> None:
        self.happening()
        target[: source.nbytes] = source


def read_one(client: Client) -> bytes | None:
    buffer = bytearray(PAGE_BYTES)
    return bytes(buffer) if client.get_into(["key"], [buffer]) == [PAGE_BYTES] else None


def read_among_others(client: Client) -> bytes | None:
    buffers = [bytearray(PAGE_BYTES) for _ in range(3)]
    sizes = client.get_into(["first", "key", "last"], buffers)
    assert sizes[0] is None or bytes(buffers[0]) == b"1" * PAGE_BYTES
    assert sizes[2] is None or bytes(buffers[2]) == b"3" * PAGE_BYTES
    return bytes(buffers[1]) if sizes[1] == PAGE_BYTES else None


@pytest.mark.parametrize("read", [read_one, read_among_others])
def test_a_copy_that_outlives_its_lease_is_a_miss(
    client: Client, make_client: Callable[..., Client], read: Callable[[Client], bytes | None]
) -> None:
    """While the reader copies, its lease runs out, and the range gets another object."""
    other = make_client(address=client.config.address)
    client.put_from(["first", "key", "last"], [b"1" * PAGE_BYTES, b"2" * PAGE_BYTES, b"3" * PAGE_BYTES])
    assert read(client) == b"2" * PAGE_BYTES
    late = make_client(address=client.config.address, lease_ms=30)
    assert late.wait_ready(10_000)
    foreign = iter(range(1000))

    def reuse() -> None:
        wait_until(lambda: other.stats()["leases"] == 0, "the lease is over")
        other.remove(["first", "key", "last"])
        other.put_from([f"foreign {next(foreign)}" for _ in range(3)], [b"X" * PAGE_BYTES] * 3)

    late._live().reader._copy = SlowCopy(reuse)
    assert read(late) is None
    assert late.counters["leases_expired"] == 1


def test_a_client_closed_during_a_copy_gives_no_bytes(client: Client, make_client: Callable[..., Client]) -> None:
    """Its farewell ends the lease, and the range gets another object."""
    other = make_client(address=client.config.address)
    other.put("key", b"2" * PAGE_BYTES)

    def close_and_reuse() -> None:
        client.close()
        wait_until(lambda: other.stats()["leases"] == 0, "the lease is over")
        other.put("key", b"X" * PAGE_BYTES, replace=True)

    client._live().reader._copy = SlowCopy(close_and_reuse)
    with pytest.raises(Unavailable, match="closed during the copy"):
        read_one(client)


def test_the_lease_counts_from_when_it_was_asked_for(client: Client) -> None:
    """An answer that took longer than the lease is useless, however fast the copy."""
    client.put("key", b"data")
    reader = client._live().reader
    reader._clock = lambda: time.monotonic() + client.config.lease_ms / 1000
    assert client.get("key") is None
    assert client.get_into(["key"], [bytearray(4)]) == [None]
    assert client.counters["leases_expired"] == 2


def test_a_put_that_takes_too_long_is_lost(client: Client) -> None:
    writer = client._live().writer
    writer._clock = lambda: time.monotonic() + client.put_timeout_ms / 1000
    assert client.put("key", b"data") == PutOutcome(PutResult.LOST)
    assert client.counters["puts_late"] == 1
    assert client.get("key") is None
    assert client.stats()["puts_completed"] == 0


def test_a_put_ended_from_elsewhere_is_lost(client: Client, make_client: Callable[..., Client]) -> None:
    other = make_client(address=client.config.address)
    other.stats()
    writer = client._live().writer
    writer._copy = SlowCopy(lambda: other.expire("p", ExpireMode.DELETE))  # type: ignore[arg-type]
    assert client.put("key", b"data", guaranteed_ttl_ms=60_000, prefix="p") == PutOutcome(PutResult.LOST)
    assert client.exists(["key"]) == [False]


def test_a_put_that_fails_half_way_is_revoked(client: Client) -> None:
    writer = client._live().writer

    def fail() -> None:
        raise MemoryError

    writer._copy = SlowCopy(fail)
    with pytest.raises(MemoryError):
        client.put_from([str(index) for index in range(10)], [b"data"] * 10, guaranteed_ttl_ms=60_000)
    wait_until(lambda: client.stats()["puts_revoked"] == 10, "all ten are revoked")


def test_requests_of_the_protocol(client: Client) -> None:
    """What adapters do: ask for a range, let somebody else write it, end it."""
    started = client.call(PutStart([PutItem(b"key", 5)]))
    segment = client.segment
    assert segment is not None
    (view,) = client._live().mapping.views(segment, started.offsets, [5])  # type: ignore[union-attr]
    view[:] = b"hello"
    assert client.get("key") is None
    client.call(PutEnd([b"key"]), timeout_ms=5000)
    assert client.get("key") == b"hello"
    assert client.put_timeout_ms > 0


# --- the mapping -----------------------------------------------------------------------------------------------------


def test_the_pool_is_mapped_in_the_background(client: Client) -> None:
    """So that the first copy to each page is as fast as the next."""
    client.put("key", b"data")
    segment = client.segment
    assert segment is not None
    wait_until(lambda: resident_kib(segment.path) >= segment.size_bytes // 1024, "all of the pool is in the page table")


def resident_kib(path: str) -> int:
    """How much of a file this process has in its page table."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    mapped = 0
    for line in lines:
        if line.endswith(path):
            mapped += next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    return mapped


def test_a_segment_that_cannot_be_mapped_leaves_nothing_half_done(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SegmentError("no memory for the mapping")

    monkeypatch.setattr("kvpin.mapping.Segment.attach", fail)
    with pytest.raises(SegmentError):
        client.put("key", b"data")
    wait_until(lambda: client.stats()["puts_revoked"] == 1, "the put is revoked")
    monkeypatch.undo()
    assert client.put("key", b"data") == STORED
    monkeypatch.setattr("kvpin.mapping.Segment.attach", fail)
    client._live().mapping.close()
    with pytest.raises(SegmentError):
        client.get("key")
    wait_until(lambda: client.stats()["leases"] == 0, "the lease is released")
