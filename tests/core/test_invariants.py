"""Each invariant is really checked: a state spoilt on purpose is found out."""

from collections.abc import Callable

import pytest

from kvpin.limits import GAPS_MAX, REPLIES_KEPT_PER_CLIENT
from kvpin.master.core import invariants
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import GONE, WRITING, Object, Prefix
from kvpin.protocol import Done

from .scenario import PAGE, World, chain, mark, pid


def rich_world() -> World:
    """Something of everything: held, leased, plain, lingering, quarantined, being written, reserved."""
    world = World(pool=32, limit=8, put_timeout_ms=100, cache_quotas={"kv": 5 * PAGE})
    alice, bob = world.client("alice"), world.client("bob")
    alice.start(chain("lost", 1))
    world.later(100)
    alice.put(chain("held", 2), mark("p"), cache="kv")
    alice.put(chain("read", 2))
    alice.get(chain("read", 2), lease=10_000)
    alice.remove(chain("read", 1), force=True)
    alice.put(chain("plain", 2))
    bob.start(chain("new", 2), mark("q"))
    return world


def held(tables: Tables) -> Object:
    return tables.memory.objects[b"held0"]


def plain(tables: Tables) -> Object:
    return tables.memory.objects[b"plain0"]


def read(tables: Tables) -> Object:
    return tables.memory.objects[b"read1"]


def lingering(tables: Tables) -> Object:
    (obj,) = tables.memory.lingering
    return obj


def prefix(tables: Tables) -> Prefix:
    return tables.windows.prefixes["", pid("p")]


def reserving(tables: Tables) -> Prefix:
    return tables.windows.prefixes["", pid("q")]


def set_to(target: Callable[[Tables], object], name: str, value: object) -> Callable[[Tables], None]:
    return lambda tables: setattr(target(tables), name, value)


def drop_held_object(tables: Tables) -> None:
    del tables.memory.objects[b"held0"]


def drop_plain_object(tables: Tables) -> None:
    del tables.memory.objects[b"plain0"]


def forget_holder(tables: Tables) -> None:
    held(tables).holders = None


def forget_hold(tables: Tables) -> None:
    del prefix(tables).holds[held(tables)]


def forget_record(tables: Tables) -> None:
    del tables.windows.prefixes["", pid("p")]


def forget_reservation(tables: Tables) -> None:
    tables.memory.writes[b"new0"].obj.holders = None


def orphan_reservation(tables: Tables) -> None:
    del tables.memory.writes[b"new0"]


def shift_range(tables: Tables) -> None:
    plain(tables).offset = held(tables).offset


def misalign(tables: Tables) -> None:
    plain(tables).offset += 100


def wrong_size(tables: Tables) -> None:
    plain(tables).size_bytes = 2 * PAGE


def leak_range(tables: Tables) -> None:
    tables.memory.allocator.allocate(PAGE)


def drop_quarantine(tables: Tables) -> None:
    tables.memory.quarantine.clear()


def wrong_held_bytes(tables: Tables) -> None:
    prefix(tables).held_bytes += PAGE


def free_leased(tables: Tables) -> None:
    tables.memory.allocator.free(read(tables).offset)


def drop_leased(tables: Tables) -> None:
    del tables.memory.objects[b"read1"]


def drop_lease(tables: Tables) -> None:
    tables.leases.by_id.clear()


def visible_write(tables: Tables) -> None:
    tables.memory.objects[b"new0"] = tables.memory.writes[b"new0"].obj


def foreign_write(tables: Tables) -> None:
    tables.sessions[b"bob"].writes.clear()


def wrong_key(tables: Tables) -> None:
    tables.memory.objects[b"other"] = tables.memory.objects.pop(b"plain0")


def over_limit(tables: Tables) -> None:
    tables.ledger.guaranteed_bytes = 9 * PAGE


def over_quota(tables: Tables) -> None:
    tables.ledger.guaranteed_by_cache["kv"] = 6 * PAGE


def forget_candidate(tables: Tables) -> None:
    plain(tables).evict_entry = None


def foreign_candidate(tables: Tables) -> None:
    plain(tables).evict_entry = tables.memory.objects[b"plain1"].evict_entry


def late_candidate(tables: Tables) -> None:
    plain(tables).last_access_ms -= 1


def overdue_write(tables: Tables) -> None:
    tables.memory.writes[b"new0"].deadline_ms = 0


def overdue_quarantine(tables: Tables) -> None:
    next(iter(tables.memory.quarantine.values())).until_ms = 0


def overdue_lease(tables: Tables) -> None:
    tables.leases.by_id[1].until_ms = 0


def overdue_window(tables: Tables) -> None:
    prefix(tables).holds[held(tables)] = 0


def empty_record(tables: Tables) -> None:
    tables.windows.prefixes["", b"empty"] = Prefix(b"empty", "", 0)


def many_replies(tables: Tables) -> None:
    tables.sessions[b"bob"].replies.update((n, Done()) for n in range(1000, 1001 + REPLIES_KEPT_PER_CLIENT))


def endless_window(tables: Tables) -> None:
    prefix(tables).holds[held(tables)] = 1 << 60


def wrong_gap(tables: Tables) -> None:
    prefix(tables).gap_token = 5


