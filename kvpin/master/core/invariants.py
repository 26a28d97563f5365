"""The invariants, checked on the live state: each finds violations and says them in words.

I7 (what batch_evict takes), I11 (one effect a request) and I12 (who may lengthen a window) are promises about steps,
not about a state. Here is what a state shows of them; the model-based tests hold the rest.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from kvpin.limits import (
    GAPS_MAX,
    HOLDERS_MAX_PER_OBJECT,
    LEASES_MAX_PER_CLIENT,
    PAGE_BYTES,
    PREFIXES_MAX,
    REPLIES_KEPT_PER_CLIENT,
    REPORTS_MAX,
    STORY_KEYS_MAX,
    WRITES_MAX_PER_CLIENT,
)
from kvpin.master.core.allocator import page_round
from kvpin.master.core.eviction import evictable
from kvpin.master.core.heap import ITEM, ORDER
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import COMPLETE, GONE, NO_GAP, WRITING, Object


def violations(tables: Tables, now_ms: int) -> list[str]:
    """All of them; empty if the invariants hold."""
    return [f"{name}: {text}" for name, find in _INVARIANTS.items() for text in find(tables, now_ms)]


def _all_objects(tables: Tables) -> list[Object]:
    """Complete and being written: what is charged."""
    memory = tables.memory
    return [*memory.objects.values(), *(write.obj for write in memory.writes.values())]


def _windows_have_replicas(tables: Tables, now_ms: int) -> Iterator[str]:
    objects, writes = tables.memory.objects, tables.memory.writes
    for prefix in tables.windows.prefixes.values():
        for obj in prefix.holds:
            if obj.phase is not COMPLETE or objects.get(obj.key) is not obj:
                yield f"{obj!r} is in an open window and not complete"
            if prefix not in (obj.holders or {}):
                yield f"{obj!r} doesn't know that {prefix.prefix_id.hex()} holds it"
        for obj in prefix.reserved:
            if obj.key not in writes or writes[obj.key].obj is not obj or obj.phase is not WRITING:
                yield f"a window is reserved for {obj!r}, which nobody writes"
            if prefix not in (obj.holders or {}):
                yield f"{obj!r} doesn't know that {prefix.prefix_id.hex()} has reserved it"
    for obj in _all_objects(tables):
        for prefix in obj.holders or {}:
            if obj not in (prefix.reserved if obj.phase is WRITING else prefix.holds):
                yield f"{prefix.prefix_id.hex()} doesn't know that it holds {obj!r}"
            if tables.windows.prefixes.get((prefix.tenant, prefix.prefix_id)) is not prefix:
                yield f"{obj!r} is held by a prefix without a record"


def _ranges_are_disjoint(tables: Tables, now_ms: int) -> Iterator[str]:
    memory, allocator = tables.memory, tables.memory.allocator
    owned = [(obj.offset, obj.range_bytes) for obj in [*_all_objects(tables), *memory.lingering]]
    held = [(held.offset, held.range_bytes) for held in memory.quarantine.values()]
    live = sorted(owned + held)
    for (left, left_bytes), (right, _) in pairwise(live):
        if left + left_bytes > right:
            yield f"the ranges at {left} and {right} overlap"
    for offset, range_bytes in live:
        if offset < 0 or offset + range_bytes > allocator.size_bytes or offset % PAGE_BYTES or range_bytes % PAGE_BYTES:
            yield f"the range at {offset}+{range_bytes} is misaligned or outside of the segment"
    if sum(size for _, size in live) + allocator.free_bytes != allocator.size_bytes:
        yield "allocated + quarantined + free isn't the size of the pool"
    if dict(live) != allocator.ranges:
        yield "the ranges given out are not those of the objects and the quarantine"
    for obj in _all_objects(tables):
        if page_round(obj.size_bytes) != obj.range_bytes:
            yield f"{obj!r} has {obj.size_bytes} bytes"
    yield from allocator.violations()


def _counters_are_sums(tables: Tables, now_ms: int) -> Iterator[str]:
    memory, ledger = tables.memory, tables.ledger
    objects = _all_objects(tables)
    guaranteed = [obj for obj in objects if obj.holders]
    by_cache: Counter[str] = Counter()
    by_tenant: Counter[str] = Counter()
    guaranteed_by_cache: Counter[str] = Counter()
    guaranteed_by_tenant: Counter[str] = Counter()
    for obj in objects:
        by_cache[obj.cache] += obj.range_bytes
        by_tenant[obj.tenant] += obj.range_bytes
    for obj in guaranteed:
        guaranteed_by_cache[obj.cache] += obj.range_bytes
        guaranteed_by_tenant[obj.tenant] += obj.range_bytes
    expected: dict[str, object] = {
        "object_bytes": sum(obj.range_bytes for obj in objects),
        "guaranteed_bytes": sum(obj.range_bytes for obj in guaranteed),
        "reserved_bytes": sum(obj.range_bytes for obj in guaranteed if obj.phase is WRITING),
        "lingering_bytes": sum(obj.range_bytes for obj in memory.lingering),
        "quarantined_bytes": sum(held.range_bytes for held in memory.quarantine.values()),
        "bytes_by_cache": dict(by_cache),
        "bytes_by_tenant": dict(by_tenant),
        "guaranteed_by_cache": dict(guaranteed_by_cache),
        "guaranteed_by_tenant": dict(guaranteed_by_tenant),
    }
    for name, value in expected.items():
        if getattr(ledger, name) != value:
            yield f"{name} is {getattr(ledger, name)}, but the objects make {value}"
    for prefix in tables.windows.prefixes.values():
        if prefix.held_bytes != sum(obj.range_bytes for obj in prefix.holds):
            yield f"held_bytes of {prefix.prefix_id.hex()} isn't the sum of its blocks"


def _leased_ranges_stay(tables: Tables, now_ms: int) -> Iterator[str]:
    memory = tables.memory
    covered: Counter[Object] = Counter()
    for lease in tables.leases.by_id.values():
        covered.update(lease.objects)
    for obj, leases in covered.items():
        if obj.leases != leases:
            yield f"{obj!r} counts {obj.leases} leases, and has {leases}"
        if memory.allocator.ranges.get(obj.offset) != obj.range_bytes:
            yield f"the range of {obj!r} is leased and not its own any more"
        if memory.objects.get(obj.key) is not obj and obj not in memory.lingering:
            yield f"{obj!r} is leased and in no table"
    for obj in [*_all_objects(tables), *memory.lingering]:
        if obj.leases and obj not in covered:
            yield f"{obj!r} counts {obj.leases} leases, and has none"
    for obj in memory.lingering:
        if obj.phase is not GONE or not obj.leases or obj.holders:
            yield f"{obj!r} lingers for no reader, or is still held"


def _writes_are_invisible(tables: Tables, now_ms: int) -> Iterator[str]:
    memory = tables.memory
    for key, write in memory.writes.items():
        if write.obj.phase is not WRITING or memory.objects.get(key) is write.obj or write.obj.evict_entry is not None:
            yield f"{write.obj!r} is being written and visible"
        if write.session.writes.get(key) is not write:
            yield f"the writer of {write.obj!r} doesn't know it"
    for key, obj in memory.objects.items():
        if obj.phase is not COMPLETE or obj.key != key:
            yield f"{obj!r} is visible under {key!r} and not complete"
    owned = sum(len(session.writes) for session in tables.sessions.values())
    if owned != len(memory.writes):
        yield f"{len(memory.writes)} puts are under way, and {owned} of them have a session"


def _guarantees_fit(tables: Tables, now_ms: int) -> Iterator[str]:
    config, ledger = tables.config, tables.ledger
    if ledger.guaranteed_bytes > config.guaranteed_limit_bytes:
        yield f"{ledger.guaranteed_bytes} bytes are guaranteed, over the limit of {config.guaranteed_limit_bytes}"
    for quotas, used in (
        (config.cache_quotas, ledger.guaranteed_by_cache),
        (config.tenant_quotas, ledger.guaranteed_by_tenant),
    ):
        for owner, quota_bytes in quotas.items():
            if used.get(owner, 0) > quota_bytes:
                yield f"{owner!r} has {used[owner]} bytes guaranteed, over its quota of {quota_bytes}"


def _candidates_are_known(tables: Tables, now_ms: int) -> Iterator[str]:
    for obj in tables.memory.objects.values():
        entry = obj.evict_entry
        if entry is None:
            if evictable(obj):
                yield f"{obj!r} is evictable, and eviction doesn't know it"
        elif entry[ITEM] is not obj:
            yield f"the eviction entry of {obj!r} isn't its own"
        elif entry[ORDER] > tables.evictor.order(obj):
            yield f"{obj!r} would be evicted too late"
    entries = sum(map(len, tables.evictor.heaps))
    if entries != sum(obj.evict_entry is not None for obj in tables.memory.objects.values()):
        yield f"{entries} eviction entries are not one for each object that has one"


def _nothing_is_overdue(tables: Tables, now_ms: int) -> Iterator[str]:
    memory = tables.memory
    for write in memory.writes.values():
        if write.deadline_ms <= now_ms:
            yield f"the put of {write.obj!r} is overdue"
    for held in memory.quarantine.values():
        if held.until_ms <= now_ms:
            yield f"the quarantine at {held.offset} is overdue"
    for lease in tables.leases.by_id.values():
        if lease.until_ms <= now_ms:
            yield f"lease {lease.lease_id} is overdue"
    for prefix in tables.windows.prefixes.values():
        ends = list(prefix.holds.values())
        name = prefix.prefix_id.hex()
        if ends and min(ends) <= now_ms:
            yield f"a window of {name} is overdue"
        if not ends and not prefix.reserved:
            yield f"the record of {name} has outlived its holds"
        if ends and (prefix.entry is None or prefix.entry[ITEM] is not prefix or prefix.entry[ORDER] > min(ends)):
            yield f"nothing will end the windows of {name}"


def _tables_are_bounded(tables: Tables, now_ms: int) -> Iterator[str]:
    for session in tables.sessions.values():
        if len(session.replies) > REPLIES_KEPT_PER_CLIENT:
            yield f"{session.name} has {len(session.replies)} answers kept"
        if len(session.leases) > LEASES_MAX_PER_CLIENT or len(session.writes) > WRITES_MAX_PER_CLIENT:
            yield f"{session.name} has {len(session.leases)} leases and {len(session.writes)} puts"
    if len(tables.windows.prefixes) > PREFIXES_MAX:
        yield f"there are {len(tables.windows.prefixes)} prefix records"
    for obj in _all_objects(tables):
        if len(obj.holders or ()) > HOLDERS_MAX_PER_OBJECT:
            yield f"{obj!r} has {len(obj.holders or ())} holders"
    if len(tables.reports) > REPORTS_MAX or len(tables.stories) > STORY_KEYS_MAX:
        yield "there are too many reports or stories"


def _windows_are_granted(tables: Tables, now_ms: int) -> Iterator[str]:
    for prefix in tables.windows.prefixes.values():
        name = prefix.prefix_id.hex()
        if any(until_ms > now_ms + tables.config.ttl_ms_max for until_ms in prefix.holds.values()):
            yield f"a window of {name} is longer than any ttl"
        if len(prefix.gaps) > GAPS_MAX or prefix.gap_token != min(prefix.gaps.values(), default=NO_GAP):
            yield f"the gaps of {name} are wrong"
        if any(obj.key in prefix.gaps for obj in prefix.holds):
            yield f"{name} has a gap where it holds a block"


_INVARIANTS: dict[str, Callable[[Tables, int], Iterator[str]]] = {
    "I1": _windows_have_replicas,
    "I2": _ranges_are_disjoint,
    "I3": _counters_are_sums,
    "I4": _leased_ranges_stay,
    "I5": _writes_are_invisible,
    "I6": _guarantees_fit,
    "I7": _candidates_are_known,
    "I10": _nothing_is_overdue,
    "I11": _tables_are_bounded,
    "I12": _windows_are_granted,
}
