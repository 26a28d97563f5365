"""Rows of addresses against a naive copy, for random groups, chunks and block ids."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvpin.errors import ConfigError
from kvpin.vllm_connector.pages import PageTable, Rows

BLOCKS = 12


def caches(page_bytes: list[list[int]], padding_bytes: int = 0) -> CanonicalKVCaches:
    """One tensor a layer, filled with random bytes; `page_bytes[group][layer]`."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    groups = []
    for group in page_bytes:
        refs = []
        for size in group:
            page = size + padding_bytes
            data = torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8, generator=generator)
            tensors.append(CanonicalKVCacheTensor(data, page))
            refs.append(CanonicalKVCacheRef(len(tensors) - 1, size))
        groups.append(refs)
    return CanonicalKVCaches(tensors, groups)


def copy(rows: Rows) -> None:
    for source, target, size in zip(rows.engine.tolist(), rows.object.tolist(), rows.size.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[list[int]], int, int, list[list[int]], list[int]]:
    groups = draw(st.lists(st.lists(st.sampled_from([8, 24, 32]), min_size=1, max_size=3), min_size=1, max_size=3))
    per_chunk = draw(st.integers(1, 4))
    blocks = [draw(st.lists(st.integers(0, BLOCKS - 1), max_size=9)) for _ in groups]
    first = [draw(st.integers(0, 9)) for _ in groups]
    return groups, draw(st.sampled_from([0, 16])), per_chunk, blocks, first


@settings(deadline=None)
@given(transfers())
def test_rows_put_every_page_where_the_layout_says(case: tuple) -> None:
    groups, padding, per_chunk, blocks, first = case
    kv = caches(groups, padding)
    slot_bytes = max(sum(group) for group in groups) * per_chunk
    chunks = [-(-(len(ids) + at % per_chunk) // per_chunk) if ids else 0 for ids, at in zip(blocks, first, strict=True)]
    memory = np.zeros((sum(chunks), slot_bytes), dtype=np.int8)
    expected = memory.copy()
    row = 0
    for group, ids, at, count in zip(kv.group_data_refs, blocks, first, chunks, strict=True):
        for index, block in enumerate(ids, at % per_chunk):
            offset = 0
            for ref in group:
                size = ref.page_size_bytes
                start = offset + index % per_chunk * size
                page = kv.tensors[ref.tensor_idx].tensor[block, :size].numpy()
                expected[row + index // per_chunk, start : start + size] = page
                offset += size * per_chunk
        row += count

    slots = memory.ctypes.data + np.arange(sum(chunks), dtype=np.uint64) * np.uint64(slot_bytes)
    spec = GPULoadStoreSpec(list(itertools.chain.from_iterable(blocks)), [len(ids) for ids in blocks], first)
    rows = PageTable(kv, per_chunk, slot_bytes).rows(spec, slots.astype(np.uint64))
    copy(rows)
    assert (memory == expected).all()
    assert rows.bytes == sum(sum(group) * len(ids) for group, ids in zip(groups, blocks, strict=True))


def test_neighbours_become_one_row() -> None:
    kv = caches([[32]])
    memory = np.zeros((1, 128), dtype=np.int8)
    rows = PageTable(kv, 4, 128).rows(
        GPULoadStoreSpec([3, 4, 5, 9], [4], [0]), np.array([memory.ctypes.data], dtype=np.uint64)
    )
    assert rows.size.tolist() == [96, 32]


def test_a_slot_that_cannot_hold_the_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group 0 .* needs 128 bytes a chunk, but vLLM reports 127"):
        PageTable(caches([[32, 32]]), 2, 127)


@pytest.mark.parametrize(
    ("blocks", "objects"),
    [([0, 1], 1), ([0], 2), ([BLOCKS], 1)],
    ids=["an object is missing", "an object too many", "no such block"],
)
def test_what_does_not_match_is_refused(blocks: list[int], objects: int) -> None:
    table = PageTable(caches([[32]]), 1, 32)
    with pytest.raises((ValueError, IndexError)):
        table.rows(GPULoadStoreSpec(blocks, [len(blocks)], [0]), np.zeros(objects, dtype=np.uint64))
