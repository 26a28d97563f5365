"""DESIGN: eviction."""

import pytest

from kvpin.limits import EVICT_BACKOFF_MS
from kvpin.master.core import memory, removal
from kvpin.protocol import BatchEvict, Expired

from .scenario import PAGE, Client, World, chain, letters, mark


def evict(client: Client, pages: int) -> int:
    """Blocks evicted to free so many pages."""
    reply = client.send(BatchEvict(pages * PAGE))
    assert isinstance(reply, Expired)
    return reply.memory_blocks


def test_the_least_recently_used_goes_first() -> None:
    world = World(pool=3, limit=0)
    alice = world.client()
    for name in ("a", "b", "c"):
        alice.put(chain(name, 1))
        world.later(1)
    alice.get(chain("a", 1), lease=1)
    world.later(1)
    alice.put(chain("d", 1))
    assert [alice.found(chain(name, 1)) for name in "abcd"] == ["+", "-", "+", "+"]


def test_of_one_chain_the_deepest_block_goes_first() -> None:
    world = World(pool=4, limit=0)
    alice = world.client()
    doc = chain("doc", 4)
    alice.put(doc)
    for left in ("+++-", "++--", "+---", "----"):
        assert evict(alice, 1) == 1
        assert alice.found(doc) == left


def test_a_read_counts_as_use_and_exists_does_not() -> None:
    world = World(pool=2, limit=0)
    alice = world.client()
    alice.put(chain("a", 1))
    world.later(1)
    alice.put(chain("b", 1))
    world.later(1)
    alice.found(chain("a", 1))
    alice.put(chain("c", 1))
    assert alice.found(chain("a", 1) + chain("b", 1)) == "-+"


def test_age_counts_from_put_end() -> None:
    world = World(pool=2, limit=0)
    alice = world.client()
    alice.start(chain("slow", 1))
    world.later(1)
    alice.put(chain("quick", 1))
    world.later(1)
    alice.end(chain("slow", 1))
    assert evict(alice, 1) == 1
    assert alice.found(chain("slow", 1) + chain("quick", 1)) == "+-"


def test_only_what_is_missing_is_evicted() -> None:
    world = World(pool=4, limit=0)
    alice = world.client()
    alice.put(chain("old", 3))
    alice.get(chain("old", 2), lease=1000)
    assert alice.put(chain("new", 1, pages=2)) == "WRITE"  # the free page and the one next to it


def test_a_put_of_what_exists_counts_as_use() -> None:
    world = World(pool=2, limit=0)
    alice = world.client()
    alice.put(chain("a", 1))
    world.later(1)
    alice.put(chain("b", 1))
    world.later(1)
    alice.put(chain("a", 1))
    alice.put(chain("c", 1))
    assert alice.found(chain("a", 1) + chain("b", 1)) == "+-"


def test_soft_pinned_go_after_everything_unpinned() -> None:
    world = World(pool=4, limit=0)
    alice = world.client()
    pinned, plain = chain("pinned", 2), chain("plain", 2)
    alice.put(pinned, soft=True)
    world.later(1)
    alice.put(plain)
    assert evict(alice, 2) == 2
    assert alice.found(pinned + plain) == "++--"
    assert evict(alice, 1) == 1
    assert alice.found(pinned) == "+-"


def test_guaranteed_and_leased_objects_never_go() -> None:
    world = World(pool=4, limit=2)
    alice = world.client()
    held, read, plain = chain("held", 2), chain("read", 1), chain("plain", 1)
    alice.put(held, mark("p"))
    alice.put(read + plain)
    alice.get(read, lease=10)
    assert evict(alice, 1) == 1
    assert evict(alice, 1) == 0
    assert alice.found(held + read + plain) == "+++-"
    world.later(10)
    assert evict(alice, 1) == 1
    assert alice.found(held + read) == "++-"


def test_it_counts_bytes_not_objects() -> None:
    world = World(pool=8, limit=0)
    alice = world.client()
    alice.put(chain("small", 4))
    alice.put(chain("big", 1, pages=4))
    world.later(1)
    alice.get(chain("small", 4), lease=1)
    world.later(1)
    alice.put(chain("new", 1, pages=4))
    assert alice.found(chain("small", 4) + chain("big", 1)) == "++++-"


def test_it_takes_all_that_was_asked_for_or_nothing() -> None:
    world = World(pool=4, limit=2)
    alice = world.client()
    alice.put(chain("held", 2), mark("p"))
    alice.put(chain("plain", 2))
    assert evict(alice, 3) == 0
    assert alice.found(chain("plain", 2)) == "++"
    assert evict(alice, 2) == 2


def test_a_put_without_room_is_refused_and_touches_nothing() -> None:
    world = World(pool=4, limit=2)
    alice = world.client()
    alice.put(chain("held", 2), mark("p"))
    alice.put(chain("plain", 2))
    assert alice.put(chain("big", 1, pages=3)) == "NO_SPACE"
    assert alice.found(chain("held", 2) + chain("plain", 2)) == "++++"


def test_a_pool_full_of_guaranteed_and_leased_objects_costs_an_eviction_nothing() -> None:
    world = World(pool=100, limit=90)
    alice = world.client()
    alice.put(chain("held", 90), mark("p", ttl=100))
    alice.put(chain("read", 10))
    alice.get(chain("read", 10), lease=100)
    assert evict(alice, 1) == 0
    assert world.state.tables.evictor.is_empty()  # all parked: there's nothing to look at again
    world.later(100)
    assert evict(alice, 100) == 100


