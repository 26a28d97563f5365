"""Protect, expire, renew and list guaranteed windows by prefix. A tenant sees and touches its own prefixes only."""

from heapq import nsmallest

from kvpin.master.core.admission import MarkedBatch
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Object, Prefix, Session
from kvpin.protocol import (
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    Grant,
    ListPrefixes,
    Prefixes,
    PrefixInfo,
    Protect,
    Protected,
    Renew,
)


def protect(tables: Tables, now_ms: int, session: Session, body: Protect) -> Protected:
    """Open or renew windows on complete objects, root first. A missing one is a gap."""
    batch = MarkedBatch(tables, session, body.marks, body.report, now_ms, create=True)
    grants = [Grant.NONE] * len(body.keys)
    ends = body.end_tokens
    for index in sorted(range(len(grants)), key=ends.__getitem__):
        key = body.keys[index]
        grants[index] = batch.protect(key, ends[index], tables.memory.objects.get(key))
    batch.finish()
    return Protected(grants)


def expire(tables: Tables, now_ms: int, session: Session, body: ExpireGuaranteed) -> Expired:
    """batch_expire_guaranteed, in O(blocks of these prefixes). The counts are those of a dry run, whatever is done.

    A put under way loses what was reserved for it; in mode DELETE, and unless another prefix reserved it too, put_end
    won't make it visible either. Such puts aren't counted: they aren't in memory yet.
    """
    found = [tables.windows.find(session.tenant, prefix_id) for prefix_id in body.prefix_ids]
    prefixes = dict.fromkeys(prefix for prefix in found if prefix is not None)
    held = dict.fromkeys(obj for prefix in prefixes for obj in prefix.holds)
    reserved = dict.fromkeys(obj for prefix in prefixes for obj in prefix.reserved)
    ending = [obj for obj in held if _ends(obj, prefixes, session, body.mode)]
    if not body.dry_run:
        cancelled = [obj for obj in reserved if _ends(obj, prefixes, session, body.mode)]
        tables.counters["windows_ended_early"] += _end_holds(tables, [*held, *reserved], prefixes, session, body.mode)
        if body.mode is ExpireMode.DELETE:
            _delete(tables, ending, cancelled)
        tables.stories.record(now_ms, f"{body.mode} by {session.name}", [obj.key for obj in held])
    return Expired(
        prefixes=len(prefixes),
        memory_blocks=len(ending),
        memory_bytes=sum(obj.range_bytes for obj in ending),
        kept_blocks=len(held) - len(ending),
    )


def _ends(obj: Object, prefixes: dict[Prefix, None], session: Session, mode: ExpireMode) -> bool:
    """Will nobody hold the object once these prefixes' windows are ended?"""
    holders = obj.holders or {}
    if mode is ExpireMode.ALL_HOLDERS:
        return all(holder.tenant == session.tenant for holder in holders)
    return len(holders) <= len(prefixes) and all(holder in prefixes for holder in holders)


def _end_holds(
    tables: Tables, objects: list[Object], prefixes: dict[Prefix, None], session: Session, mode: ExpireMode
) -> int:
    """End these prefixes' holds, or all that the tenant has, on some objects; how many that were."""
    windows = tables.windows
    ended = 0
    for obj in objects:
        holders = obj.holders or {}
        if mode is ExpireMode.ALL_HOLDERS:
            losing = [holder for holder in holders if holder.tenant == session.tenant]
        else:
            losing = [prefix for prefix in prefixes if prefix in holders]
        for prefix in losing:
            windows.end(prefix, obj)
            if prefix not in prefixes:
                windows.note_gap(prefix, obj.key, obj.end_token)
        ended += len(losing)
    return ended


def _delete(tables: Tables, objects: list[Object], being_written: list[Object]) -> None:
    for obj in objects:
        tables.memory.remove(obj)
    for obj in being_written:
        tables.memory.cancel(tables.memory.writes[obj.key])
    tables.counters["removed_objects"] += len(objects)
    tables.counters["windows_forced"] += len(objects)


def renew(tables: Tables, now_ms: int, session: Session, body: Renew) -> Expired:
    """Extend all open windows of one prefix. Never shortens one."""
    prefix = tables.windows.find(session.tenant, body.prefix_id)
    if prefix is None or not prefix.holds:
        return Expired(0, 0, 0)
    for obj in prefix.holds:
        tables.windows.hold(prefix, obj, now_ms + body.ttl_ms)
    prefix.ttl_ms = body.ttl_ms
    prefix.renewals += 1
    tables.counters["windows_renewed"] += len(prefix.holds)
    return Expired(1, len(prefix.holds), prefix.held_bytes)


def list_prefixes(tables: Tables, now_ms: int, session: Session, body: ListPrefixes) -> Prefixes:
    """One page of this tenant's prefixes, by id."""
    prefixes = tables.windows.prefixes
    if body.prefix_ids:
        wanted = [prefixes.get((session.tenant, prefix_id)) for prefix_id in body.prefix_ids]
        chosen = [prefix for prefix in wanted if prefix is not None]
    else:
        chosen = [prefix for prefix in prefixes.values() if prefix.tenant == session.tenant]
    if body.label:
        chosen = [prefix for prefix in chosen if prefix.label == body.label]
    rest = (prefix for prefix in chosen if prefix.prefix_id > body.after)
    page = nsmallest(body.limit, rest, key=lambda prefix: prefix.prefix_id)
    return Prefixes([_info(tables, prefix, now_ms) for prefix in page], len(chosen))


def _info(tables: Tables, prefix: Prefix, now_ms: int) -> PrefixInfo:
    return PrefixInfo(
        prefix_id=prefix.prefix_id,
        label=prefix.label,
        tenant=prefix.tenant,
        end_token=prefix.end_token,
        covered_tokens=tables.windows.covered_token(prefix),
        blocks=len(prefix.holds),
        bytes=prefix.held_bytes,
        ttl_ms=prefix.ttl_ms,
        remaining_ms=max(prefix.holds.values(), default=now_ms) - now_ms,
        age_ms=now_ms - prefix.created_ms,
        renewals=prefix.renewals,
    )
