"""The connector that vLLM loads: its own OffloadingConnector with our spec, and what that one leaves out.

Added here: lookups are asked when a request arrives; failed copies are reported instead of asserted away; stores under
way during a reset are revoked. Reading vLLM's scheduler-side state (`_req_status`, `_jobs`, `_load_jobs`) is confined
to this file.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvpin.errors import ConfigError
from kvpin.vllm_connector.identity import adapter_namespace, engine_namespace
from kvpin.vllm_connector.manager import KVPinManager
from kvpin.vllm_connector.transfer import WorkerMetadata
from kvpin.vllm_connector.worker import KVPinWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class Orphan:
    """A store that vLLM forgot in `reset_cache` while ranks were still copying."""

    ranks_left: int
    tickets: list[int]


class KVPinConnector(OffloadingConnector):
    """Raises ConfigError for settings that are unknown or can't work. Nothing else of ours raises."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        _set_defaults(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._orphans: dict[int, Orphan] = {}
        self._adapters: dict[tuple[str, str, int], bytes] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._recompute_failed_loads(vllm_config)
            offloading = build_offloading_config(vllm_config, kv_cache_config)
            self._namespace = engine_namespace(vllm_config, kv_cache_config, offloading)
            ready = self.manager.client.wait_ready(self.manager.config.connect_timeout_ms)
            logger.info("event=connector_started namespace=%s master_ready=%s", self._namespace.hex(), ready)

    @property
    def manager(self) -> KVPinManager:
        manager = self.scheduler.manager
        assert isinstance(manager, KVPinManager)
        return manager

    # --- scheduler side -------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        super().on_new_request(request)
        status = self.scheduler._req_status[request.request_id]
        self.manager.arrived(status.req_context, lambda: self._namespace_of(request), lambda: _chain(status))

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        status = self.scheduler._req_status[request.request_id]
        if not status.transfer_jobs and not request.skip_reading_prefix_cache:
            self.manager.refresh(status.req_context, lambda: _chain(status))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self.manager.note_failures(meta.failures)
            for job_id, count in meta.completed_jobs.items():
                self._orphan_progress(job_id, count)
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        """Forget all that this engine stored. False if the master doesn't confirm it.

        Open windows survive: an engine has no right to end a guarantee. To drop those too (the model's weights were
        replaced in place, say), expire their prefixes with mode `delete`.
        """
        for job_id, job in self.scheduler._jobs.items():
            if job.is_store:
                context = self.scheduler._req_status[job.req_id].req_context
                self._orphans[job_id] = Orphan(job.pending_count, self.manager.disown(context, job.keys))
        super().reset_cache()
        return self.manager.reset_confirmed

    # --- worker side ----------------------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """A failed load is a failed request here and not a set of blocks: block ids are ambiguous in hybrid models."""
        assert self.connector_worker is not None
        loading = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        worker = self.connector_worker.worker
        if isinstance(worker, KVPinWorker):
            results.failed_recving |= {loading[job_id] for job_id in worker.take_failed_loads() if job_id in loading}
        return results

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        if meta is None or self.connector_worker is None:
            return None
        worker = self.connector_worker.worker
        failures = worker.take_failures() if isinstance(worker, KVPinWorker) else {}
        return WorkerMetadata(meta.completed_jobs, meta.transfer_stats, failures)

    # --- API server -----------------------------------------------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> "KVConnectorPromMetrics":
        _set_defaults(vllm_config)  # this process makes no connector of its own
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _namespace_of(self, request: "Request") -> bytes:
        lora = request.lora_request
        if lora is None:
            return self._namespace
        adapter = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        if adapter not in self._adapters:
            self._adapters[adapter] = adapter_namespace(self._namespace, lora)
        return self._adapters[adapter]

    def _orphan_progress(self, job_id: int, ranks: int) -> None:
        orphan = self._orphans.get(job_id)
        if orphan is None:
            return
        orphan.ranks_left -= ranks
        if orphan.ranks_left <= 0:
            del self._orphans[job_id]
            for ticket in orphan.tickets:
                self.manager.orphan_ended(ticket)

    @staticmethod
    def _recompute_failed_loads(vllm_config: "VllmConfig") -> None:
        """By default vLLM fails a request whose load failed. The scheduler reads the policy after this."""
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            logger.info("event=policy kv_load_failure_policy=recompute reason='a cache never fails a request'")
            transfer.kv_load_failure_policy = "recompute"


def _set_defaults(vllm_config: "VllmConfig") -> None:
    """What a user need not write: which OffloadingSpec to load."""
    transfer = vllm_config.kv_transfer_config
    if vllm_config.parallel_config.nnodes_within_dp > 1:
        raise ConfigError("kvpin's segment is memory of one host: an engine over several nodes can't use it")
    transfer.kv_connector_extra_config.setdefault("spec_name", "KVPinSpec")
    transfer.kv_connector_extra_config.setdefault("spec_module_path", "kvpin.vllm_connector.spec")


def _chain(status: RequestOffloadState) -> "list[OffloadKey]":
    """All keys of the request so far, of every group, root first."""
    status.update_offload_keys()
    keys = [key for group in status.group_states for key in group.offload_keys]
    if len(status.group_states) > 1:
        keys.sort(key=lambda key: status.req_context.get_offload_key_position(key) or 0)
    return keys