def test_what_was_refused_is_not_searched_again_until_something_changed() -> None:
    world = World(pool=4, limit=2)
    alice = world.client()
    alice.put(chain("held", 2), mark("p"))
    alice.put(chain("plain", 2))
    assert evict(alice, 3) == 0
    assert evict(alice, 4) == 0
    alice.expire("p")
    assert evict(alice, 4) == 4


def test_after_its_window_an_object_is_as_old_as_its_last_use() -> None:
    world = World(pool=3, limit=1)
    alice = world.client()
    alice.put(chain("held", 1), mark("p", ttl=100))
    world.later(1)
    alice.put(chain("plain", 2))
    assert evict(alice, 1) == 1  # looks at the held one, and parks it
    world.later(100)
    assert evict(alice, 1) == 1
    assert alice.found(chain("held", 1) + chain("plain", 2)) == "-+-"


def test_scattered_room_is_joined_by_evicting_more() -> None:
    world = World(pool=8, limit=0)
    alice = world.client()
    for n in range(8):
        alice.put(chain(f"a{n}.", 1))
        world.later(1)
    for n in (0, 2, 4, 6):
        alice.remove(chain(f"a{n}.", 1))
    assert world.stat("largest_free_bytes") == PAGE
    assert world.stat("fragmentation_permille") == 750
    assert alice.put(chain("big", 1, pages=3)) == "WRITE"


def test_it_ends_after_a_bounded_number_of_rounds() -> None:
    world = World(pool=64, limit=32)
    alice = world.client()
    for n in range(64):  # every second page can't move
        alice.put(chain(f"a{n}.", 1), *([mark(f"p{n}")] if n % 2 else []))
        world.later(1)
    assert alice.put(chain("big", 3, pages=2)) == "NO_SPACE*3"  # and only the first of a batch tries
    assert world.stat("evicted_objects") == 2 + 2 + 4 + 8


def test_a_put_looks_at_fewer_objects_than_an_operators_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PUT_EVICT_OBJECTS_MAX", 3)
    world = World(pool=8, limit=0)
    alice = world.client()
    alice.put(chain("a", 8))
    assert alice.put(chain("big", 1, pages=4)) == "NO_SPACE"
    assert alice.put(chain("less", 1, pages=3)) == "WRITE"
    assert evict(alice, 4) == 4


def test_ticks_put_stale_entries_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PUT_EVICT_OBJECTS_MAX", 1)
    world = World(pool=4, limit=2)
    alice = world.client()
    alice.put(chain("a", 4))
    world.later(1)
    alice.get(chain("a", 3), lease=1)
    alice.protect(chain("a", 1), mark("p"))
    world.later(1)
    assert alice.put(chain("new", 1)) == "WRITE"
    assert alice.found(chain("a", 4)) == "+++-"


def test_one_call_looks_at_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "EVICT_OBJECTS_MAX", 3)
    world = World(pool=8, limit=0)
    alice = world.client()
    alice.put(chain("a", 8))
    assert evict(alice, 4) == 0
    assert evict(alice, 3) == 3


def test_the_next_call_goes_on_where_the_bound_stopped_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "EVICT_OBJECTS_MAX", 3)
    world = World(pool=8, limit=4)
    alice = world.client()
    alice.put(chain("a", 4))
    alice.protect(chain("a", 4), mark("p"))
    world.later(1)
    alice.put(chain("b", 4))
    assert [evict(alice, 1) for _ in range(2)] == [0, 1]


class TestBackground:
    def test_it_runs_from_the_high_to_the_low_watermark(self) -> None:
        world = World(pool=20, limit=0, high_watermark=0.8, low_watermark=0.5)
        alice = world.client()
        alice.put(chain("a", 16))
        assert world.free == 4
        world.later(1)
        assert world.free == 4  # at the mark, not above it
        alice.put(chain("b", 1))
        world.later(1)
        assert world.free == 10
        assert alice.found(chain("b", 1)) == "+"

    def test_a_tick_does_a_bounded_piece_and_asks_to_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvpin.master.core.state.TICK_EVICT_OBJECTS_MAX", 4)
        world = World(pool=20, limit=0, high_watermark=0.8, low_watermark=0.5)
        alice = world.client()
        alice.put(chain("a", 20))
        assert world.later(1) == world.now + 1
        assert world.free == 4
        assert world.later(1) == world.now + 1
        assert world.later(1) is None
        assert world.free == 10

    def test_it_backs_off_when_nothing_is_evictable(self) -> None:
        world = World(pool=20, limit=10, high_watermark=0.8, low_watermark=0.5, headroom=0.0)
        alice = world.client()
        alice.put(chain("held", 10), mark("p", ttl=5000))
        alice.put(chain("read", 8))
        alice.get(chain("read", 8), lease=150)
        assert world.later(1) == world.now + EVICT_BACKOFF_MS
        assert world.later(EVICT_BACKOFF_MS - 1) == world.now + 1
        assert world.free == 2
        world.later(1)  # nothing yet: backs off again
        world.later(EVICT_BACKOFF_MS)
        assert world.free == 10
        assert alice.found(chain("held", 10)) == "+" * 10


def test_a_put_is_not_refused_for_room_that_its_own_batch_may_evict() -> None:
    world = World(pool=4, limit=0)
    alice = world.client()
    alice.put(chain("old", 4))
    world.later(1)
    assert letters(alice.start(chain("new", 4)).statuses) == "WRITE*4"
    assert alice.found(chain("old", 4)) == "----"
