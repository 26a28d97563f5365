"""What the core is told at its start."""

import msgspec

from kvpin.errors import ConfigError
from kvpin.limits import LEASE_MS_MAX, PAGE_BYTES, PUT_TIMEOUT_MS, QUARANTINE_MS, TTL_MS_MAX


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in milliseconds, the rest fractions of the pool. Raises ConfigError if they don't fit.

    `guaranteed_limit_bytes` must stay below `(high_watermark - headroom) * pool_bytes`: otherwise open windows alone
    could hold the pool above the watermark, and ordinary writes would starve.
    """

    pool_bytes: int
    guaranteed_limit_bytes: int
    high_watermark: float = 0.95  # background eviction begins above it
    low_watermark: float = 0.90  # ... and ends below it
    headroom: float = 0.05  # kept free of guarantees below the high watermark
    cache_quotas: dict[str, int] = {}  # guaranteed bytes a cache
    tenant_quotas: dict[str, int] = {}  # guaranteed bytes a tenant
    put_timeout_ms: int = PUT_TIMEOUT_MS
    quarantine_ms: int = QUARANTINE_MS
    lease_ms_max: int = LEASE_MS_MAX
    ttl_ms_max: int = TTL_MS_MAX

    def __post_init__(self) -> None:
        if self.pool_bytes < PAGE_BYTES or self.pool_bytes % PAGE_BYTES:
            raise ConfigError(f"pool_bytes = {self.pool_bytes}: give a positive multiple of {PAGE_BYTES}")
        if not 0 < self.low_watermark < self.high_watermark <= 1:
            raise ConfigError(
                f"low_watermark = {self.low_watermark}, high_watermark = {self.high_watermark}: "
                "they must ascend within (0, 1]"
            )
        if not 0 <= self.headroom < self.high_watermark:
            raise ConfigError(f"headroom = {self.headroom}: give a fraction from 0 to below high_watermark")
        ceiling_bytes = int((self.high_watermark - self.headroom) * self.pool_bytes)
        if not 0 <= self.guaranteed_limit_bytes <= ceiling_bytes:
            raise ConfigError(
                f"guaranteed_limit_bytes = {self.guaranteed_limit_bytes}: give 0 to {ceiling_bytes}, which is "
                f"(high_watermark - headroom) of the pool; more would starve ordinary writes"
            )
        for name, quotas in (("cache_quotas", self.cache_quotas), ("tenant_quotas", self.tenant_quotas)):
            for owner, quota_bytes in quotas.items():
                if quota_bytes < 0:
                    raise ConfigError(f"{name}[{owner!r}] = {quota_bytes}: give 0 or more bytes")
        for name, value, most in (
            ("put_timeout_ms", self.put_timeout_ms, None),
            ("quarantine_ms", self.quarantine_ms, None),
            ("lease_ms_max", self.lease_ms_max, LEASE_MS_MAX),
            ("ttl_ms_max", self.ttl_ms_max, TTL_MS_MAX),
        ):
            if value <= 0 or (most is not None and value > most):
                raise ConfigError(f"{name} = {value}: give 1 to {most or 'as many as you like'} ms")
