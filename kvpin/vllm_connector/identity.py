"""The namespace of an engine's objects: a fingerprint of all that must be equal for KV bytes to be interchangeable.

Computed where the scheduler runs, from configuration alone, so every process with the same settings gets the same one.
When in doubt a part is in: a needless difference costs misses, a missing one wrong output.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_offload.config import OffloadingConfig

from kvpin.keys import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


def engine_namespace(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", offloading: OffloadingConfig
) -> bytes:
    """The namespace for requests without an adapter (16 bytes)."""
    parts = {
        "engine": ["vllm", *vllm.__version__.split(".")[:2]],
        "device": current_platform.device_type,
        "model": _model(vllm_config),
        "cache": _cache(vllm_config, kv_cache_config, offloading),
        "parallel": _parallel(vllm_config, offloading),
        "hash": _hash(vllm_config),
    }
    namespace = fingerprint(parts)
    logger.info("event=namespace namespace=%s model=%s", namespace.hex(), offloading.model.name)
    return namespace


def adapter_namespace(base: bytes, lora: "LoRARequest") -> bytes:
    """The namespace of one LoRA adapter. vLLM's block hashes know its name and path, but not its files."""
    return fingerprint(
        {"base": base.hex(), "lora": [lora.lora_name, lora.lora_path], "files": weight_files(lora.lora_path)}
    )


def weight_files(path: str) -> list[list[object]]:
    """Name, size and change time of each weight file of a local model, and the hash of its config.json."""
    folder = Path(path)
    if folder.is_file():
        return [_stat(folder)]
    if not folder.is_dir():
        return []  # a name on a hub: its revision identifies it
    files = [_stat(file) for file in sorted(folder.iterdir()) if file.suffix in WEIGHT_SUFFIXES]
    config = folder / "config.json"
    if config.is_file():
        files.append(["config.json", hashlib.sha256(config.read_bytes()).hexdigest()])
    return files


def _stat(file: Path) -> list[object]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]


def _model(vllm_config: "VllmConfig") -> dict[str, Any]:
    model = vllm_config.model_config
    config_text = model.hf_config.to_json_string(use_diff=False)
    load_format = str(vllm_config.load_config.load_format)
    return {
        "name": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "files": weight_files(model.model),
        "load_format": load_format,
        "seed": model.seed if load_format.endswith("dummy") else None,  # random weights
        "config": hashlib.sha256(config_text.encode()).hexdigest(),
        # Such models choose their rotary factors by the length that the engine was started with.
        "max_model_len": model.max_model_len if "longrope" in config_text else None,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "speculative": _described(vllm_config.speculative_config, "method", "model", "revision"),
    }


def _cache(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", offloading: OffloadingConfig) -> dict[str, Any]:
    attention = vllm_config.attention_config
    groups = [
        {
            "id": group.group_id,
            "tokens_per_block": group.tokens_per_block,
            "layers": group.layer_names,
            "spec": repr(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
        }
        for group in offloading.groups
    ]
    return {
        "dtype": str(vllm_config.cache_config.cache_dtype),
        "layout": offloading.kv_cache_layout,
        "attention_backend": [str(attention.backend), str(sorted(attention.backend_per_kind.items()))],
        "groups": groups,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "worker_kv_bytes_per_block": offloading.worker_kv_bytes_per_block,
        "replicated": offloading.replicated_layout,
    }


def _parallel(vllm_config: "VllmConfig", offloading: OffloadingConfig) -> list[int]:
    sizes = offloading.parallel
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return [sizes.world_size, sizes.tp_size, sizes.pp_size, sizes.pcp_size, sizes.dcp_size, interleave]


def _hash(vllm_config: "VllmConfig") -> dict[str, str]:
    """The first link of the block hash chain. vLLM makes its own only after the connector, hence computed here."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        logger.warning(
            "event=unstable_hashes algorithm=%s effect='nothing is shared with other processes or kept over a restart' "
            "remedy='--prefix-caching-hash-algo sha256, or the same PYTHONHASHSEED for all engines'",
            algorithm,
        )
    hash_function = get_hash_fn_by_name(algorithm)
    return {"algorithm": algorithm, "none_hash": hash_function(resolve_none_hash_seed(hash_function)).hex()}


def _described(config: object, *names: str) -> dict[str, str] | None:
    return None if config is None else {name: str(getattr(config, name, None)) for name in names}
