"""kv_connector_extra_config: ours, vLLM's, and nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from engine import KV_TRANSFER, engine
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvpin import vllm_connector
from kvpin.errors import ConfigError
from kvpin.vllm_connector import connector
from kvpin.vllm_connector.settings import client_config
from kvpin.vllm_connector.spec import KVPinSpec


def test_our_keys_reach_the_client_and_vllms_are_left_alone() -> None:
    config = client_config(
        {"lease_ms": 3000, "address": "ipc:///x", "blocks_per_chunk": 2, "offload_prompt_only": False}
    )
    assert (config.lease_ms, config.address, config.put_deadline_ms) == (3000, "ipc:///x", 10)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"lease_msec": 1}, r"unknown key 'lease_msec'; did you mean 'lease_ms'\?"),
        ({"zzz": 1}, r"unknown key 'zzz'; known keys: address, .*blocks_per_chunk"),
        ({"lease_ms": "long"}, r"kv_connector_extra_config: lease_ms = 'long': give 1 to 60000 ms"),
        ({"canonical_layout": True}, r"does not support 'canonical_layout'"),
    ],
)
def test_anything_else_is_a_clear_error(extra: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        client_config(extra)


def transfer(**extra: object) -> SimpleNamespace:
    config = KVTransferConfig(**KV_TRANSFER, kv_connector_extra_config=dict(extra))
    return SimpleNamespace(kv_transfer_config=config, parallel_config=SimpleNamespace(nnodes_within_dp=1))


def test_a_user_need_not_name_the_spec() -> None:
    config = transfer(lease_ms=3000)
    connector._set_defaults(config)
    assert config.kv_transfer_config.kv_connector_extra_config == {
        "lease_ms": 3000,
        "spec_name": "KVPinSpec",
        "spec_module_path": "kvpin.vllm_connector.spec",
    }
    assert OffloadingSpecFactory.get_spec_cls(config.kv_transfer_config.kv_connector_extra_config) is KVPinSpec


def test_failed_loads_are_recomputed_whatever_vllms_default() -> None:
    config = transfer()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    connector.KVPinConnector._recompute_failed_loads(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_an_engine_over_several_nodes_is_refused() -> None:
    config = transfer()
    config.parallel_config.nnodes_within_dp = 2
    with pytest.raises(ConfigError, match="memory of one host"):
        connector._set_defaults(config)


def test_a_wrong_key_stops_the_engine_before_it_serves(model: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lease_ms'"), engine(model, extra={"lease_msec": 1}):
        pass


def test_the_package_gives_the_connector_and_nothing_else() -> None:
    assert vllm_connector.KVPinConnector is connector.KVPinConnector
    with pytest.raises(AttributeError, match="KVPin"):
        vllm_connector.KVPin  # noqa: B018
