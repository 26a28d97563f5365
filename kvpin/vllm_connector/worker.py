"""The worker's side: copies between the engine's KV blocks and the segment. It never talks to the master.

What may fail: the segment can't be mapped, the deadline passes, the queue is full. vLLM's worker accepts no failure, so
every transfer is reported to it as complete, and the connector asks for `take_failures` beside it.
"""

import ctypes
import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvpin.errors import LeaseExpired, SegmentError
from kvpin.limits import COPY_JOBS_MAX, FAULT_LOG_PERIOD_S, GIL_KEPT_BYTES_MAX
from kvpin.log import Throttle
from kvpin.segment import Segment
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.pages import PageTable, Rows
from kvpin.vllm_connector.transfer import TransferSpec

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One transfer of this rank."""

    job_id: int
    store: bool
    blocks: GPULoadStoreSpec
    spec: TransferSpec


class KVPinWorker(OffloadingWorker):
    """What both kinds of worker share: the mapping, the rows, and the book of failures.

    `slot`: which slot of an object is this rank's.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: ObjectLayout,
        slot: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pages = PageTable(kv_caches, layout.blocks_per_chunk, layout.slot_bytes)
        self._layout = layout
        self._slot = slot
        self._clock = clock
        self._segment: Segment | None = None
        self._results: list[TransferResult] = []
        self._failures: dict[int, str] = {}
        self._failed_loads: set[int] = set()
        self._failure_log = Throttle(FAULT_LOG_PERIOD_S)
        self._lock = threading.Lock()  # guards results and failures

    @abstractmethod
    def start(self, job: Job) -> None:
        """Copy the job's bytes soon, then `finish` it."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        with self._lock:
            results, self._results = self._results, []
        return results

    def take_failures(self) -> dict[int, str]:
        """Ticket -> reason of the transfers that ended without success since the last call."""
        with self._lock:
            failures, self._failures = self._failures, {}
        return failures

    def take_failed_loads(self) -> set[int]:
        """The job ids of the loads among them."""
        with self._lock:
            jobs, self._failed_loads = self._failed_loads, set()
        return jobs

    def rows(self, job: Job) -> Rows:
        """The job's rows. Raises LeaseExpired, SegmentError, ValueError."""
        spec = job.spec
        self.check_deadline(spec)
        if spec.slot_bytes != self._layout.slot_bytes:
            raise ValueError(f"a slot has {self._layout.slot_bytes} bytes here, {spec.slot_bytes} at the scheduler")
        segment = self._mapped(spec)
        last = segment.size_bytes - self._layout.object_bytes
        if any(not 0 <= offset <= last for offset in spec.offsets):
            raise SegmentError(f"a range lies outside the segment {spec.segment_path}")
        first_slot = segment.address + self._slot * spec.slot_bytes
        return self._pages.rows(job.blocks, np.uint64(first_slot) + np.array(spec.offsets, dtype=np.uint64))

    def check_deadline(self, spec: TransferSpec) -> None:
        if self._clock() >= spec.deadline_s:
            raise LeaseExpired("the ranges may belong to somebody else by now")

    def finish(self, job: Job, size_bytes: int, seconds: float, error: Exception | None = None) -> None:
        with self._lock:
            if error is not None:
                self._failures[job.spec.ticket] = reason_of(error)
                if not job.store:
                    self._failed_loads.add(job.job_id)
                self._results.append(TransferResult(job.job_id, True))  # no size: nothing to add to vLLM's throughput
            else:
                self._results.append(TransferResult(job.job_id, True, size_bytes, seconds))
        if error is not None:
            self._log_failure("store" if job.store else "load", error)

    def mapping_added(self, segment: Segment) -> None:
        """A new segment is mapped; the one before is closed after this."""

    def mapping_removed(self, segment: Segment) -> None:
        """A segment is about to be unmapped: nothing may use it any more."""

    def unmap(self) -> None:
        if self._segment is not None:
            self.mapping_removed(self._segment)
            self._segment.close()
            self._segment = None

    def _log_failure(self, kind: str, error: Exception) -> None:
        reason = reason_of(error)
        held = self._failure_log.admit(f"{kind} {reason}")
        if held is not None:
            logger.warning("event=%s_failed reason=%s error='%s' more_before=%d", kind, reason, error, held)

    def _submit(self, job_id: int, store: bool, blocks: GPULoadStoreSpec, spec: LoadStoreSpec) -> bool:
        if not isinstance(spec, TransferSpec):
            raise TypeError(f"not a transfer of kvpin: {type(spec).__name__}")
        self.start(Job(job_id, store, blocks, spec))
        return True

    def _mapped(self, spec: TransferSpec) -> Segment:
        """The spec's segment. Only the newest stays mapped: an old epoch's memory is free once nobody maps it."""
        if self._segment is None or (self._segment.path, self._segment.epoch) != (spec.segment_path, spec.epoch):
            segment = Segment.attach(spec.segment_path, spec.epoch)
            self.unmap()
            self._segment = segment
            self.mapping_added(segment)
        return self._segment


