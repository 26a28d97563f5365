"""The allocator and the heap against naive models."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpin.limits import PAGE_BYTES as PAGE
from kvpin.master.core.allocator import NO_RANGE, Allocator, page_round
from kvpin.master.core.heap import LazyHeap

POOL_PAGES = 200


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(0, 1000)), min_size=20, max_size=120))
def test_ranges_never_overlap_and_coalesce_fully(steps: list[tuple[bool, int, int]]) -> None:
    allocator = Allocator(POOL_PAGES * PAGE)
    owner: list[int | None] = [None] * POOL_PAGES  # the model: who has each page
    live: list[tuple[int, int]] = []
    for is_free, pages, choice in steps:
        if is_free and live:
            offset, pages = live.pop(choice % len(live))
            assert allocator.free(offset) == pages * PAGE
            owner[offset // PAGE : offset // PAGE + pages] = [None] * pages
        else:
            offset = allocator.allocate(pages * PAGE - choice)  # any size that takes so many pages
            runs = "".join("." if page is None else "x" for page in owner).split("x")
            if offset == NO_RANGE:
                assert max(map(len, runs)) < pages
            else:
                first = offset // PAGE
                assert owner[first : first + pages] == [None] * pages
                owner[first : first + pages] = [offset] * pages
                live.append((offset, pages))
        assert allocator.violations() == []
        assert allocator.free_bytes == owner.count(None) * PAGE
        runs = "".join("." if page is None else "x" for page in owner).split("x")
        assert allocator.largest_free_bytes() == max(map(len, runs)) * PAGE
    for offset, _ in live:
        allocator.free(offset)
    assert allocator.free_ranges() == [(0, POOL_PAGES * PAGE)]


@pytest.mark.parametrize(
    ("name", "pages", "utilisation_min"),
    [("one size", [256], 1.0), ("powers of two", [256, 512, 1024, 2048], 0.95), ("arbitrary", None, 0.90)],
)
def test_utilisation_when_a_full_pool_turns_over(name: str, pages: list[int] | None, utilisation_min: float) -> None:
    chance = random.Random(1)
    allocator = Allocator(1 << 30)
    live: list[int] = []
    used: list[float] = []
    for _ in range(4000):
        size_bytes = (chance.choice(pages) if pages else chance.randrange(256, 2048)) * PAGE
        while (offset := allocator.allocate(size_bytes)) == NO_RANGE:
            used.append(1 - allocator.free_bytes / allocator.size_bytes)
            index = chance.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            allocator.free(live.pop())
        live.append(offset)
    assert allocator.violations() == []
    assert sum(used) / len(used) >= utilisation_min, name


def test_an_exact_fit_is_preferred() -> None:
    allocator = Allocator(100 * PAGE)
    offsets = [allocator.allocate(pages * PAGE) for pages in (30, 1, 20, 1, 25, 1)]
    allocator.allocate(allocator.free_bytes)
    for offset in offsets[::2]:
        allocator.free(offset)
    assert allocator.allocate(20 * PAGE) == offsets[2]
    assert allocator.allocate(24 * PAGE) == offsets[4]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_of_ranges_in_one_class_the_smallest_that_fits_is_taken(order: tuple[int, ...]) -> None:
    allocator = Allocator(1000 * PAGE)
    offsets = [allocator.allocate(pages * PAGE) for pages in (96, 1, 100, 1, 103, 1)][::2]
    allocator.allocate(allocator.free_bytes)
    for index in order:
        allocator.free(offsets[index])
    assert allocator.allocate(97 * PAGE) == offsets[1]


def test_a_range_is_freed_once() -> None:
    allocator = Allocator(4 * PAGE)
    offset = allocator.allocate(1)
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


def test_more_than_there_is_gets_nothing() -> None:
    allocator = Allocator(4 * PAGE)
    assert allocator.allocate(5 * PAGE) == NO_RANGE
    assert allocator.allocate(4 * PAGE) == 0
    assert allocator.allocate(1) == NO_RANGE
    assert allocator.largest_free_bytes() == 0


@pytest.mark.parametrize("size_bytes", [0, -PAGE, PAGE + 1])
def test_a_pool_is_whole_pages(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple"):
        Allocator(size_bytes)


@pytest.mark.parametrize(("size_bytes", "rounded"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_page_round(size_bytes: int, rounded: int) -> None:
    assert page_round(size_bytes) == rounded


def corrupt_free_bytes(allocator: Allocator) -> None:
    allocator.free_bytes -= PAGE


def corrupt_start_of(allocator: Allocator) -> None:
    allocator._start_of[allocator.size_bytes] = 0


def corrupt_bin(allocator: Allocator) -> None:
    allocator._bins[1][PAGE] = None


def corrupt_mask(allocator: Allocator) -> None:
    allocator._filled ^= 1


def corrupt_split(allocator: Allocator) -> None:
    allocator._remove(PAGE, 8 * PAGE)
    allocator._insert(PAGE, 2 * PAGE)
    allocator._insert(2 * PAGE, 8 * PAGE)


@pytest.mark.parametrize(
    ("corrupt", "text"),
    [
        (corrupt_free_bytes, "free_bytes isn't the sum"),
        (corrupt_start_of, "by start and by end differ"),
        (corrupt_bin, "wrong bins"),
        (corrupt_mask, "mask of filled bins"),
        (corrupt_split, "touch or overlap"),
    ],
)
def test_broken_books_are_noticed(corrupt: object, text: str) -> None:
    allocator = Allocator(8 * PAGE)
    allocator.allocate(PAGE)
    assert allocator.violations() == []
    corrupt(allocator)  # type: ignore[operator]
    assert any(text in violation for violation in allocator.violations())


@given(st.lists(st.tuples(st.sampled_from(["push", "cancel", "pop"]), st.integers(0, 9)), max_size=400))
def test_the_heap_gives_live_items_in_order(steps: list[tuple[str, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    live: list[tuple[int, int, list[object]]] = []  # the model: (order, number, entry)
    for number, (step, order) in enumerate(steps):
        if step == "push":
            live.append((order, number, heap.push(order, number)))
        elif step == "cancel" and live:
            heap.cancel(live.pop(order % len(live))[2])
        elif step == "pop":
            live.sort()
            expected = live.pop(0)[1] if live else None
            assert heap.pop() == expected
        assert len(heap) == len(live)


def test_cancelled_entries_do_not_pile_up() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push(0, 0)
    for number in range(10_000):
        heap.cancel(heap.push(number, number))
    assert len(heap) == 1
    assert len(heap._entries) < 200
