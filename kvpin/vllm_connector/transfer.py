"""What travels between the scheduler and its workers: where to copy, until when, and what failed."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True)
class TransferSpec(LoadStoreSpec):
    """The segment's side of one transfer, for all ranks.

    `offsets`: bytes from the start of the data area, one a key, in the order of the engine's blocks. After `deadline_s`
    (`time.monotonic()`, one clock for all processes of a host) the ranges may belong to somebody else.
    """

    ticket: int
    segment_path: str
    epoch: int
    offsets: tuple[int, ...]
    slot_bytes: int
    deadline_s: float


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions, and the reason for each transfer that completed without success, by ticket."""

    failures: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Merge the reports of two ranks: a transfer failed if any rank failed."""
        merged = super().aggregate(other)
        theirs = other.failures if isinstance(other, WorkerMetadata) else {}
        return WorkerMetadata(merged.completed_jobs, merged.transfer_stats, {**self.failures, **theirs})
