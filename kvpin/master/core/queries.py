"""Questions about the state: report, stats, story, check. They change nothing."""

from kvpin.master.core.invariants import violations
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Session
from kvpin.protocol import Check, Checked, Report, Reported, Stats, StatsReply, Stories, Story


def report(tables: Tables, now_ms: int, session: Session, body: Report) -> Reported:
    return tables.reports.of(body.report)


def stats(tables: Tables, now_ms: int, session: Session, body: Stats) -> StatsReply:
    return StatsReply(values(tables))


def story(tables: Tables, now_ms: int, session: Session, body: Story) -> Stories:
    return Stories(tables.stories.of(body.key, now_ms))


def check(tables: Tables, now_ms: int, session: Session, body: Check) -> Checked:
    return Checked(violations(tables, now_ms))


def values(tables: Tables) -> dict[str, int]:
    """All counters and gauges, by the names of counters.py."""
    memory, ledger = tables.memory, tables.ledger
    free_bytes = memory.allocator.free_bytes
    largest_bytes = memory.allocator.largest_free_bytes()
    return tables.counters | {
        "pool_bytes": memory.allocator.size_bytes,
        "free_bytes": free_bytes,
        "objects": len(memory.objects),
        "object_bytes": ledger.object_bytes,
        "writes": len(memory.writes),
        "guaranteed_bytes": ledger.guaranteed_bytes,
        "reserved_bytes": ledger.reserved_bytes,
        "guaranteed_limit_bytes": tables.config.guaranteed_limit_bytes,
        "lingering_bytes": ledger.lingering_bytes,
        "quarantined_bytes": ledger.quarantined_bytes,
        "prefixes": len(tables.windows.prefixes),
        "leases": len(tables.leases.by_id),
        "clients": len(tables.sessions),
        "largest_free_bytes": largest_bytes,
        "fragmentation_permille": 1000 - 1000 * largest_bytes // free_bytes if free_bytes else 0,
    }
