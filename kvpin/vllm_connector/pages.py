"""From block ids to addresses: the rows (engine address, object address, size) that one transfer copies."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from kvpin.errors import ConfigError

Addresses: TypeAlias = "npt.NDArray[np.uint64]"


@dataclass(frozen=True)
class Rows:
    """Parallel arrays. Sizes in bytes."""

    engine: Addresses
    object: Addresses
    size: npt.NDArray[np.int64]

    @property
    def bytes(self) -> int:
        return int(self.size.sum())


@dataclass(frozen=True)
class _PageSource:
    """The pages of one layer (or of layers that share a tensor)."""

    address: int
    stride_bytes: int  # from one block's page to the next
    page_bytes: int
    slot_offset: int  # of the layer's first page in a slot
    blocks: int


class PageTable:
    """Where this rank's pages lie, in the engine and in an object. Raises ConfigError if a slot can't hold them."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, slot_bytes: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._groups: list[list[_PageSource]] = []
        for index, refs in enumerate(kv_caches.group_data_refs):
            offset = 0
            sources = []
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx].tensor
                sources.append(
                    _PageSource(tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes, offset, tensor.shape[0])
                )
                offset += ref.page_size_bytes * blocks_per_chunk
            if offset > slot_bytes:
                raise ConfigError(
                    f"KV cache group {index} of this rank needs {offset} bytes a chunk, but vLLM reports {slot_bytes}: "
                    f"kvpin does not support pipeline stages or layouts of unequal size"
                )
            self._groups.append(sources)

    def rows(self, blocks: GPULoadStoreSpec, slots: Addresses) -> Rows:
        """The rows for the engine's `blocks`; `slots`: the address of this rank's slot in each object, in order.

        A group's first chunk may be partial: `block_indices` says at which of its blocks it starts.
        """
        if len(blocks.group_sizes) != len(self._groups):
            raise ValueError(f"{len(blocks.group_sizes)} groups in the transfer, {len(self._groups)} in the cache")
        parts: list[Rows] = []
        block_at = slot_at = 0
        for sources, count, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            position = first % self._blocks_per_chunk + np.arange(count, dtype=np.uint64)
            chunk, page = np.divmod(position, np.uint64(self._blocks_per_chunk))
            ids = blocks.block_ids[block_at : block_at + count].astype(np.uint64)
            group_slots = slots[slot_at : slot_at + int(chunk[-1]) + 1]
            parts += [_layer_rows(source, ids, group_slots[chunk], page) for source in sources]
            block_at += count
            slot_at += int(chunk[-1]) + 1
        if block_at != len(blocks.block_ids) or slot_at != len(slots):
            raise ValueError(f"{len(slots)} objects don't match {len(blocks.block_ids)} blocks")
        return _coalesced(parts)


def _layer_rows(source: _PageSource, ids: Addresses, slots: Addresses, page: Addresses) -> Rows:
    if int(ids.max()) >= source.blocks:
        raise ValueError(f"block {int(ids.max())} of {source.blocks}")
    return Rows(
        engine=np.uint64(source.address) + ids * np.uint64(source.stride_bytes),
        object=slots + np.uint64(source.slot_offset) + page * np.uint64(source.page_bytes),
        size=np.full(len(ids), source.page_bytes, dtype=np.int64),
    )


def _coalesced(parts: list[Rows]) -> Rows:
    """All rows, with neighbours joined that continue each other on both sides."""
    if not parts:
        none: Addresses = np.empty(0, dtype=np.uint64)
        return Rows(none, none, np.empty(0, dtype=np.int64))
    engine = np.concatenate([rows.engine for rows in parts])
    object_ = np.concatenate([rows.object for rows in parts])
    size = np.concatenate([rows.size for rows in parts])
    step = size[:-1].astype(np.uint64)
    starts = np.concatenate([[True], (engine[:-1] + step != engine[1:]) | (object_[:-1] + step != object_[1:])])
    first = np.flatnonzero(starts)
    return Rows(engine[first], object_[first], np.add.reduceat(size, first))
