"""The vLLM adapter: `--kv-transfer-config '{"kv_connector": "KVPinConnector",
"kv_connector_module_path": "kvpin.vllm_connector", "kv_role": "kv_both"}'`.
"""

from typing import TYPE_CHECKING

__all__ = ["KVPinConnector"]

if TYPE_CHECKING:
    from kvpin.vllm_connector.connector import KVPinConnector


def __getattr__(name: str) -> object:
    # Lazy: the API server imports kvpin.vllm_connector.plugin and needs no connector.
    if name == "KVPinConnector":
        from kvpin.vllm_connector.connector import KVPinConnector

        return KVPinConnector
    raise AttributeError(name)
