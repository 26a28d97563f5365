"""DESIGN: put."""

from kvpin.protocol import ExpireMode, PutEnd, PutItem, PutStart, PutStatus

from .scenario import PAGE, Block, World, chain, letters, mark

DOC = chain("doc", 3)


def test_an_object_is_invisible_until_put_end() -> None:
    world = World()
    alice = world.client()
    started = alice.start(DOC)
    assert letters(started.statuses) == "WRITE*3"
    assert alice.found(DOC) == "---"
    assert alice.get(DOC).offsets == [-1, -1, -1]
    assert alice.end(DOC) == "OK*3"
    assert alice.found(DOC) == "+++"
    replicas = alice.get(DOC)
    assert replicas.offsets == started.offsets
    assert replicas.sizes == [PAGE] * 3


def test_ranges_are_whole_pages_and_sizes_are_as_written() -> None:
    world = World(pool=4)
    alice = world.client()
    alice.send(PutStart([PutItem(b"one byte", 1), PutItem(b"a page and a byte", PAGE + 1)]))
    assert world.free == 4 - 1 - 2
    assert world.stat("object_bytes") == 3 * PAGE
    alice.send(PutEnd([b"one byte"]))
    assert alice.get([Block(b"one byte", 0)]).sizes == [1]


def test_a_second_put_of_a_key_finds_it_busy_and_then_existing() -> None:
    world = World()
    alice, bob = world.client("alice"), world.client("bob")
    alice.start(DOC)
    assert bob.put(DOC) == "BUSY*3"
    assert alice.put(DOC) == "BUSY*3"
    alice.end(DOC)
    assert bob.put(DOC) == "EXISTS*3"


def test_only_the_owner_ends_or_revokes_a_put() -> None:
    world = World()
    alice, bob = world.client("alice"), world.client("bob")
    alice.start(DOC)
    assert bob.end(DOC) == "NOT_OWNER*3"
    assert bob.revoke(DOC) == "NOT_OWNER*3"
    assert alice.end(DOC[:1]) == "OK"
    assert alice.end(DOC[:1]) == "NOT_FOUND"
    assert alice.revoke(DOC[1:]) == "OK*2"
    assert alice.found(DOC) == "+--"


def test_put_revoke_frees_the_range_at_once() -> None:
    world = World(pool=3, limit=0)
    alice = world.client()
    alice.start(DOC)
    assert world.free == 0
    assert alice.revoke(DOC) == "OK*3"
    assert world.free == 3
    assert alice.put(chain("other", 3)) == "WRITE*3"


def test_a_put_never_ended_times_out_exactly_at_its_deadline() -> None:
    world = World(put_timeout_ms=100)
    alice = world.client()
    alice.start(DOC)
    assert world.later(99) == world.now + 1
    assert alice.end(DOC[:1]) == "OK"
    world.now += 1  # no tick: the command itself must notice
    assert alice.end(DOC[1:]) == "NOT_FOUND*2"
    assert alice.found(DOC) == "+--"
    assert world.stat("puts_timed_out") == 2


def test_a_late_writer_cannot_scribble_on_somebody_elses_object() -> None:
    world = World(pool=3, limit=0, put_timeout_ms=100, quarantine_ms=1000)
    alice, bob = world.client("alice"), world.client("bob")
    lost = alice.start(DOC[:2]).offsets
    world.later(100)
    assert world.stat("quarantined_bytes") == 2 * PAGE
    started = bob.start(chain("new", 3))
    assert letters(started.statuses) == "WRITE NO_SPACE*2"
    assert started.offsets[0] not in lost
    assert bob.end(chain("new", 1)) == "OK"
    assert world.later(999) is not None
    assert world.free == 0
    world.later(1)
    assert world.free == 2
    assert world.stat("quarantined_bytes") == 0


def test_a_lost_put_can_be_put_again() -> None:
    world = World(put_timeout_ms=100)
    alice = world.client()
    alice.start(DOC)
    world.later(100)
    assert alice.put(DOC) == "WRITE*3"
    assert alice.found(DOC) == "+++"


