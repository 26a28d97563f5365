"""From settings to bytes: how large the pool is, and what may be promised of it."""

from kvpin.config import Loaded, MasterConfig
from kvpin.errors import ConfigError, SegmentError
from kvpin.limits import PAGE_BYTES, POOL_AUTO_SHARE, POOL_BYTES_AUTO_MAX, POOL_BYTES_MIN
from kvpin.master.core.config import CoreConfig
from kvpin.memory import available_bytes
from kvpin.segment import free_bytes
from kvpin.sizes import parse_share, parse_size

_SIZING = ("pool_size", "guaranteed_limit", "high_watermark", "low_watermark", "headroom")


def core_config(loaded: Loaded[MasterConfig]) -> CoreConfig:
    """The core's settings: sizes in bytes. Raises ConfigError."""
    config, size_bytes = loaded.config, pool_bytes(loaded)
    try:
        return CoreConfig(
            pool_bytes=size_bytes,
            guaranteed_limit_bytes=parse_share(config.guaranteed_limit, size_bytes, loaded.named("guaranteed_limit")),
            high_watermark=config.high_watermark,
            low_watermark=config.low_watermark,
            headroom=config.headroom,
            cache_quotas=_quotas(loaded, "cache_quotas", size_bytes),
            tenant_quotas=_quotas(loaded, "tenant_quotas", size_bytes),
            put_timeout_ms=config.put_timeout_ms,
            quarantine_ms=config.quarantine_ms,
            lease_ms_max=config.lease_ms_max,
            ttl_ms_max=config.ttl_ms_max,
        )
    except ConfigError as error:
        # What the core refuses is sizes and shares that don't fit each other: it takes all of them to judge.
        given = [f"{name} = {getattr(config, name)!r} ({loaded.origins[name]})" for name in _SIZING]
        raise ConfigError(f"{error}. The settings: {', '.join(given)}") from error


def pool_bytes(loaded: Loaded[MasterConfig]) -> int:
    """The pool's size in whole pages. Raises ConfigError."""
    text, name = loaded.config.pool_size, loaded.named("pool_size")
    size_bytes = _auto_bytes(loaded) if text == "auto" else parse_size(text, name)
    if size_bytes < POOL_BYTES_MIN:
        raise ConfigError(f"{name} = {text!r}: give at least {POOL_BYTES_MIN >> 20}MiB")
    return size_bytes - size_bytes % PAGE_BYTES


def _auto_bytes(loaded: Loaded[MasterConfig]) -> int:
    directory = loaded.config.segment_dir
    try:
        free = free_bytes(directory)
    except SegmentError as error:
        raise ConfigError(f"{loaded.origins['segment_dir']}: {error}") from error
    available = available_bytes()
    free = free if available is None else min(free, available)
    size_bytes = min(int(free * POOL_AUTO_SHARE), POOL_BYTES_AUTO_MAX)
    if size_bytes < POOL_BYTES_MIN:
        raise ConfigError(
            f"{loaded.named('pool_size')} = 'auto': {directory} can hold {free} bytes ({free >> 20} MiB), and a "
            f"quarter of it is less than the {POOL_BYTES_MIN >> 20} MiB of the smallest pool: enlarge it (docker run "
            "--shm-size=8g; Docker's default is 64 MB), or give pool_size"
        )
    return size_bytes


def _quotas(loaded: Loaded[MasterConfig], name: str, whole_bytes: int) -> dict[str, int]:
    quotas: dict[str, str] = getattr(loaded.config, name)
    return {owner: parse_share(text, whole_bytes, f"{loaded.named(name)}[{owner!r}]") for owner, text in quotas.items()}
