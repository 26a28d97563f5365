"""DESIGN: capacity."""

import pytest

from kvpin.errors import ConfigError
from kvpin.limits import PAGE_BYTES, TTL_MS_MAX
from kvpin.master.core import windows
from kvpin.master.core.config import CoreConfig
from kvpin.protocol import Grant

from .scenario import BLOCK, PAGE, World, chain, letters, mark

DOC = chain("doc", 4)


def test_over_the_limit_a_leading_run_is_granted_and_the_rest_written_unprotected() -> None:
    world = World(limit=2)
    alice = world.client()
    assert alice.put(DOC, mark("p")) == "WRITE*4 | OPENED*2 CAPACITY_EXCEEDED GAP"
    assert alice.found(DOC) == "++++"
    assert world.guaranteed == 2
    assert alice.prefix("p").covered_tokens == 2 * BLOCK
    assert world.stat("guarantees_refused") == 1
    assert world.stat("guarantees_gapped") == 1


def test_the_limit_cuts_at_the_deep_end_whatever_the_order_of_the_items() -> None:
    world = World(limit=2)
    alice = world.client()
    assert letters(alice.start(DOC[::-1], mark("p")).grants) == "GAP CAPACITY_EXCEEDED OPENED*2"


def test_a_gap_stops_what_lies_deeper_even_if_it_would_fit() -> None:
    world = World(limit=3)
    alice = world.client()
    blocks = [*chain("a", 1), *chain("big", 3, pages=3, after=DOC[:1])[1:2], *chain("c", 1, after=DOC[:3])[3:]]
    assert alice.put(blocks, mark("p")) == "WRITE*3 | OPENED CAPACITY_EXCEEDED GAP"


def test_a_gap_is_filled_when_its_own_block_is_granted() -> None:
    world = World(limit=2)
    alice = world.client()
    alice.put(chain("other", 1), mark("other", ttl=50))
    assert alice.put(DOC[:3], mark("p")) == "WRITE*3 | OPENED CAPACITY_EXCEEDED GAP"
    world.later(50)
    assert alice.put(DOC[2:3], mark("p")) == "EXISTS | GAP"
    assert alice.put(DOC[1:2], mark("p")) == "EXISTS | OPENED"
    assert alice.prefix("p").covered_tokens == 2 * BLOCK


def test_no_space_is_a_gap() -> None:
    world = World(pool=4, limit=3)
    alice = world.client()
    alice.start(chain("held", 2))
    assert letters(alice.start(DOC, mark("p")).grants) == "OPENED*2 GAP*2"


def test_capacity_is_free_again_the_moment_the_last_window_ends() -> None:
    world = World(limit=4)
    alice = world.client()
    alice.put(DOC, mark("p", ttl=100))
    world.now += 100  # no tick, no eviction: the put itself must see it
    assert alice.put(chain("next", 4), mark("q")) == "WRITE*4 | OPENED*4"


def test_capacity_is_free_again_after_remove_and_revoke() -> None:
    world = World(limit=4)
    alice = world.client()
    alice.put(DOC[:2], mark("p"))
    alice.start(DOC[2:], mark("p"))
    assert world.guaranteed == 4
    alice.revoke(DOC[2:])
    assert world.guaranteed == 2
    assert alice.remove(DOC[:2], force=True) == "OK*2"
    assert world.guaranteed == 0
    assert alice.prefixes() == []


def test_a_forced_removal_leaves_a_gap() -> None:
    world = World()
    alice = world.client()
    alice.put(DOC, mark("p"))
    alice.remove(DOC[1:2], force=True)
    assert alice.prefix("p").covered_tokens == BLOCK
    assert alice.put(DOC[1:2], mark("p")) == "WRITE | OPENED"
    assert alice.prefix("p").covered_tokens == 4 * BLOCK


def test_opening_needs_admission_also_for_what_exists() -> None:
    world = World(limit=1)
    alice = world.client()
    alice.put(DOC)
    assert alice.protect(DOC, mark("p")) == "OPENED CAPACITY_EXCEEDED GAP*2"


def test_a_cache_has_a_quota_beside_the_global_limit() -> None:
    world = World(limit=8, cache_quotas={"small": PAGE})
    alice = world.client()
    assert alice.put(DOC[:2], mark("p"), cache="small") == "WRITE*2 | OPENED CAPACITY_EXCEEDED"
    assert alice.put(chain("x", 2), mark("q"), cache="large") == "WRITE*2 | OPENED*2"


def test_a_tenant_has_a_quota_beside_the_global_limit() -> None:
    world = World(limit=8, tenant_quotas={"red": PAGE})
    red, blue = world.client("r", tenant="red"), world.client("b", tenant="blue")
    assert red.put(DOC[:2], mark("p")) == "WRITE*2 | OPENED CAPACITY_EXCEEDED"
    assert blue.put(chain("x", 2), mark("p")) == "WRITE*2 | OPENED*2"


