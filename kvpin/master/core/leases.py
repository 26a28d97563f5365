"""Leases: while one runs, the ranges it covers are neither freed nor reused.

A lease covers all hits of one answer. It ends by release, by its deadline, or with its session. The client counts it
from when it sent the request, which is earlier than the master's deadline, so the client's idea of it ends first.
"""

from collections.abc import Callable, Iterable

from kvpin.master.core.heap import ORDER, LazyHeap
from kvpin.master.core.types import Lease, Object, Session


class Leases:
    """`on_unleased(object)` is called when the last lease of an object has ended."""

    __slots__ = ("_counters", "_last_id", "_on_unleased", "by_id", "deadlines")

    def __init__(self, on_unleased: Callable[[Object], None], counters: dict[str, int]) -> None:
        self._on_unleased = on_unleased
        self._counters = counters
        self._last_id = 0
        self.by_id: dict[int, Lease] = {}
        self.deadlines: LazyHeap[Lease] = LazyHeap()

    def grant(self, session: Session, objects: list[Object], until_ms: int) -> int:
        """Its id, above 0. The objects' counts must have been raised already: the caller is at them anyway."""
        self._last_id += 1
        lease = Lease(self._last_id, session, objects, until_ms)
        lease.entry = self.deadlines.push(until_ms, lease)
        self.by_id[lease.lease_id] = lease
        session.leases[lease.lease_id] = lease
        self._counters["leases_granted"] += 1
        return lease.lease_id

    def release(self, session: Session, lease_ids: Iterable[int]) -> None:
        """End leases of this session; others' and unknown ids (they may have run out) are ignored."""
        for lease_id in lease_ids:
            lease = session.leases.get(lease_id)
            if lease is not None:
                self.end(lease)

    def end(self, lease: Lease) -> None:
        if lease.entry is not None:
            self.deadlines.cancel(lease.entry)
            lease.entry = None
        del self.by_id[lease.lease_id]
        del lease.session.leases[lease.lease_id]
        for obj in lease.objects:
            obj.leases -= 1
            if not obj.leases:
                self._on_unleased(obj)

    def due_ms(self) -> int | None:
        """When the next lease runs out."""
        head = self.deadlines.head()
        return None if head is None else head[ORDER]

    def expire(self, now_ms: int) -> None:
        """End all leases whose time has come."""
        while (due_ms := self.due_ms()) is not None and due_ms <= now_ms:
            lease = self.deadlines.pop()
            assert lease is not None
            lease.entry = None
            self.end(lease)
            self._counters["leases_expired"] += 1
