"""Namespaces: equal for equal settings, different for every part that changes the bytes."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvpin.errors import ConfigError
from kvpin.vllm_connector.identity import adapter_namespace, engine_namespace, weight_files
from kvpin.vllm_connector.layout import object_layout

OFFLOADING = OffloadingConfig(
    groups=(OffloadingGroupConfig(32, ("layers.0", "layers.1"), 0),),
    worker_kv_bytes_per_block=65536,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="one",
    model=OffloadingModelConfig("model", "float32"),
    cache=OffloadingCacheConfig(32, 1),
    parallel=OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, True),
    kv_cache_layout="LBHNC",
)
KV_CACHE = SimpleNamespace(
    kv_cache_groups=[
        SimpleNamespace(
            kv_cache_spec=FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
        )
    ]
)


@pytest.fixture(scope="module")
def config(model: Path) -> object:
    return EngineArgs(model=str(model), dtype="float32", enforce_eager=True, block_size=32).create_engine_config()


def namespace(config: object, offloading: OffloadingConfig = OFFLOADING) -> bytes:
    return engine_namespace(config, KV_CACHE, offloading)


def changed(config: object, change: Callable[[object], None]) -> object:
    other = copy.deepcopy(config)
    change(other)
    return other


def test_equal_settings_give_equal_namespaces(config: object) -> None:
    other = dataclasses.replace(OFFLOADING, engine_id="two", enable_kv_cache_events=True)
    assert namespace(config) == namespace(copy.deepcopy(config), other)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "revision", "other"),
        lambda c: setattr(c.model_config, "dtype", torch.bfloat16),
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.model_config.hf_config, "rope_theta", 5.0),
        lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
        lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda c: setattr(c.attention_config, "backend", "other"),
        lambda c: setattr(c.parallel_config, "cp_kv_cache_interleave_size", 16),
        lambda c: setattr(c, "speculative_config", SimpleNamespace(method="eagle", model="draft")),
    ],
)
def test_each_setting_separates(config: object, change: Callable[[object], None]) -> None:
    assert namespace(changed(config, change)) != namespace(config)


@pytest.mark.parametrize(
    "change",
    [
        {"worker_kv_bytes_per_block": 1},
        {"kv_cache_layout": "BLHNC"},
        {"replicated_layout": True},
        {"cache": OffloadingCacheConfig(32, 2)},
        {"cache": OffloadingCacheConfig(16, 1)},
        {"groups": (OffloadingGroupConfig(64, ("layers.0", "layers.1"), 0),)},
        {"groups": (OffloadingGroupConfig(32, ("layers.0",), 0),)},
        {"parallel": dataclasses.replace(OFFLOADING.parallel, tp_size=1)},
        {"parallel": dataclasses.replace(OFFLOADING.parallel, world_size=4, pp_size=2)},
        {"parallel": dataclasses.replace(OFFLOADING.parallel, dcp_size=2)},
    ],
)
def test_each_part_of_the_layout_separates(config: object, change: dict) -> None:
    assert namespace(config, dataclasses.replace(OFFLOADING, **change)) != namespace(config)


def test_random_weights_separate_by_their_seed(config: object) -> None:
    def dummy(seed: int) -> Callable[[object], None]:
        def change(c: object) -> None:
            c.load_config.load_format = "dummy"
            c.model_config.seed = seed

        return change

    assert namespace(changed(config, dummy(1))) != namespace(changed(config, dummy(2)))


def test_longrope_models_separate_by_their_length(config: object) -> None:
    def length(tokens: int) -> Callable[[object], None]:
        def change(c: object) -> None:
            c.model_config.hf_config.rope_scaling = {"rope_type": "longrope"}
            c.model_config.max_model_len = tokens

        return change

    assert namespace(changed(config, length(4096))) != namespace(changed(config, length(8192)))


def test_other_weights_in_the_same_place_separate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    before = weight_files(str(tmp_path))
    assert before == weight_files(str(tmp_path))
    os.utime(weights, ns=(0, 0))
    touched = weight_files(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"a": 2}))
    assert before != touched != weight_files(str(tmp_path))


def test_a_name_on_a_hub_has_no_files() -> None:
    assert weight_files("org/model") == []


def test_adapters_separate_by_name_path_and_files(tmp_path: Path) -> None:
    base = b"b" * 16
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1234")
    adapter = LoRARequest("a", 1, str(tmp_path))
    assert adapter_namespace(base, adapter) == adapter_namespace(base, LoRARequest("a", 9, str(tmp_path)))
    others = [
        adapter_namespace(base, LoRARequest("b", 1, str(tmp_path))),
        adapter_namespace(base, LoRARequest("a", 1, str(tmp_path / "other"))),
        adapter_namespace(b"c" * 16, adapter),
        base,
    ]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345")
    others.append(adapter_namespace(base, adapter))
    (tmp_path / "adapter_model.safetensors").unlink()
    assert adapter_namespace(base, adapter) not in others
    assert len(set(others)) == len(others)


def test_unstable_hashes_are_told(
    config: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unstable = changed(config, lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"))
    assert namespace(unstable) != namespace(unstable)  # as in two processes
    assert "remedy='--prefix-caching-hash-algo sha256" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert namespace(unstable) == namespace(unstable)
    assert caplog.text == ""


def test_seeds_of_the_hash_chain_separate(config: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unset = namespace(config)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert namespace(config) != unset


def test_an_object_has_a_slot_for_each_rank_or_one_for_all() -> None:
    assert object_layout(OFFLOADING).object_bytes == 2 * 65536
    assert object_layout(dataclasses.replace(OFFLOADING, replicated_layout=True)).object_bytes == 65536
    assert object_layout(dataclasses.replace(OFFLOADING, cache=OffloadingCacheConfig(32, 3))).slot_bytes == 3 * 65536


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"worker_kv_bytes_per_block": 0}, "can't size"),
        ({"worker_kv_bytes_per_block": 1 << 30}, "lower 'blocks_per_chunk'"),
    ],
)
def test_blocks_without_a_usable_size_are_refused(change: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        object_layout(dataclasses.replace(OFFLOADING, **change))
