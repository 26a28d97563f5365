"""Which objects go when room is short.

Two heaps: unpinned objects, and soft-pinned ones for when the first runs out. An object has at most one entry in them,
with its order as of when it was pushed. Being read only moves an object back, so a stale entry comes up too early,
never too late, and is then put back in its place; a read costs the heap nothing. An entry whose object turns out to be
guaranteed or leased is dropped (the object is *parked*) and pushed again when its last window or lease ends: a pool
full of guaranteed objects costs an eviction nothing.

Deliberately not counted: how many bytes are evictable. Each get and release would have to keep it.
"""

from collections.abc import Iterable
from typing import Protocol

from kvpin.master.core.heap import ITEM, ORDER, Entry, LazyHeap
from kvpin.master.core.types import COMPLETE, Object


class Policy(Protocol):
    def order(self, obj: Object) -> tuple[int, ...]:
        """The smallest goes first. An object's order may rise while it lives, but never fall."""
        ...


class Lru:
    """The least recently used first; of what was used together, the deepest block first: it's of no use without its
    parents, while they are without it.
    """

    __slots__ = ()

    def order(self, obj: Object) -> tuple[int, ...]:
        return (obj.last_access_ms, -obj.end_token)


def evictable(obj: Object) -> bool:
    """Nobody's window and nobody's lease is on it."""
    return obj.phase is COMPLETE and not obj.holders and not obj.leases


class Evictor:
    __slots__ = ("_hopeless_bytes", "heaps", "order")

    def __init__(self, policy: Policy) -> None:
        self.order = policy.order
        self.heaps: tuple[LazyHeap[Object], LazyHeap[Object]] = (LazyHeap(), LazyHeap())  # unpinned, soft-pinned
        self._hopeless_bytes: int | None = None  # so much was not evictable, and nothing was offered since

    def offer(self, obj: Object) -> None:
        """Call it whenever an object may have become evictable."""
        if obj.evict_entry is None and obj.phase is COMPLETE and not obj.leases and not obj.holders:
            obj.evict_entry = self.heaps[obj.soft_pin].push(self.order(obj), obj)
            self._hopeless_bytes = None

    def forget(self, obj: Object) -> None:
        """The object leaves otherwise than by `select`."""
        if obj.evict_entry is not None:
            self.heaps[obj.soft_pin].cancel(obj.evict_entry)
            obj.evict_entry = None

    def select(self, need_bytes: int, looks: int) -> list[Object] | None:
        """Objects of at least `need_bytes`, taken from the heaps; None, and nothing taken, if there aren't as many.

        It looks at `looks` objects at most. If that wasn't enough, the next call goes on from there.
        """
        if self._hopeless_bytes is not None and need_bytes >= self._hopeless_bytes:
            return None
        victims: list[Object] = []
        looks_left = self._take(need_bytes, looks, victims)
        if sum(obj.range_bytes for obj in victims) >= need_bytes:
            return victims
        if looks_left:
            self._hopeless_bytes = need_bytes
        self.put_back(victims)
        return None

    def select_some(self, need_bytes: int, looks: int) -> list[Object]:
        """As `select`, but as much of `need_bytes` as `looks` objects looked at give."""
        victims: list[Object] = []
        self._take(need_bytes, looks, victims)
        return victims

    def refresh(self, looks: int) -> None:
        """Put stale entries at the top where they belong now, so that the next eviction finds its victims there."""
        for heap in self.heaps:
            while looks and (entry := heap.head()) is not None and self._settle(heap, entry) is None:
                looks -= 1

    def is_empty(self) -> bool:
        """Is nothing evictable at all?"""
        return not any(self.heaps)

    def put_back(self, victims: Iterable[Object]) -> None:
        """Undo a selection."""
        for obj in victims:
            obj.evict_entry = self.heaps[obj.soft_pin].push(self.order(obj), obj)

    def _take(self, need_bytes: int, looks: int, victims: list[Object]) -> int:
        """Pop victims until they make `need_bytes` or `looks` is used up; how many looks are left."""
        for heap in self.heaps:
            while need_bytes > 0 and looks:
                entry = heap.head()
                if entry is None:
                    break
                looks -= 1
                obj = self._settle(heap, entry)
                if obj is not None:
                    heap.pop()
                    obj.evict_entry = None
                    victims.append(obj)
                    need_bytes -= obj.range_bytes
        return looks

    def _settle(self, heap: LazyHeap[Object], head: Entry) -> Object | None:
        """The object at the head of a heap, if that's its place. If not, it's moved to where it belongs, or parked."""
        obj: Object = head[ITEM]
        parked = obj.holders or obj.leases
        order = self.order(obj)
        if not parked and order <= head[ORDER]:
            return obj
        heap.pop()
        obj.evict_entry = None if parked else heap.push(order, obj)
        return None
