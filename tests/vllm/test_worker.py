"""CPU copies into a real segment: bytes, deadlines, fences, and that nothing is raised at the engine."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import Clock
from test_pages import caches
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, TransferResult

from kvpin.segment import Segment
from kvpin.vllm_connector import worker as worker_module
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.transfer import TransferSpec, WorkerMetadata
from kvpin.vllm_connector.worker import CpuWorker, Job

PAGE_BYTES = 64
RANKS = 2
LAYOUT = ObjectLayout(slot_bytes=2 * PAGE_BYTES, slots=RANKS, blocks_per_chunk=1)
EPOCH = 3
SEGMENT_BYTES = 1 << 20


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = Segment.create(str(tmp_path / "segment"), SEGMENT_BYTES, EPOCH, progress=None)
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kv() -> CanonicalKVCaches:
    return caches([[PAGE_BYTES, PAGE_BYTES]])


@pytest.fixture
def workers(kv: CanonicalKVCaches, clock: Clock) -> Iterator[list[CpuWorker]]:
    made = [CpuWorker(kv, LAYOUT, slot, clock) for slot in range(RANKS)]
    yield made
    for each in made:
        each.shutdown()


def blocks(*ids: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(ids), [len(ids)], [0])


def spec(segment: Segment, *offsets: int, deadline_s: float = 2000.0, ticket: int = 1) -> TransferSpec:
    return TransferSpec(ticket, segment.path, EPOCH, offsets, LAYOUT.slot_bytes, deadline_s)


def pages(kv: CanonicalKVCaches, block: int) -> torch.Tensor:
    return torch.cat([tensor.tensor[block] for tensor in kv.tensors])


def done(worker: CpuWorker, job_id: int) -> TransferResult:
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    return result


def test_each_rank_copies_its_slot_and_gets_it_back(
    workers: list[CpuWorker], kv: CanonicalKVCaches, segment: Segment
) -> None:
    for rank, worker in enumerate(workers):
        worker.submit_store(10, blocks(3 + rank, 7), spec(segment, 8192, 0))
        assert done(worker, 10).transfer_size == 4 * PAGE_BYTES
    assert bytes(segment.view(8192, 128)) == bytes(pages(kv, 3).numpy().tobytes())
    assert bytes(segment.view(8192 + 128, 128)) == bytes(pages(kv, 4).numpy().tobytes())
    stored = pages(kv, 4).clone()
    workers[1].submit_load(11, spec(segment, 8192), blocks(0))
    done(workers[1], 11)
    assert pages(kv, 0).equal(stored)
    assert workers[1].take_failures() == {}


@pytest.mark.parametrize("store", [True, False])
def test_after_the_deadline_nothing_is_copied(
    workers: list[CpuWorker], kv: CanonicalKVCaches, segment: Segment, clock: Clock, store: bool
) -> None:
    segment.view(0, 256)[:] = bytes(256)
    before = pages(kv, 5).clone()
    expired = spec(segment, 0, deadline_s=clock.now_s, ticket=8)
    if store:
        workers[0].submit_store(1, blocks(5), expired)
    else:
        workers[0].submit_load(1, expired, blocks(5))
    assert done(workers[0], 1).transfer_size is None
    assert bytes(segment.view(0, 256)) == bytes(256)
    assert pages(kv, 5).equal(before)
    assert workers[0].take_failures() == {8: "expired"}
    assert workers[0].take_failed_loads() == (set() if store else {1})
    assert workers[0].take_failures() == {}


@pytest.mark.parametrize("last_row", [1, 4], ids=["in the middle", "with the last row"])
def test_a_deadline_that_passes_during_the_copy_fails_it_and_stops_it(
    workers: list[CpuWorker], segment: Segment, clock: Clock, monkeypatch: pytest.MonkeyPatch, last_row: int
) -> None:
    copied = []

    def slow(target: int, source: int, size: int, release_gil: bool) -> None:
        copied.append(size)
        if len(copied) == last_row:
            clock.advance_ms(600_000)

    monkeypatch.setattr(worker_module, "copy_bytes", slow)
    workers[0].submit_store(1, blocks(5, 6), spec(segment, 0, 4096, deadline_s=clock.now_s + 1))
    done(workers[0], 1)
    assert copied == [PAGE_BYTES] * last_row
    assert workers[0].take_failures() == {1: "expired"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"segment_path": "/nowhere"}, "segment"),
        ({"epoch": EPOCH + 1}, "segment"),
        ({"offsets": (SEGMENT_BYTES - 128,)}, "segment"),
        ({"offsets": (-4096,)}, "segment"),
        ({"offsets": (0, 4096)}, "fault"),
        ({"slot_bytes": 1}, "fault"),
    ],
)
def test_what_cannot_be_copied_is_a_failure_and_not_an_exception(
    workers: list[CpuWorker], segment: Segment, change: dict, reason: str
) -> None:
    workers[0].submit_load(4, replace(spec(segment, 0), **change), blocks(1))
    done(workers[0], 4)
    assert workers[0].take_failures() == {1: reason}
    assert workers[0].take_failed_loads() == {4}
    workers[0].submit_load(5, spec(segment, 0), blocks(1))
    done(workers[0], 5)
    assert workers[0].take_failures() == {}


def test_a_failure_that_repeats_is_logged_once(
    workers: list[CpuWorker], segment: Segment, caplog: pytest.LogCaptureFixture
) -> None:
    for job_id in range(5):
        workers[0].submit_load(job_id, spec(segment, 0, deadline_s=0.0, ticket=job_id), blocks(1))
    workers[0].wait(set(range(5)))
    assert workers[0].take_failures() == dict.fromkeys(range(5), "expired")
    assert [line for line in caplog.messages if "reason=expired" in line] == [
        "event=load_failed reason=expired error='the ranges may belong to somebody else by now' more_before=0"
    ]


def test_a_fence_waits_for_its_jobs(
    workers: list[CpuWorker], segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()

    def held(job: Job, rows: object) -> None:
        started.set()
        assert go.wait(10)

    monkeypatch.setattr(workers[0], "_copy", held)
    workers[0].submit_store(1, blocks(5), spec(segment, 0))
    assert started.wait(10)
    fence = threading.Thread(target=workers[0].wait, args=({1, 99},))
    fence.start()
    fence.join(0.05)
    assert fence.is_alive()
    assert workers[0].get_finished() == []
    go.set()
    fence.join(10)
    assert not fence.is_alive()
    assert [result.job_id for result in workers[0].get_finished()] == [1]


def test_a_full_queue_fails_the_transfer_at_once(
    workers: list[CpuWorker], segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()

    def held(job: Job, rows: object) -> None:
        started.set()
        assert go.wait(10)

    monkeypatch.setattr(workers[0], "_copy", held)
    workers[0]._queue.maxsize = 1
    workers[0].submit_store(1, blocks(5), spec(segment, 0, ticket=1))
    assert started.wait(10)
    workers[0].submit_store(2, blocks(5), spec(segment, 0, ticket=2))
    workers[0].submit_store(3, blocks(5), spec(segment, 0, ticket=3))
    assert [result.job_id for result in workers[0].get_finished()] == [3]
    assert workers[0].take_failures() == {3: "queue_full"}
    go.set()


def test_only_the_newest_segment_stays_mapped(
    workers: list[CpuWorker], segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(workers[0], "mapping_removed", lambda old: closed.append(old.epoch))
    newer = Segment.create(str(tmp_path / "newer"), SEGMENT_BYTES, EPOCH + 1, progress=None)
    workers[0].submit_store(1, blocks(5), spec(segment, 0))
    workers[0].submit_store(2, blocks(6), replace(spec(segment, 0), segment_path=newer.path, epoch=EPOCH + 1))
    workers[0].wait({1, 2})
    assert closed == [EPOCH]
    assert workers[0].take_failures() == {}
    newer.close()
    newer.unlink()


@pytest.mark.parametrize("release_gil", [True, False])
def test_rows_are_copied_with_and_without_the_gil(release_gil: bool) -> None:
    source = torch.randint(-128, 128, (4096,), dtype=torch.int8)
    target = torch.zeros(4097, dtype=torch.int8)
    worker_module.copy_bytes(target.data_ptr(), source.data_ptr(), 4096, release_gil)
    assert target[:4096].equal(source)
    assert target[4096] == 0


def test_other_threads_get_their_turn_every_few_rows(
    workers: list[CpuWorker], segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    monkeypatch.setattr(worker_module, "GIL_KEPT_BYTES_MAX", 2 * PAGE_BYTES)
    monkeypatch.setattr(worker_module, "copy_bytes", lambda target, source, size, release: released.append(release))
    workers[0].submit_store(1, blocks(1, 2, 3), spec(segment, 0, 4096, 8192))
    done(workers[0], 1)
    assert released == [False, False, True, False, False, True]


def test_ranks_reports_are_merged() -> None:
    ours = WorkerMetadata(completed_jobs={1: 1, 2: 1}, failures={7: "expired"})
    theirs = WorkerMetadata(completed_jobs={1: 1}, failures={8: "segment"})
    merged = ours.aggregate(theirs)
    assert merged.completed_jobs == {1: 2, 2: 1}
    assert merged.failures == {7: "expired", 8: "segment"}
