"""get_replica_list, exists, release: the read path. It renews windows and creates none."""

from kvpin.limits import LEASES_MAX_PER_CLIENT
from kvpin.master.core.admission import MarkedBatch
from kvpin.master.core.allocator import NO_RANGE
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Object, Session
from kvpin.protocol import Done, ErrorCode, Exists, Failure, Found, GetReplicas, Grant, Release, Replicas


def get_replicas(tables: Tables, now_ms: int, session: Session, body: GetReplicas) -> Replicas | Failure:
    """Where the bytes lie, under one lease over all hits."""
    if len(session.leases) >= LEASES_MAX_PER_CLIENT:
        # Not the oldest lease instead: its reader counts on it.
        return Failure(ErrorCode.OVERLOADED, f"{LEASES_MAX_PER_CLIENT} leases are running: release some")
    found = list(map(tables.memory.objects.get, body.keys))
    hits: list[Object] = []
    offsets, sizes = [NO_RANGE] * len(found), [0] * len(found)
    for index, obj in enumerate(found):
        if obj is not None:
            obj.leases += 1
            obj.last_access_ms = now_ms
            offsets[index] = obj.offset
            sizes[index] = obj.size_bytes
            hits.append(obj)
    tables.counters["get_hits"] += len(hits)
    tables.counters["get_misses"] += len(found) - len(hits)
    lease_ms = min(body.lease_ms, tables.config.lease_ms_max)
    lease_id = tables.leases.grant(session, hits, now_ms + lease_ms) if hits else 0
    return Replicas(offsets, sizes, lease_id, lease_ms, _renew(tables, now_ms, session, body, found))


def exists(tables: Tables, now_ms: int, session: Session, body: Exists) -> Found:
    """Changes nothing at all."""
    objects = tables.memory.objects
    return Found([key in objects for key in body.keys])


def release(tables: Tables, now_ms: int, session: Session, body: Release) -> Done:
    """End leases early."""
    tables.leases.release(session, body.lease_ids)
    return Done()


def _renew(tables: Tables, now_ms: int, session: Session, body: GetReplicas, found: list[Object | None]) -> list[Grant]:
    """The grants of a lookup: none without marks."""
    if not body.marks:
        return []
    batch = MarkedBatch(tables, session, body.marks, body.report, now_ms, create=False)
    grants = [Grant.NONE] * len(found)
    ends = body.end_tokens
    for index in sorted(range(len(found)), key=ends.__getitem__):
        grants[index] = batch.renew(body.keys[index], ends[index], found[index])
    batch.finish()
    return grants
