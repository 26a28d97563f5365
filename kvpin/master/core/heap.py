"""A heap whose entries can be cancelled and are put back lazily.

Why: deadlines and eviction orders mostly move *later*. Leaving an entry where it is and looking again when it comes
up costs nothing on the hot path, where moving it each time would cost a logarithm. A cancelled entry stays until it
comes up, but dead entries never outnumber the live ones for long: the heap is rebuilt when they do.
"""

import heapq
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Entry: TypeAlias = list[Any]  # [order, number, item]; the item is None once cancelled or popped
ORDER, NUMBER, ITEM = 0, 1, 2

_DEAD_MIN = 64  # below this a rebuild isn't worth its call


class LazyHeap(Generic[T]):
    """Items by ascending order; equal orders come out in the order they were pushed."""

    __slots__ = ("_dead", "_entries", "_numbers")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._numbers = count()
        self._dead = 0

    def __len__(self) -> int:
        return len(self._entries) - self._dead

    def push(self, order: Any, item: T) -> Entry:
        entry: Entry = [order, next(self._numbers), item]
        heapq.heappush(self._entries, entry)
        return entry

    def cancel(self, entry: Entry) -> None:
        """Forget a live entry."""
        entry[ITEM] = None
        self._dead += 1
        if self._dead > _DEAD_MIN and self._dead * 2 > len(self._entries):
            self._entries = [kept for kept in self._entries if kept[ITEM] is not None]
            heapq.heapify(self._entries)
            self._dead = 0

    def head(self) -> Entry | None:
        """The first live entry, left in place."""
        entries = self._entries
        while entries:
            entry = entries[0]
            if entry[ITEM] is not None:
                return entry
            heapq.heappop(entries)
            self._dead -= 1
        return None

    def pop(self) -> T | None:
        """Take the first live item out."""
        entry = self.head()
        if entry is None:
            return None
        heapq.heappop(self._entries)
        item: T = entry[ITEM]
        entry[ITEM] = None
        return item
