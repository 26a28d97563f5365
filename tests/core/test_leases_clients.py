"""DESIGN: leases, and clients that come and go."""

import pytest

from kvpin.limits import BATCH_KEYS_MAX
from kvpin.master.core import reads
from kvpin.protocol import Bye, Done, ErrorCode, Failure, GetReplicas, Ping, PutItem, PutStart, Release

from .scenario import PAGE, World, chain, mark

DOC = chain("doc", 2)


class TestLeases:
    def test_one_lease_covers_all_hits(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC)
        replicas = alice.get([*DOC, *chain("miss", 1)], lease=50)
        assert replicas.offsets[2:] == [-1]
        assert replicas.sizes == [PAGE, PAGE, 0]
        assert replicas.lease_id > 0
        assert replicas.lease_ms == 50
        assert world.stat("leases") == 1
        assert (world.stat("get_hits"), world.stat("get_misses")) == (2, 1)

    def test_no_hit_no_lease(self) -> None:
        world = World()
        assert world.client().get(DOC).lease_id == 0
        assert world.stat("leases") == 0

    def test_the_reply_says_how_long_a_lease_is_at_most(self) -> None:
        world = World(lease_ms_max=500)
        alice = world.client()
        alice.put(DOC)
        assert alice.get(DOC, lease=10_000).lease_ms == 500
        assert world.later(499) == world.now + 1
        assert world.stat("leases") == 1
        world.later(1)
        assert world.stat("leases") == 0
        assert world.stat("leases_expired") == 1

    def test_a_leased_range_is_neither_freed_nor_reused(self) -> None:
        world = World(pool=2, limit=0)
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC)
        lease = alice.get(DOC[:1], lease=100).lease_id
        assert bob.remove(DOC[:1]) == "LEASED"
        assert bob.remove(DOC[:1], force=True) == "OK"
        assert alice.found(DOC) == "-+"
        assert bob.put(chain("new", 2)) == "WRITE NO_SPACE"
        alice.send(Release([lease]))
        assert bob.put(chain("more", 1)) == "WRITE"

    def test_two_leases_on_an_object_must_both_end(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC)
        first, second = alice.get(DOC).lease_id, bob.get(DOC).lease_id
        alice.send(Release([first]))
        assert alice.remove(DOC) == "LEASED*2"
        bob.send(Ping(), released=[second])
        assert alice.remove(DOC) == "OK*2"

    def test_only_its_own_client_releases_a_lease(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC)
        lease = alice.get(DOC).lease_id
        assert bob.send(Release([lease, 999])) == Done()
        assert world.stat("leases") == 1
        assert alice.send(Release([lease, lease])) == Done()
        assert world.stat("leases") == 0

    def test_a_message_that_releases_too_many_is_refused(self) -> None:
        alice = World().client()
        reply = alice.send(Ping(), released=range(BATCH_KEYS_MAX + 1))
        assert isinstance(reply, Failure)
        assert reply.code is ErrorCode.BAD_REQUEST
        assert alice.send(Ping(), released=range(BATCH_KEYS_MAX)) == Done()

    def test_over_the_limit_a_get_is_refused_and_no_running_lease_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reads, "LEASES_MAX_PER_CLIENT", 2)
        world = World()
        alice = world.client()
        alice.put(DOC)
        alice.get(DOC)
        alice.get(DOC)
        assert "OVERLOADED" in alice.refused(GetReplicas([DOC[0].key], 10))
        assert world.stat("leases") == 2
        world.later(10)
        assert alice.get(DOC).lease_id == 3


class TestClients:
    def test_an_unknown_client_must_say_hello(self) -> None:
        world = World()
        reply = world.state.handle(world.now, b"stranger", 1, Ping())
        assert isinstance(reply, Failure)
        assert reply.code is ErrorCode.EPOCH_CHANGED

    def test_a_client_gone_loses_its_puts_into_quarantine(self) -> None:
        world = World(quarantine_ms=100)
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(DOC, mark("p"))
        alice.leaves()
        assert world.guaranteed == 0
        assert world.stat("quarantined_bytes") == 2 * PAGE
        assert bob.put(DOC) == "WRITE*2"
        world.later(100)
        assert world.stat("quarantined_bytes") == 0

    def test_a_dead_writers_ranges_are_free_at_once(self) -> None:
        world = World()
        alice = world.client()
        alice.start(DOC)
        alice.leaves(writer_dead=True)
        assert world.free == 16

    def test_a_dead_writers_earlier_ranges_are_free_too(self) -> None:
        world = World(put_timeout_ms=100)
        alice, bob = world.client("alice"), world.client("bob")
        alice.start(DOC)
        bob.start(chain("bob", 1))
        world.later(100)
        alice.leaves()
        assert world.free == 13
        alice.leaves(writer_dead=True)  # it's known only now
        assert world.free == 15

    def test_leases_of_a_vanished_client_run_out_by_themselves(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC)
        alice.get(DOC, lease=100)
        alice.leaves()
        assert bob.remove(DOC) == "LEASED*2"  # it may be reading yet
        world.later(100)
        assert bob.remove(DOC) == "OK*2"

    def test_leases_of_a_dead_client_end_at_once(self) -> None:
        world = World()
        alice, bob = world.client("alice"), world.client("bob")
        alice.put(DOC)
        alice.get(DOC, lease=100)
        alice.leaves(writer_dead=True)
        assert bob.remove(DOC) == "OK*2"

    def test_bye_ends_leases_and_puts(self) -> None:
        world = World()
        alice = world.client()
        alice.put(DOC)
        alice.get(DOC, lease=100)
        alice.start(chain("x", 1))
        assert alice.send(Bye()) == Done()
        assert world.stat("leases") == 0
        assert world.stat("quarantined_bytes") == PAGE
        assert world.stat("clients") == 0
        assert "EPOCH_CHANGED" in alice.refused(Ping())

    def test_objects_and_windows_outlive_their_client(self) -> None:
        world = World()
        alice = world.client("alice")
        alice.put(DOC, mark("p"))
        alice.leaves(writer_dead=True)
        bob = world.client("bob")
        assert bob.found(DOC) == "++"
        assert world.guaranteed == 2

    def test_a_second_hello_keeps_what_the_client_has(self) -> None:
        world = World()
        alice = world.client("alice")
        alice.start(DOC)
        world.client("alice")
        assert alice.end(DOC) == "OK*2"
        assert world.stat("clients") == 1

    def test_leaving_twice_or_unknown_does_no_harm(self) -> None:
        world = World()
        alice = world.client()
        alice.leaves()
        alice.leaves()
        world.state.client_left(world.now, b"nobody", True)
        assert world.stat("clients_left") == 1

    def test_a_client_has_a_bounded_number_of_puts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvpin.master.core.puts.WRITES_MAX_PER_CLIENT", 2)
        alice = World().client()
        alice.start(DOC)
        assert "OVERLOADED" in alice.refused(PutStart([PutItem(b"x", 1)]))
        alice.end(DOC)
        assert alice.put(chain("x", 1)) == "WRITE"