def gap_where_held(tables: Tables) -> None:
    prefix(tables).gaps[b"held0"] = prefix(tables).gap_token = 16


def many_gaps(tables: Tables) -> None:
    prefix(tables).gaps.update((b"gap%d" % n, 99) for n in range(GAPS_MAX + 1))


@pytest.mark.parametrize(
    ("spoil", "name", "text"),
    [
        (drop_held_object, "I1", "open window and not complete"),
        (set_to(held, "phase", GONE), "I1", "open window and not complete"),
        (forget_holder, "I1", "doesn't know that"),
        (forget_hold, "I1", "doesn't know that it holds"),
        (forget_record, "I1", "without a record"),
        (forget_reservation, "I1", "has reserved it"),
        (orphan_reservation, "I1", "which nobody writes"),
        (shift_range, "I2", "overlap"),
        (misalign, "I2", "misaligned"),
        (set_to(plain, "offset", 32 * PAGE), "I2", "outside of the segment"),
        (wrong_size, "I2", "has 8192 bytes"),
        (leak_range, "I2", "isn't the size of the pool"),
        (drop_quarantine, "I2", "isn't the size of the pool"),
        (set_to(lambda tables: tables.memory.allocator, "_filled", 0), "I2", "mask of filled bins"),
        (set_to(lambda tables: tables.ledger, "object_bytes", 0), "I3", "object_bytes is 0"),
        (set_to(lambda tables: tables.ledger, "guaranteed_bytes", 0), "I3", "guaranteed_bytes is 0"),
        (set_to(lambda tables: tables.ledger, "reserved_bytes", 0), "I3", "reserved_bytes is 0"),
        (set_to(lambda tables: tables.ledger, "lingering_bytes", 0), "I3", "lingering_bytes is 0"),
        (set_to(lambda tables: tables.ledger, "quarantined_bytes", 0), "I3", "quarantined_bytes is 0"),
        (set_to(lambda tables: tables.ledger, "bytes_by_cache", {}), "I3", "bytes_by_cache is"),
        (set_to(lambda tables: tables.ledger, "bytes_by_tenant", {}), "I3", "bytes_by_tenant is"),
        (set_to(lambda tables: tables.ledger, "guaranteed_by_cache", {}), "I3", "guaranteed_by_cache is"),
        (set_to(lambda tables: tables.ledger, "guaranteed_by_tenant", {}), "I3", "guaranteed_by_tenant is"),
        (wrong_held_bytes, "I3", "held_bytes of"),
        (set_to(read, "leases", 2), "I4", "counts 2 leases, and has 1"),
        (set_to(plain, "leases", 1), "I4", "counts 1 leases, and has none"),
        (free_leased, "I4", "not its own any more"),
        (drop_leased, "I4", "leased and in no table"),
        (drop_lease, "I4", "and has none"),
        (set_to(lingering, "leases", 0), "I4", "lingers for no reader"),
        (visible_write, "I5", "being written and visible"),
        (foreign_write, "I5", "doesn't know it"),
        (orphan_reservation, "I5", "of them have a session"),
        (set_to(plain, "phase", WRITING), "I5", "visible under"),
        (wrong_key, "I5", "visible under b'other'"),
        (over_limit, "I6", "over the limit"),
        (over_quota, "I6", "over its quota"),
        (forget_candidate, "I7", "eviction doesn't know it"),
        (foreign_candidate, "I7", "isn't its own"),
        (late_candidate, "I7", "evicted too late"),
        (drop_plain_object, "I7", "eviction entries"),
        (overdue_write, "I10", "the put of"),
        (overdue_quarantine, "I10", "the quarantine at"),
        (overdue_lease, "I10", "lease 1 is overdue"),
        (overdue_window, "I10", "a window of"),
        (empty_record, "I10", "outlived its holds"),
        (set_to(prefix, "entry", None), "I10", "nothing will end"),
        (many_replies, "I11", "answers kept"),
        (endless_window, "I12", "longer than any ttl"),
        (wrong_gap, "I12", "the gaps of"),
        (many_gaps, "I12", "the gaps of"),
        (gap_where_held, "I12", "a gap where it holds"),
    ],
)
def test_a_violation_is_found(spoil: Callable[[Tables], None], name: str, text: str) -> None:
    world = rich_world()
    assert world.state.check_invariants(world.now) == []
    spoil(world.state.tables)
    found = world.state.check_invariants(world.now)
    assert any(violation.startswith(f"{name}: ") and text in violation for violation in found), found


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        ("LEASES_MAX_PER_CLIENT", "alice has 1 leases"),
        ("WRITES_MAX_PER_CLIENT", "bob has 0 leases and 2 puts"),
        ("PREFIXES_MAX", "there are 2 prefix records"),
        ("HOLDERS_MAX_PER_OBJECT", "has 1 holders"),
        ("STORY_KEYS_MAX", "too many reports or stories"),
    ],
)
def test_a_table_over_its_bound_is_found(bound: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = rich_world()
    monkeypatch.setattr(invariants, bound, 0)
    found = world.state.check_invariants(world.now)
    assert any(violation.startswith("I11: ") and text in violation for violation in found), found
