"""The CUDA worker: the same copies as the CPU worker's, from and to GPU memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes import Clock
from test_pages import caches
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from kvpin.segment import Segment
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.transfer import TransferSpec
from kvpin.vllm_connector.worker import KVPinWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and vLLM's CUDA build"),
]

PAGE_BYTES = 4096
LAYOUT = ObjectLayout(slot_bytes=2 * PAGE_BYTES, slots=1, blocks_per_chunk=1)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = Segment.create(str(tmp_path / "segment"), 1 << 20, 1)
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def kv() -> CanonicalKVCaches:
    made = caches([[PAGE_BYTES, PAGE_BYTES]])
    for each in made.tensors:
        each.tensor = each.tensor.cuda()
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(kv: CanonicalKVCaches, clock: Clock) -> Iterator[KVPinWorker]:
    from kvpin.vllm_connector.cuda import CudaWorker

    made = CudaWorker(kv, LAYOUT, 0, clock)
    yield made
    made.shutdown()


def spec(segment: Segment, *offsets: int) -> TransferSpec:
    return TransferSpec(1, segment.path, 1, offsets, LAYOUT.slot_bytes, 2000.0)


def test_pages_go_to_the_segment_and_come_back(worker: KVPinWorker, kv: CanonicalKVCaches, segment: Segment) -> None:
    expected = torch.cat([each.tensor[3] for each in kv.tensors]).cpu()
    worker.submit_store(1, GPULoadStoreSpec([3, 7], [2], [0]), spec(segment, 8192, 0))
    worker.wait({1})
    assert [result.transfer_size for result in worker.get_finished()] == [4 * PAGE_BYTES]
    assert bytes(segment.view(8192, 2 * PAGE_BYTES)) == expected.numpy().tobytes()
    worker.submit_load(2, spec(segment, 8192), GPULoadStoreSpec([0], [1], [0]))
    worker.wait({2})
    worker.get_finished()
    assert torch.cat([each.tensor[0] for each in kv.tensors]).cpu().equal(expected)
    assert worker.take_failures() == {}


def test_a_copy_that_ends_after_its_deadline_failed(worker: KVPinWorker, segment: Segment, clock: Clock) -> None:
    worker.submit_load(1, spec(segment, 0), GPULoadStoreSpec([0], [1], [0]))
    worker.wait({1})
    clock.advance_ms(10_000_000)
    assert [result.success for result in worker.get_finished()] == [True]
    assert worker.take_failures() == {1: "expired"}
    assert worker.take_failed_loads() == {1}