class TestReplace:
    def test_the_old_object_stays_readable_until_the_swap(self) -> None:
        world = World(pool=2, limit=0)
        alice = world.client()
        alice.put(DOC[:1])
        old = alice.get(DOC[:1])
        new = alice.start(DOC[:1], replace=True)
        assert letters(new.statuses) == "WRITE"
        assert alice.get(DOC[:1]).offsets == old.offsets != new.offsets
        assert alice.end(DOC[:1]) == "OK"
        assert alice.get(DOC[:1]).offsets == new.offsets
        assert world.stat("replaced_objects") == 1

    def test_the_old_range_is_freed_after_the_swap_and_its_lease(self) -> None:
        world = World(pool=2, limit=0)
        alice = world.client()
        alice.put(DOC[:1])
        alice.get(DOC[:1], lease=10)
        alice.put(DOC[:1], replace=True)
        assert world.stat("lingering_bytes") == PAGE
        world.later(10)
        assert world.stat("lingering_bytes") == 0
        assert world.free == 1

    def test_without_room_the_old_object_is_untouched(self) -> None:
        world = World(pool=2, limit=1)
        alice = world.client()
        alice.put(DOC[:1])
        alice.put(chain("pinned", 1), mark("p"))
        alice.get(DOC[:1], lease=10)
        assert alice.put(DOC[:1], replace=True) == "NO_SPACE"
        assert alice.found(DOC[:1]) == "+"

    def test_an_open_window_refuses_it_unless_forced(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC[:1], mark("p"))
        assert alice.put(DOC[:1], replace=True) == "GUARANTEED"
        assert alice.put(DOC[:1], replace=True, force=True) == "WRITE"
        assert world.guaranteed == 0
        assert alice.prefixes() == []

    def test_the_new_object_has_the_windows_that_its_own_marks_open(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC[:1], mark("old", ttl=5000))
        assert alice.put(DOC[:1], mark("new", ttl=100), replace=True, force=True) == "WRITE | OPENED"
        assert [info.remaining_ms for info in alice.prefixes()] == [100]
        assert world.guaranteed == 1

    def test_a_window_opened_since_put_start_refuses_the_swap(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC[:1])
        old = alice.get(DOC[:1]).offsets
        alice.start(DOC[:1], replace=True)
        assert bob.put(DOC[:1], mark("p")) == "EXISTS | OPENED"
        assert alice.end(DOC[:1]) == "GUARANTEED"
        assert alice.get(DOC[:1]).offsets == old
        assert world.stat("writes") == 0
        assert world.free == 15

    def test_a_second_replace_is_busy(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC[:1])
        alice.start(DOC[:1], replace=True)
        assert letters(alice.start(DOC[:1], replace=True).statuses) == "BUSY"
        assert letters(alice.start(DOC[:1]).statuses) == "EXISTS"

    def test_of_a_missing_key_is_a_put(self) -> None:
        alice = World().client()
        assert alice.put(DOC, replace=True) == "WRITE*3"

    def test_it_never_evicts_what_it_replaces_while_another_will_do(self) -> None:
        world = World(pool=2, limit=0)
        alice = world.client()
        alice.put(DOC[:1])
        world.later(1)
        alice.put(chain("newer", 1))
        world.later(1)
        assert letters(alice.start(DOC[:1], replace=True).statuses) == "WRITE"
        assert alice.found(DOC[:1] + chain("newer", 1)) == "+-"


def test_a_key_deleted_while_it_is_written_never_appears() -> None:
    world = World()
    alice, bob = world.client("alice"), world.client("bob")
    alice.start(DOC, mark("p"))
    assert bob.expire("p", mode=ExpireMode.DELETE) == (1, 0, 0)
    assert world.guaranteed == 0
    assert bob.put(DOC, mark("p")) == "BUSY*3 | GAP*3"
    assert alice.end(DOC) == "NOT_FOUND*3"
    assert alice.found(DOC) == "---"
    assert world.free == 16
    assert world.stat("puts_cancelled") == 3


def test_the_chain_is_cut_at_its_deep_end_whatever_the_order_of_the_items() -> None:
    world = World(pool=2, limit=0)
    alice = world.client()
    started = alice.start(DOC[::-1])
    assert started.statuses == [PutStatus.NO_SPACE, PutStatus.WRITE, PutStatus.WRITE]


def test_a_size_that_found_no_room_does_not_stop_a_smaller_one() -> None:
    world = World(pool=3, limit=0)
    alice = world.client()
    alice.start(chain("held", 1))
    assert alice.put([*chain("big", 1, pages=3), *chain("small", 1)]) == "NO_SPACE WRITE"


def test_an_empty_batch_is_answered_in_kind() -> None:
    alice = World().client()
    assert alice.put([]) == ""
    assert alice.get([]).lease_id == 0
