"""Copies between CUDA memory and the segment: pinned once, one side stream a direction, vLLM's own batched copy."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, TransferResult
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from kvpin.segment import Segment
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.pages import Rows
from kvpin.vllm_connector.worker import Job, KVPinWorker

logger = logging.getLogger(__name__)


@dataclass
class _Transfer:
    """A copy on its stream. `rows` keeps the descriptors alive until it has ended."""

    job: Job
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    size_bytes: int
    started: torch.Event
    ended: torch.Event


class CudaWorker(KVPinWorker):
    """KV blocks in GPU memory. Everything runs on the engine's thread; only the GPU works beside it."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: ObjectLayout,
        slot: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(kv_caches, layout, slot, clock)
        self._stores: deque[_Transfer] = deque()
        self._loads: deque[_Transfer] = deque()
        self._store_stream = current_platform.Stream()
        self._load_stream = current_platform.Stream()
        self._pinned = False

    def start(self, job: Job) -> None:
        try:
            rows = self.rows(job)
            if job.store:
                self._stores.append(self._launch(job, rows, self._store_stream))
            else:
                self._loads.append(self._launch(job, rows, self._load_stream))
        except Exception as error:
            self.finish(job, 0, 0.0, error)

    def get_finished(self) -> list[TransferResult]:
        for transfers in (self._stores, self._loads):
            while transfers and transfers[0].ended.query():
                self._ended(transfers.popleft())
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs have ended on the GPU."""
        for transfer in (*self._stores, *self._loads):
            if transfer.job.job_id in job_ids:
                transfer.ended.synchronize()

    def shutdown(self) -> None:
        self._drain()
        self.unmap()

    def mapping_added(self, segment: Segment) -> None:
        # In one piece: a copy must not straddle two registrations. Unpinned copies work too, only slower.
        self._pinned = host_register(segment.address, segment.size_bytes)

    def mapping_removed(self, segment: Segment) -> None:
        self._drain()
        if self._pinned:
            host_unregister(segment.address)
            self._pinned = False

    def _launch(self, job: Job, rows: Rows, stream: torch.cuda.Stream) -> _Transfer:
        engine = torch.from_numpy(rows.engine.view(np.int64))
        segment = torch.from_numpy(rows.object.view(np.int64))
        size = torch.from_numpy(rows.size)
        source, target = (engine, segment) if job.store else (segment, engine)
        transfer = _Transfer(
            job, (source, target, size), rows.bytes, torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        )
        # A store reads what the model has just written; a load overwrites blocks that may still be being zeroed.
        stream.wait_stream(current_platform.current_stream())
        with current_platform.stream(stream):
            transfer.started.record(stream)
            # Host memory under a lease never changes, so its reads may run ahead; those of the KV cache may not.
            ops.swap_blocks_batch(source, target, size, is_src_access_order_any=not job.store)
            transfer.ended.record(stream)
        return transfer

    def _ended(self, transfer: _Transfer) -> None:
        seconds = transfer.started.elapsed_time(transfer.ended) / 1000
        failure: Exception | None = None
        try:
            self.check_deadline(transfer.job.spec)
        except Exception as error:
            failure = error
        self.finish(transfer.job, transfer.size_bytes, seconds, failure)

    def _drain(self) -> None:
        for transfer in (*self._stores, *self._loads):
            transfer.ended.synchronize()
