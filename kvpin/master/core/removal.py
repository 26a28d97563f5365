"""remove, clear, batch_evict: objects leave by request. Open windows are spared unless the request forces it."""

from collections.abc import Sequence

from kvpin.limits import EVICT_OBJECTS_MAX
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Object, Session
from kvpin.master.core.windows import is_open
from kvpin.protocol import BatchEvict, Clear, Ended, EndStatus, Expired, Remove


def remove(tables: Tables, now_ms: int, session: Session, body: Remove) -> Ended:
    """Remove single objects. With force a leased one becomes invisible at once; its range is freed after the lease."""
    statuses: list[EndStatus] = []
    gone: list[Object] = []
    for key in body.keys:
        obj = tables.memory.objects.get(key)
        if obj is None:
            statuses.append(EndStatus.NOT_FOUND)
        elif is_open(obj) and not body.force:
            statuses.append(EndStatus.GUARANTEED)
        elif obj.leases and not body.force:
            statuses.append(EndStatus.LEASED)
        else:
            statuses.append(EndStatus.OK)
            gone.append(obj)
    _remove(tables, now_ms, f"removed by {session.name}", gone)
    return Ended(statuses)


def clear(tables: Tables, now_ms: int, session: Session, body: Clear) -> Expired:
    """Remove all objects of a namespace. Puts under way end there too: what was begun before must not appear after."""
    memory = tables.memory
    chosen = [obj for key, obj in memory.objects.items() if key.startswith(body.key_prefix)]
    gone = [obj for obj in chosen if body.force or not is_open(obj)]
    for key, write in memory.writes.items():
        if key.startswith(body.key_prefix) and not write.cancelled and (body.force or not write.obj.holders):
            memory.cancel(write)
    _remove(tables, now_ms, f"cleared by {session.name}", gone)
    return Expired(0, len(gone), sum(obj.range_bytes for obj in gone), kept_blocks=len(chosen) - len(gone))


def evict(tables: Tables, now_ms: int, session: Session, body: BatchEvict) -> Expired:
    """Evict at least so many bytes, or nothing."""
    victims = tables.memory.evict(body.bytes, EVICT_OBJECTS_MAX, now_ms)
    return Expired(0, len(victims), sum(obj.range_bytes for obj in victims))


def _remove(tables: Tables, now_ms: int, event: str, objects: Sequence[Object]) -> None:
    tables.counters["removed_objects"] += len(objects)
    tables.counters["windows_forced"] += sum(map(is_open, objects))
    for obj in objects:
        tables.memory.remove(obj)
    tables.stories.record(now_ms, event, [obj.key for obj in objects])
