"""The one place that moves a byte counter.

A limit is only as true as its counter, and a counter drifts when each of a dozen paths (put_end, revoke, timeout,
removal, eviction, replace, a client's death, ...) adds and subtracts for itself. So an object is charged when it gets
its range and discharged when it leaves, guaranteed when its first holder comes and lapsed when its last one goes, and
nothing else touches the numbers. All count whole pages of the pool. Not counted per cache or tenant: ranges that
outlive their object (lingering, quarantined); nobody can use those.
"""

from collections.abc import Mapping

from kvpin.master.core.types import WRITING, Object


class Ledger:
    __slots__ = (
        "_cache_quotas", "_limit_bytes", "_tenant_quotas", "bytes_by_cache", "bytes_by_tenant", "guaranteed_by_cache",
        "guaranteed_by_tenant", "guaranteed_bytes", "lingering_bytes", "object_bytes", "quarantined_bytes",
        "reserved_bytes",
    )  # fmt: skip

    def __init__(self, limit_bytes: int, cache_quotas: Mapping[str, int], tenant_quotas: Mapping[str, int]) -> None:
        self._limit_bytes = limit_bytes
        self._cache_quotas = cache_quotas
        self._tenant_quotas = tenant_quotas
        self.object_bytes = 0  # complete and being written
        self.guaranteed_bytes = 0  # in open windows, and reserved
        self.reserved_bytes = 0  # of these, being written
        self.lingering_bytes = 0
        self.quarantined_bytes = 0
        self.bytes_by_cache: dict[str, int] = {}  # no zeros in these four
        self.bytes_by_tenant: dict[str, int] = {}
        self.guaranteed_by_cache: dict[str, int] = {}
        self.guaranteed_by_tenant: dict[str, int] = {}

    def charge(self, obj: Object) -> None:
        """The object got its range."""
        self.object_bytes += obj.range_bytes
        _add(self.bytes_by_cache, obj.cache, obj.range_bytes)
        _add(self.bytes_by_tenant, obj.tenant, obj.range_bytes)

    def discharge(self, obj: Object) -> None:
        """The object left, whatever becomes of its range."""
        self.object_bytes -= obj.range_bytes
        _add(self.bytes_by_cache, obj.cache, -obj.range_bytes)
        _add(self.bytes_by_tenant, obj.tenant, -obj.range_bytes)

    def admits(self, obj: Object) -> bool:
        """May this object be guaranteed, within the limit and the quotas of its cache and tenant?"""
        size = obj.range_bytes
        if self.guaranteed_bytes + size > self._limit_bytes:
            return False
        quota = self._cache_quotas.get(obj.cache)
        if quota is not None and self.guaranteed_by_cache.get(obj.cache, 0) + size > quota:
            return False
        quota = self._tenant_quotas.get(obj.tenant)
        return quota is None or self.guaranteed_by_tenant.get(obj.tenant, 0) + size <= quota

    def guarantee(self, obj: Object) -> None:
        """Its first holder came. Counts once, however many follow."""
        self._move_guaranteed(obj, obj.range_bytes)

    def lapse(self, obj: Object) -> None:
        """Its last holder went. Call it before the object changes its phase."""
        self._move_guaranteed(obj, -obj.range_bytes)

    def settle(self, obj: Object) -> None:
        """Guaranteed and now complete: no longer a mere reservation."""
        self.reserved_bytes -= obj.range_bytes

    def linger(self, range_bytes: int) -> None:
        """A removed object's range waits for its readers; negative: it no longer does."""
        self.lingering_bytes += range_bytes

    def quarantine(self, range_bytes: int) -> None:
        """A lost put's range waits for its writer's end; negative: it no longer does."""
        self.quarantined_bytes += range_bytes

    def _move_guaranteed(self, obj: Object, range_bytes: int) -> None:
        self.guaranteed_bytes += range_bytes
        if obj.phase is WRITING:
            self.reserved_bytes += range_bytes
        _add(self.guaranteed_by_cache, obj.cache, range_bytes)
        _add(self.guaranteed_by_tenant, obj.tenant, range_bytes)


def _add(table: dict[str, int], name: str, number: int) -> None:
    """Add, and forget names that count nothing: clients choose them, so the table must not grow with their past."""
    total = table.get(name, 0) + number
    if total:
        table[name] = total
    else:
        del table[name]
