"""The connector's counters, on their way to vLLM's Prometheus endpoint.

The scheduler's side counts; `drain` hands the increments to vLLM, which adds them up in the API server. The names
start with `vllm:` because vLLM unregisters only such before it makes another engine in the same process.
"""

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

LOOKUPS = "vllm:kvpin_lookups"
LOOKUP_BLOCKS = "vllm:kvpin_lookup_blocks"
STORE_BLOCKS = "vllm:kvpin_store_blocks"
GRANTS = "vllm:kvpin_grants"
TRANSFER_FAILURES = "vllm:kvpin_transfer_failures"
SIDE_FIELDS_REJECTED = "vllm:kvpin_side_fields_rejected"
FAULTS = "vllm:kvpin_faults"
CONNECTED = "vllm:kvpin_connected"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    LOOKUPS: OffloadingCounterMetadata(
        "Batched lookups by outcome: answered, or why all their blocks were a miss.", ("outcome",)
    ),
    LOOKUP_BLOCKS: OffloadingCounterMetadata("Blocks asked for by result: hit or miss.", ("result",)),
    STORE_BLOCKS: OffloadingCounterMetadata(
        "Blocks offered for storing by outcome: granted, then stored, failed or lost; or why nothing was written.",
        ("outcome",),
    ),
    GRANTS: OffloadingCounterMetadata("Guarantees asked for blocks of marked prefixes by outcome.", ("outcome",)),
    TRANSFER_FAILURES: OffloadingCounterMetadata(
        "Copies that failed, by direction and reason.", ("direction", "reason")
    ),
    SIDE_FIELDS_REJECTED: OffloadingCounterMetadata("Requests whose kvpin side field was malformed or not signed."),
    FAULTS: OffloadingCounterMetadata("Faults in the connector that were turned into misses.", ("entry",)),
    CONNECTED: OffloadingGaugeMetadata("1 while the kvpin master can be used, 0 while its circuit breaker is open."),
}


class Counters:
    """Increments since the last `drain`. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._increments: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._connected: bool | None = None

    def add(self, name: str, *labels: str, count: int = 1) -> None:
        if count:
            self._increments[name, labels] += count
            self.totals[name, labels] += count

    def drain(self, connected: bool) -> OffloadingConnectorStats | None:
        """What changed since the last call, or None."""
        if not self._increments and connected == self._connected:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), count in self._increments.items():
            stats.increase_counter(name, count, labels)
        if connected != self._connected:
            stats.set_gauge(CONNECTED, int(connected))
        self._increments.clear()
        self._connected = connected
        return stats
