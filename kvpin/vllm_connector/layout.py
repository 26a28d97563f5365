"""How one object holds a chunk: a slot for each rank, and in it the pages of the group's layers.

    | slot of rank 0 | slot of rank 1 | ... |     slot: | layer 0: blocks_per_chunk pages | layer 1: ... | ... |

The scheduler needs only the sizes; a worker computes rows of addresses from it (see pages.py).
"""

from dataclasses import dataclass

from vllm.v1.kv_offload.config import OffloadingConfig

from kvpin.errors import ConfigError
from kvpin.limits import OBJECT_BYTES_MAX


@dataclass(frozen=True)
class ObjectLayout:
    """`slots`: 1 if all ranks hold the same bytes (pure MLA under tensor parallelism), else the number of ranks."""

    slot_bytes: int
    slots: int
    blocks_per_chunk: int

    @property
    def object_bytes(self) -> int:
        return self.slot_bytes * self.slots


def object_layout(config: OffloadingConfig) -> ObjectLayout:
    """The layout for this engine. Raises ConfigError where its blocks have no size that all ranks agree on."""
    if config.worker_kv_bytes_per_block <= 0:
        raise ConfigError("kvpin can't size this model's KV blocks: vLLM reports none that can be offloaded")
    layout = ObjectLayout(
        slot_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        slots=1 if config.replicated_layout else config.parallel.world_size,
        blocks_per_chunk=config.cache.blocks_per_chunk,
    )
    if layout.object_bytes > OBJECT_BYTES_MAX:
        raise ConfigError(
            f"one chunk takes {layout.object_bytes} bytes, more than {OBJECT_BYTES_MAX}: "
            f"lower 'blocks_per_chunk' or 'block_size' in kv_connector_extra_config"
        )
    return layout
