"""vLLM's entry to both sides: the manager for the scheduler, a worker for each rank."""

import logging
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvpin import config as kvpin_config
from kvpin.client import Client
from kvpin.errors import ConfigError
from kvpin.http import sidefield
from kvpin.limits import NAME_BYTES_MAX
from kvpin.vllm_connector import metrics
from kvpin.vllm_connector.layout import object_layout
from kvpin.vllm_connector.manager import KVPinManager
from kvpin.vllm_connector.settings import client_config
from kvpin.vllm_connector.worker import CpuWorker, KVPinWorker

logger = logging.getLogger(__name__)


class KVPinSpec(OffloadingSpec):
    """Raises ConfigError for settings that are unknown or can't work."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.DEFINITIONS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.client_config = client_config(config.extra_config)
        self.replicated_layout = config.replicated_layout
        self.layout = object_layout(config)

    def get_manager(self) -> KVPinManager:
        name = f"vllm-{self.config.engine_id}".encode()[:NAME_BYTES_MAX].decode(errors="ignore")
        client = Client(config=self.client_config, name=name, writer=False)
        return KVPinManager(client, self.client_config, self.layout, _side_field_key())

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVPinWorker:
        slot = 0 if self.replicated_layout else self.config.parallel.rank
        if current_platform.is_cuda():
            from kvpin.vllm_connector.cuda import CudaWorker

            return CudaWorker(kv_caches, self.layout, slot)
        if current_platform.is_cpu():
            return CpuWorker(kv_caches, self.layout, slot)
        raise ConfigError(f"kvpin copies from CUDA and CPU memory, not from {current_platform.device_type}")


def _side_field_key() -> bytes:
    try:
        return sidefield.load_key(kvpin_config.run_dir())
    except ConfigError as error:
        logger.warning("event=no_side_field_key effect='marked prefixes are not protected' error='%s'", error)
        return b""
