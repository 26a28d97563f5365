"""Ranges of the segment: binned best fit with full coalescing.

Free ranges are known by both ends, so a freed range finds its neighbours in two lookups, and by size class. A class is
a power of two cut into `_SUB_BINS` steps, so up to `2 * _SUB_BINS` pages a class holds one size only and the fit is
exact. In a coarser class a few ranges are tried and the smallest that fits is taken; failing that, the next class that
has any: all of its ranges fit. A range is cut from its front: what is left keeps its end, so mostly also its bin.
"""

from itertools import pairwise

from kvpin.limits import PAGE_BYTES

NO_RANGE = -1

_SUB_BITS = 3
_SUB_BINS = 1 << _SUB_BITS
_TRIES = 8  # ranges looked at in a class where not every range fits


def page_round(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _bin_of(pages: int) -> int:
    """The size class of a range: exact up to 2 * _SUB_BINS pages, steps of 1/_SUB_BINS beyond."""
    shift = pages.bit_length() - _SUB_BITS - 1
    return pages if shift <= 0 else (shift << _SUB_BITS) + (pages >> shift)


class Allocator:
    """Page-aligned ranges of `[0, size_bytes)`. It knows each range that it gave out, so none is freed twice."""

    __slots__ = ("_bins", "_end_of", "_filled", "_start_of", "free_bytes", "ranges", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise ValueError(f"size_bytes must be a positive multiple of {PAGE_BYTES}, not {size_bytes}")
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self.ranges: dict[int, int] = {}  # all and only ranges given out: offset -> bytes
        self._start_of: dict[int, int] = {}  # free ranges: end -> start
        self._end_of: dict[int, int] = {}  # free ranges: start -> end
        self._bins: list[dict[int, None]] = [{} for _ in range(_bin_of(size_bytes // PAGE_BYTES) + 1)]  # of ends
        self._filled = 0  # bit i: bin i has ranges
        self._insert(0, size_bytes)

    def allocate(self, size_bytes: int) -> int:
        """The offset of a range of at least `size_bytes` (> 0) in whole pages, or NO_RANGE."""
        size_bytes = page_round(size_bytes)
        if size_bytes > self.free_bytes:
            return NO_RANGE
        pages = size_bytes // PAGE_BYTES
        index = _bin_of(pages)
        end = self._best_of(index, size_bytes) if self._filled >> index & 1 else NO_RANGE
        if end == NO_RANGE:
            larger = self._filled >> index + 1
            if not larger:
                return NO_RANGE
            index += (larger & -larger).bit_length()
            end, _ = self._bins[index].popitem()
            self._bins[index][end] = None
        start = self._start_of[end]
        self._cut(start, end, index, size_bytes)
        self.ranges[start] = size_bytes
        self.free_bytes -= size_bytes
        return start

    def free(self, offset: int) -> int:
        """Give a range back; its bytes. Raises KeyError if it isn't one that was given out."""
        size_bytes = self.ranges.pop(offset)
        self.free_bytes += size_bytes
        start, end = offset, offset + size_bytes
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._end_of.get(end)
        if after is not None:
            self._remove(end, after)
            end = after
        self._insert(start, end)
        return size_bytes

    def largest_free_bytes(self) -> int:
        """The largest range that could be given out now."""
        if not self._filled:
            return 0
        return max(end - self._start_of[end] for end in self._bins[self._filled.bit_length() - 1])

    def free_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of all free ranges, ascending."""
        return sorted(self._end_of.items())

    def violations(self) -> list[str]:
        """What is wrong with the books of free ranges; empty when they agree with each other."""
        found: list[str] = []
        free = self.free_ranges()
        if sum(end - start for start, end in free) != self.free_bytes:
            found.append("free_bytes isn't the sum of the free ranges")
        if {end: start for start, end in free} != self._start_of:
            found.append("free ranges by start and by end differ")
        binned = {end: index for index, ends in enumerate(self._bins) for end in ends}
        if binned != {end: _bin_of((end - start) // PAGE_BYTES) for start, end in free}:
            found.append("free ranges lie in wrong bins")
        if self._filled != sum(1 << index for index, ends in enumerate(self._bins) if ends):
            found.append("the mask of filled bins is wrong")
        if any(left[1] >= right[0] for left, right in pairwise(free)):
            found.append("free ranges touch or overlap")
        return found

    def _best_of(self, index: int, size_bytes: int) -> int:
        """The end of the smallest fitting range among the last few of a bin; NO_RANGE if none of them fits."""
        ends = self._bins[index]
        if index < 2 * _SUB_BINS:  # one size only
            end, _ = ends.popitem()
            ends[end] = None
            return end
        tried: list[int] = []
        best, best_bytes = NO_RANGE, self.size_bytes + 1
        while ends and len(tried) < _TRIES and best_bytes != size_bytes:
            end, _ = ends.popitem()  # not an iterator: it would walk over the graves of all removed before
            tried.append(end)
            range_bytes = end - self._start_of[end]
            if size_bytes <= range_bytes < best_bytes:
                best, best_bytes = end, range_bytes
        for end in tried:
            ends[end] = None
        return best

    def _cut(self, start: int, end: int, index: int, size_bytes: int) -> None:
        """Take the first `size_bytes` from the free range [start, end), which lies in bin `index`."""
        rest = start + size_bytes
        if rest < end and _bin_of((end - rest) // PAGE_BYTES) == index:
            del self._end_of[start]
            self._end_of[rest] = end
            self._start_of[end] = rest
            return
        self._remove(start, end)
        if rest < end:
            self._insert(rest, end)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        index = _bin_of((end - start) // PAGE_BYTES)
        self._bins[index][end] = None
        self._filled |= 1 << index

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        index = _bin_of((end - start) // PAGE_BYTES)
        ends = self._bins[index]
        del ends[end]
        if not ends:
            self._filled ^= 1 << index