def test_groups_that_end_at_the_same_token_are_granted_one_by_one() -> None:
    world = World(limit=3)
    alice = world.client()
    groups = [block for pair in zip(chain("k", 3), chain("v", 3), strict=True) for block in pair]
    assert alice.put(groups, mark("p")) == "WRITE*6 | OPENED*3 CAPACITY_EXCEEDED GAP*2"
    assert alice.prefix("p").covered_tokens == BLOCK


def test_a_limit_of_zero_refuses_every_window_and_no_write() -> None:
    world = World(limit=0)
    alice = world.client()
    assert alice.put(DOC, mark("p")) == "WRITE*4 | CAPACITY_EXCEEDED GAP*3"
    assert alice.prefixes() == []


def test_many_gaps_are_remembered_as_the_shallowest() -> None:
    world = World(pool=64, limit=1)
    alice = world.client()
    long = chain("long", 40)
    assert alice.put(long, mark("p")) == "WRITE*40 | OPENED CAPACITY_EXCEEDED GAP*38"
    assert alice.put(long[20:21], mark("p")) == "EXISTS | GAP"
    assert alice.prefix("p").covered_tokens == BLOCK


def test_a_shallower_gap_takes_the_place_of_the_deepest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "GAPS_MAX", 2)
    world = World()
    alice = world.client()
    alice.put(DOC, mark("p"))
    alice.remove(DOC[2:], force=True)
    alice.remove(DOC[1:2], force=True)
    assert alice.prefix("p").covered_tokens == BLOCK
    assert alice.put(DOC[1:], mark("p")) == "WRITE*3 | OPENED*3"
    assert alice.prefix("p").covered_tokens == 4 * BLOCK


def test_a_replacement_that_got_no_window_is_no_gap_until_the_swap() -> None:
    world = World(limit=1)
    alice = world.client()
    alice.put(DOC[:1], mark("p"))
    started = alice.start(DOC[:1], mark("p"), replace=True, force=True)
    assert letters(started.grants) == "CAPACITY_EXCEEDED"
    assert alice.prefix("p").covered_tokens == BLOCK
    alice.end(DOC[:1])
    assert alice.prefixes() == []


def test_what_could_not_be_replaced_is_neither_protected_nor_a_gap() -> None:
    world = World(pool=2, limit=1)
    alice = world.client()
    alice.put(DOC[:1], mark("p"))
    alice.start(chain("held", 1))
    assert letters(alice.start(DOC[:1], mark("p"), replace=True, force=True).grants) == "NONE"
    assert alice.prefix("p").covered_tokens == BLOCK


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pool_bytes": 0}, "pool_bytes = 0: give a positive multiple of 4096"),
        ({"pool_bytes": PAGE_BYTES + 1}, "pool_bytes = 4097"),
        ({"guaranteed_limit_bytes": 10 * PAGE_BYTES}, "would starve ordinary writes"),
        ({"guaranteed_limit_bytes": -1}, "guaranteed_limit_bytes = -1"),
        ({"low_watermark": 0.95}, "must ascend"),
        ({"high_watermark": 1.5}, "must ascend"),
        ({"headroom": 0.95}, "headroom = 0.95"),
        ({"cache_quotas": {"kv": -1}}, r"cache_quotas\['kv'\] = -1"),
        ({"tenant_quotas": {"red": -5}}, r"tenant_quotas\['red'\] = -5"),
        ({"put_timeout_ms": 0}, "put_timeout_ms = 0"),
        ({"quarantine_ms": -1}, "quarantine_ms = -1"),
        ({"lease_ms_max": 0}, "lease_ms_max = 0"),
        ({"ttl_ms_max": TTL_MS_MAX + 1}, "ttl_ms_max = "),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_do(change: dict[str, object], text: str) -> None:
    right = {"pool_bytes": 10 * PAGE_BYTES, "guaranteed_limit_bytes": 9 * PAGE_BYTES, "headroom": 0.05}
    CoreConfig(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        CoreConfig(**(right | change))  # type: ignore[arg-type]


def test_a_grant_of_a_prefix_survives_a_flood_and_a_refused_one_does_not() -> None:
    world = World(pool=16, limit=2)
    alice = world.client()
    grants = alice.start(DOC, mark("p")).grants
    alice.end(DOC)
    for n in range(50):
        world.later(1)
        alice.put(chain(f"flood{n}.", 2))
    assert alice.found(DOC) == "".join("+" if grant is Grant.OPENED else "-" for grant in grants)