class CpuWorker(KVPinWorker):
    """KV blocks in host memory: one thread copies, in the order of submission."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: ObjectLayout,
        slot: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(kv_caches, layout, slot, clock)
        self._queue: queue.Queue[Job | None] = queue.Queue(COPY_JOBS_MAX)
        self._done = threading.Condition()
        self._running: set[int] = set()
        self._thread = threading.Thread(target=self._copy_loop, name="kvpin-copy", daemon=True)
        self._thread.start()

    def start(self, job: Job) -> None:
        with self._done:
            self._running.add(job.job_id)
        try:
            self._queue.put_nowait(job)
        except queue.Full as error:
            self._ended(job, 0, 0.0, error)

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs have ended. Bounded by their deadlines, at which copying stops."""
        with self._done:
            self._done.wait_for(lambda: self._running.isdisjoint(job_ids))

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self.unmap()

    def _copy_loop(self) -> None:
        while (job := self._queue.get()) is not None:
            started_s = time.perf_counter()
            size_bytes = 0
            failure: Exception | None = None
            try:
                rows = self.rows(job)
                self._copy(job, rows)
                size_bytes = rows.bytes
            except Exception as error:
                failure = error
            self._ended(job, size_bytes, time.perf_counter() - started_s, failure)

    def _copy(self, job: Job, rows: Rows) -> None:
        sources, targets = (rows.engine, rows.object) if job.store else (rows.object, rows.engine)
        kept_bytes = 0
        for source, target, size in zip(sources.tolist(), targets.tolist(), rows.size.tolist(), strict=True):
            self.check_deadline(job.spec)
            kept_bytes += size
            release_gil = kept_bytes > GIL_KEPT_BYTES_MAX
            copy_bytes(target, source, size, release_gil)
            if release_gil:
                kept_bytes = 0
        self.check_deadline(job.spec)

    def _ended(self, job: Job, size_bytes: int, seconds: float, error: Exception | None) -> None:
        self.finish(job, size_bytes, seconds, error)
        with self._done:
            self._running.discard(job.job_id)
            self._done.notify_all()


_memmove_keeping_gil = ctypes.PyDLL(None).memmove
_memmove_keeping_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_keeping_gil.restype = ctypes.c_void_p


def copy_bytes(target: int, source: int, size: int, release_gil: bool) -> None:
    """Memmove by address.

    Giving up the GIL for every short row costs far more than the rows: beside a busy interpreter it takes the switch
    interval of 5 ms to get it back. Never giving it up would stall the scheduler for that long.
    """
    (ctypes.memmove if release_gil else _memmove_keeping_gil)(target, source, size)


def reason_of(error: Exception) -> str:
    """The counters' word for a failed copy."""
    match error:
        case LeaseExpired():
            return "expired"
        case SegmentError():
            return "segment"
        case queue.Full():
            return "queue_full"
    return "fault"
