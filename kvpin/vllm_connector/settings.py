"""What a user may write into `kv_connector_extra_config`: the fields of ClientConfig, and vLLM's own keys."""

import difflib
from collections.abc import Mapping
from typing import Any

from kvpin import config
from kvpin.config import ClientConfig
from kvpin.errors import ConfigError

# Read by vLLM's OffloadingConnector and OffloadingSpec.
ENGINE_KEYS = frozenset({"block_size", "blocks_per_chunk", "offload_prompt_only", "spec_name", "spec_module_path"})
CLIENT_KEYS = frozenset(ClientConfig.__struct_fields__)
SOURCE = "kv_connector_extra_config"


def client_config(extra_config: Mapping[str, Any]) -> ClientConfig:
    """The client's settings: defaults < `KVPIN_*` < extra config.

    Raises ConfigError for an unknown key or a value of the wrong type.
    """
    for name in extra_config:
        if name == "canonical_layout":
            raise ConfigError(f"{SOURCE}: kvpin does not support 'canonical_layout'; remove it")
        if name not in ENGINE_KEYS | CLIENT_KEYS:
            raise ConfigError(f"{SOURCE}: unknown key {name!r}{_suggestion(name)}")
    ours = {name: value for name, value in extra_config.items() if name in CLIENT_KEYS}
    return config.client_config(ours, source=SOURCE)


def _suggestion(name: str) -> str:
    known = sorted(ENGINE_KEYS | CLIENT_KEYS)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
