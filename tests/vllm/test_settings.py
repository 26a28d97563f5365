"""kv_connector_extra_config: ours, vLLM's, and nothing else."""

import pytest

from kvpin.errors import ConfigError
from kvpin.vllm_connector.settings import client_config


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
        ({"lease_ms": "long"}, r"kv_connector_extra_config: .*lease_ms"),
        ({"canonical_layout": True}, r"does not support 'canonical_layout'"),
    ],
)
def test_anything_else_is_a_clear_error(extra: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        client_config(extra)
