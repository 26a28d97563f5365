"""DESIGN: create against renew, shared blocks, expiry and its modes."""

import pytest

from kvpin.master.core import windows as windows_module
from kvpin.protocol import Expired, ExpireMode, Grant, Mark, Renew

from .scenario import BLOCK, PAGE, Client, World, chain, letters, mark, pid

SYS = chain("sys", 2)
ONE = chain("one", 2, after=SYS)
TWO = chain("two", 2, after=SYS)


def flood(client: Client, blocks: int = 64) -> None:
    """Write so much that whatever may be evicted is."""
    for n in range(blocks):
        client.put(chain(f"flood{client.world.now}.{n}.", 1))


class TestCreate:
    def test_the_window_opens_at_put_end_not_at_put_start(self) -> None:
        world = World()
        alice = world.client()
        assert letters(alice.start(SYS, mark("p", ttl=100)).grants) == "OPENED*2"
        world.later(60)
        assert world.guaranteed == 2  # reserved
        assert alice.prefix("p").blocks == 0
        alice.end(SYS)
        assert alice.prefix("p").remaining_ms == 100
        world.later(99)
        assert world.guaranteed == 2
        world.later(1)
        assert world.guaranteed == 0
        assert alice.found(SYS) == "++"

    def test_an_unmarked_block_is_protected_by_a_marked_put(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS)
        assert alice.put(SYS, mark("p")) == "EXISTS*2 | OPENED*2"
        flood(alice)
        assert alice.found(SYS) == "++"

    def test_a_block_whose_window_lapsed_is_protected_again_by_a_marked_put(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        world.later(100)
        assert alice.put(SYS, mark("p", ttl=100)) == "EXISTS*2 | OPENED*2"

    def test_an_item_beyond_the_mark_is_written_unprotected(self) -> None:
        world = World()
        alice = world.client()
        assert alice.put(ONE, mark("p", blocks=3)) == "WRITE*4 | OPENED*3 NONE"
        assert world.guaranteed == 3

    def test_nested_marks_hold_the_shared_part_together(self) -> None:
        world = World()
        alice = world.client()
        assert alice.put(ONE, mark("sys", ttl=50, blocks=2), mark("one", ttl=100)) == "WRITE*4 | OPENED*4"
        assert [alice.prefix(name).blocks for name in ("sys", "one")] == [2, 4]
        assert world.guaranteed == 4
        world.later(50)
        assert alice.prefixes(prefix_ids=[pid("sys")]) == []
        assert world.guaranteed == 4

    def test_two_engines_writing_the_same_block_both_get_their_window(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(SYS, mark("p", ttl=100))
        assert bob.put(SYS, mark("q", ttl=200)) == "BUSY*2 | OPENED*2"
        assert world.guaranteed == 2
        alice.end(SYS)
        assert [alice.prefix(name).remaining_ms for name in ("p", "q")] == [100, 200]

    def test_a_mark_on_an_unmarked_put_under_way_reserves_it(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(SYS)
        assert bob.put(SYS, mark("p")) == "BUSY*2 | OPENED*2"
        alice.end(SYS)
        assert world.guaranteed == 2

    def test_protect_opens_windows_on_complete_objects_only(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS)
        alice.start(ONE[2:3])
        assert alice.protect(ONE, mark("p")) == "OPENED*2 GAP*2"
        assert alice.prefix("p").covered_tokens == 2 * BLOCK

    def test_a_lost_put_gives_its_reservation_back(self) -> None:
        world = World(put_timeout_ms=100)
        alice = world.client()
        alice.start(SYS, mark("p"))
        world.later(100)
        assert world.guaranteed == 0
        assert alice.prefixes() == []

    def test_a_revoked_put_gives_its_reservation_back(self) -> None:
        world = World()
        alice = world.client()
        alice.start(SYS, mark("p"))
        alice.revoke(SYS)
        assert world.guaranteed == 0
        assert alice.prefixes() == []


class TestRenew:
    def test_a_marked_read_renews_an_open_window(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        world.later(60)
        assert alice.get(SYS, mark("p", ttl=100)).grants == [Grant.RENEWED] * 2
        assert alice.prefix("p").remaining_ms == 100
        assert alice.prefix("p").renewals == 1

    def test_a_marked_read_creates_nothing(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS)
        assert alice.get(ONE, mark("p")).grants == [Grant.NONE] * 4
        assert world.guaranteed == 0
        assert alice.prefixes() == []

    def test_a_read_at_the_very_end_of_a_window_comes_too_late(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        world.now += 100
        assert alice.get(SYS, mark("p", ttl=100)).grants == [Grant.NONE] * 2
        assert world.guaranteed == 0

    def test_a_shorter_ttl_never_shortens_a_window(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=1000))
        alice.get(SYS, mark("p", ttl=10))
        alice.put(SYS, mark("p", ttl=10))
        assert alice.prefix("p").remaining_ms == 1000

    def test_unmarked_requests_and_exists_change_no_window(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        world.later(50)
        assert alice.get(SYS).grants == []
        alice.put(SYS)
        alice.found(SYS)
        assert alice.prefix("p").remaining_ms == 50
        world.later(50)
        assert world.guaranteed == 0

    def test_renewing_needs_no_admission(self) -> None:
        world = World(limit=2)
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        assert alice.put(SYS, mark("p", ttl=500)) == "EXISTS*2 | RENEWED*2"
        assert alice.put(SYS, mark("q", ttl=500)) == "EXISTS*2 | RENEWED*2"

    def test_a_read_through_another_prefix_joins_the_holders_of_an_open_window(self) -> None:
        world = World(limit=2)
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        assert alice.get(SYS, mark("q", ttl=300)).grants == [Grant.RENEWED] * 2
        alice.expire("p")
        assert alice.prefix("q").remaining_ms == 300
        assert world.guaranteed == 2

    def test_renew_extends_all_windows_of_one_prefix(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        assert alice.send(Renew(pid("p"), 700)) == Expired(1, 2, 2 * PAGE)
        assert alice.send(Renew(pid("p"), 5)) == Expired(1, 2, 2 * PAGE)
        assert alice.prefix("p").remaining_ms == 700
        assert alice.send(Renew(pid("unknown"), 700)) == Expired(0, 0, 0)

    def test_renewing_late_blocks_keeps_only_those(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("p", ttl=100))
        alice.get(ONE[:1], mark("p", ttl=500))
        world.later(100)
        info = alice.prefix("p")
        assert (info.blocks, info.covered_tokens) == (1, BLOCK)
        assert world.guaranteed == 1


class TestSharedBlocks:
    def test_an_object_counts_once_however_many_hold_it(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        assert world.guaranteed == 6

    def test_ending_one_prefix_ends_its_own_holds_only(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        assert alice.expire("one") == (1, 2, 2)
        assert world.guaranteed == 4
        flood(alice)
        assert alice.found(TWO) == "++++"
        assert alice.found(ONE) == "++--"

    def test_the_latest_window_counts(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("short", ttl=100))
        alice.put(SYS, mark("long", ttl=200))
        world.later(150)
        assert world.guaranteed == 2
        assert [info.prefix_id for info in alice.prefixes()] == [pid("long")]
        world.later(50)
        assert world.guaranteed == 0

    def test_a_full_list_of_holders_drops_the_oldest_but_shortens_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(windows_module, "HOLDERS_MAX_PER_OBJECT", 3)
        world = World()
        alice = world.client()
        for name in ("a", "b", "c"):
            alice.put(SYS, mark(name, ttl=100))
        assert alice.put(SYS, mark("d", ttl=100)) == "EXISTS*2 | RENEWED*2"
        assert {info.prefix_id for info in alice.prefixes()} == {pid("b"), pid("c"), pid("d")}
        assert alice.put(SYS, mark("e", ttl=50)) == "EXISTS*2 | CAPACITY_EXCEEDED GAP"
        assert alice.get(SYS, mark("e", ttl=50)).grants == [Grant.NONE] * 2
        world.later(99)
        assert world.guaranteed == 2

    def test_a_put_under_way_has_a_bounded_number_of_holders_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(windows_module, "HOLDERS_MAX_PER_OBJECT", 2)
        world = World()
        alice = world.client()
        alice.start(SYS, mark("a", ttl=100), mark("b", ttl=100))
        assert letters(alice.start(SYS, mark("c", ttl=50)).grants) == "CAPACITY_EXCEEDED GAP"
        assert letters(alice.start(SYS, mark("d", ttl=100)).grants) == "OPENED*2"
        alice.end(SYS)
        assert {info.prefix_id for info in alice.prefixes()} == {pid("b"), pid("d")}

    def test_a_read_joins_no_block_behind_its_own_gap(self) -> None:
        world = World(limit=3)
        alice = world.client()
        alice.put(SYS[:1], mark("p"))
        alice.put(ONE[2:], mark("q"))
        assert alice.put(SYS, mark("p")) == "EXISTS WRITE | RENEWED CAPACITY_EXCEEDED"
        assert letters(alice.get(ONE, mark("p")).grants) == "RENEWED NONE*3"

    def test_a_read_joins_no_block_behind_one_that_nobody_holds(self) -> None:
        alice = World().client()
        alice.put(ONE[2:], mark("q"))
        alice.put(SYS[1:])
        assert letters(alice.get(ONE, mark("p")).grants) == "NONE*4"
        assert alice.prefixes(prefix_ids=[pid("p")]) == []

    def test_a_read_renews_what_the_prefix_itself_holds_also_behind_a_hole(self) -> None:
        alice = World().client()
        alice.put(ONE[2:], mark("p", ttl=100))
        assert letters(alice.get(ONE, mark("p", ttl=500)).grants) == "NONE*2 RENEWED*2"
        assert alice.prefix("p").remaining_ms == 500


class TestExpireModes:
    def test_expire_leaves_ordinary_objects(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p"))
        assert alice.expire("p") == (1, 2, 0)
        assert alice.found(SYS) == "++"
        assert world.guaranteed == 0
        flood(alice)
        assert alice.found(SYS) == "--"

    def test_delete_removes_what_no_other_prefix_holds(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        assert alice.expire("one", mode=ExpireMode.DELETE) == (1, 2, 2)
        assert alice.found(ONE) == "++--"
        assert alice.expire("two", mode=ExpireMode.DELETE) == (1, 4, 0)
        assert alice.found(TWO) == "----"
        assert world.free == 16

    def test_delete_of_both_holders_at_once_removes_the_shared_part_too(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        assert alice.expire("one", "two", mode=ExpireMode.DELETE) == (2, 6, 0)
        assert world.free == 16

    def test_delete_under_a_lease_hides_at_once_and_frees_later(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p"))
        alice.get(SYS, lease=10)
        alice.expire("p", mode=ExpireMode.DELETE)
        assert alice.found(SYS) == "--"
        assert world.free == 14
        world.later(10)
        assert world.free == 16

    def test_all_holders_ends_every_hold_on_these_blocks(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        assert alice.expire("one", mode=ExpireMode.ALL_HOLDERS) == (1, 4, 0)
        assert world.guaranteed == 2
        assert alice.found(ONE) == "++++"
        info = alice.prefix("two")
        assert (info.blocks, info.covered_tokens) == (2, 0)  # a run from the root no longer

    @pytest.mark.parametrize("mode", list(ExpireMode))
    def test_a_dry_run_counts_and_does_nothing(self, mode: ExpireMode) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("one"))
        alice.put(TWO, mark("two"))
        before = world.state.stats(world.now)
        counts = alice.expire("one", mode=mode, dry_run=True)
        assert world.state.stats(world.now) == before
        assert alice.expire("one", mode=mode) == counts

    def test_expire_drops_reservations_too(self) -> None:
        world = World()
        alice = world.client()
        alice.start(SYS, mark("p"))
        assert alice.expire("p") == (1, 0, 0)
        assert world.guaranteed == 0
        assert alice.end(SYS) == "OK*2"
        assert world.guaranteed == 0

    def test_an_unknown_prefix_counts_as_zero(self) -> None:
        alice = World().client()
        assert alice.expire("nobody") == (0, 0, 0)


class TestRecords:
    def test_a_record_goes_with_its_last_window(self) -> None:
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100, label="system prompt"))
        assert alice.prefix("p").label == "system prompt"
        world.later(100)
        assert alice.prefixes() == []
        assert world.stat("prefixes_ended") == 1

    def test_it_tells_what_it_covers(self) -> None:
        world = World()
        alice = world.client()
        alice.put(ONE, mark("p", ttl=100, blocks=4))
        world.later(40)
        info = alice.prefix("p")
        assert (info.end_token, info.covered_tokens, info.blocks, info.bytes) == (64, 64, 4, 4 * PAGE)
        assert (info.ttl_ms, info.remaining_ms, info.age_ms, info.renewals, info.tenant) == (100, 60, 40, 0, "")

    def test_pages_and_filters(self) -> None:
        world = World()
        alice = world.client()
        names = [f"p{n}" for n in range(5)]
        for n, name in enumerate(names):
            alice.put(chain(name, 1), mark(name, label="even" if n % 2 == 0 else "odd"))
        ids = sorted(pid(name) for name in names)
        first = alice.prefixes(limit=2)
        rest = alice.prefixes(after=first[-1].prefix_id)
        assert [info.prefix_id for info in first + rest] == ids
        assert len(alice.prefixes(label="odd")) == 2
        assert [info.prefix_id for info in alice.prefixes(prefix_ids=[pid("p3"), pid("no")])] == [pid("p3")]

    def test_a_tenant_sees_and_touches_its_own_prefixes_only(self) -> None:
        world = World()
        red, blue = world.client("r", tenant="red"), world.client("b", tenant="blue")
        red.put(SYS, mark("p", ttl=100))
        blue.put(SYS, mark("p", ttl=200))
        assert [info.remaining_ms for info in red.prefixes()] == [100]
        assert red.expire("p", mode=ExpireMode.ALL_HOLDERS) == (1, 0, 2)
        assert red.prefixes() == []
        assert [info.remaining_ms for info in blue.prefixes()] == [200]
        assert world.guaranteed == 2
        assert red.send(Renew(pid("p"), 900)) == Expired(0, 0, 0)
        assert red.expire("p", mode=ExpireMode.DELETE) == (0, 0, 0)

    def test_over_the_limit_of_records_a_mark_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(windows_module, "PREFIXES_MAX", 1)
        world = World()
        alice = world.client()
        alice.put(SYS, mark("p", ttl=100))
        assert alice.put(SYS, mark("q")) == "EXISTS*2 | CAPACITY_EXCEEDED*2"
        assert alice.get(SYS, mark("q")).grants == [Grant.NONE] * 2
        world.later(100)
        assert alice.put(SYS, mark("q")) == "EXISTS*2 | OPENED*2"

    def test_windows_of_different_lengths_end_one_after_the_other(self) -> None:
        world = World()
        alice = world.client()
        for n, block in enumerate(ONE):
            alice.put([block], Mark(pid("p"), 64, 100 * (4 - n)))
        for left in (3, 2, 1):
            world.later(100)
            assert alice.prefix("p").blocks == left
            assert alice.prefix("p").covered_tokens == left * BLOCK
        assert world.later(100) is None
        assert alice.prefixes() == []
