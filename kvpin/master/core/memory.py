"""The memory tier: which object lies where, and every way in which a range is given out and comes back.

A range belongs to exactly one of: a complete object, an object being written, a removed object that is still being
read (it lingers), a lost put whose writer may still write (it's in quarantine), or nobody (it's free).
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvpin.limits import EVICT_ROUNDS_MAX, PAGE_BYTES, PUT_EVICT_OBJECTS_MAX
from kvpin.master.core.allocator import NO_RANGE, Allocator, page_round
from kvpin.master.core.config import CoreConfig
from kvpin.master.core.eviction import Evictor, evictable
from kvpin.master.core.ledger import Ledger
from kvpin.master.core.stories import Stories
from kvpin.master.core.types import COMPLETE, GONE, Object, Quarantined, Session, Write
from kvpin.master.core.windows import Windows


class Memory:
    __slots__ = (
        "_config", "_counters", "_evictor", "_ledger", "_stories", "_windows", "allocator", "lingering", "objects",
        "quarantine", "writes",
    )  # fmt: skip

    def __init__(
        self, config: CoreConfig, objects: dict[bytes, Object], ledger: Ledger, evictor: Evictor, windows: Windows,
        stories: Stories, counters: dict[str, int],
    ) -> None:  # fmt: skip
        self._config = config
        self._ledger = ledger
        self._evictor = evictor
        self._windows = windows
        self._stories = stories
        self._counters = counters
        self.allocator = Allocator(config.pool_bytes)
        self.objects = objects  # all and only complete objects
        # All and only objects being written. In order of start, so in order of deadline too: the timeout is the same.
        self.writes: OrderedDict[bytes, Write] = OrderedDict()
        self.lingering: set[Object] = set()
        self.quarantine: OrderedDict[int, Quarantined] = OrderedDict()  # by offset, in order of release time

    @property
    def used_bytes(self) -> int:
        return self.allocator.size_bytes - self.allocator.free_bytes

    def make_room(self, size_bytes: int, now_ms: int) -> int:
        """The offset of a range, evicting for it if need be; NO_RANGE if nothing evictable makes room.

        Enough free bytes may still lie scattered, so it evicts in a few rounds of growing size. The first, which takes
        just what is missing, decides whether there is enough at all: if not, nothing is touched.
        """
        allocator = self.allocator
        offset = allocator.allocate(size_bytes)
        if offset != NO_RANGE:
            return offset
        need_bytes = max(page_round(size_bytes) - allocator.free_bytes, PAGE_BYTES)
        for rounds in range(EVICT_ROUNDS_MAX):
            if not self.evict(need_bytes, PUT_EVICT_OBJECTS_MAX, now_ms):
                break
            offset = allocator.allocate(size_bytes)
            if offset != NO_RANGE:
                break
            need_bytes = page_round(size_bytes) << rounds
        return offset

    def evict(self, need_bytes: int, looks: int, now_ms: int) -> list[Object]:
        """Evict objects of `need_bytes` at least, looking at `looks` objects at most.

        Empty: there aren't as many evictable, as far as it looked; nothing was touched.
        """
        victims = self._evictor.select(need_bytes, looks)
        if victims is None:
            self._counters["evictions_refused"] += 1
            return []
        return self._evict(victims, now_ms)

    def evict_some(self, need_bytes: int, looks: int, now_ms: int) -> list[Object]:
        """As `evict`, but whatever is found of it."""
        return self._evict(self._evictor.select_some(need_bytes, looks), now_ms)

    def begin(self, obj: Object, session: Session, now_ms: int, force: bool) -> None:
        """The object has got its range; `session` will write it."""
        write = Write(obj, session, now_ms + self._config.put_timeout_ms, force)
        self.writes[obj.key] = write
        session.writes[obj.key] = write
        self._ledger.charge(obj)

    def complete(self, write: Write, now_ms: int) -> None:
        """Its bytes are written: make it visible, in place of the object that it replaces, and open its windows."""
        obj = write.obj
        self._end_write(write)
        old = self.objects.get(obj.key)
        if old is not None:
            self.remove(old)
            self._counters["replaced_objects"] += 1
        obj.phase = COMPLETE
        obj.last_access_ms = now_ms
        self.objects[obj.key] = obj
        if obj.holders:
            self._windows.open_reserved(obj, now_ms)
        else:
            self._evictor.offer(obj)

    def revoke(self, write: Write) -> None:
        """The writer is known to write no more: its range is free at once."""
        self._drop_write(write)
        self.allocator.free(write.obj.offset)

    def lose(self, write: Write, now_ms: int) -> None:
        """The put is void, but its writer may still be writing: its range goes into quarantine."""
        self._drop_write(write)
        obj = write.obj
        until_ms = now_ms + self._config.quarantine_ms
        self.quarantine[obj.offset] = Quarantined(write.session.client_id, obj.offset, obj.range_bytes, until_ms)
        self._ledger.quarantine(obj.range_bytes)

    def cancel(self, write: Write) -> None:
        """Its key is deleted while it is being written: put_end will free it instead of making it visible."""
        write.cancelled = True
        self._windows.end_all(write.obj)
        self._counters["puts_cancelled"] += 1

    def remove(self, obj: Object) -> None:
        """Take a complete object out. It's invisible at once; its range is free once nobody reads it."""
        del self.objects[obj.key]
        obj.phase = GONE
        self._evictor.forget(obj)
        self._windows.end_all(obj)
        self._leave(obj)

    def on_unleased(self, obj: Object) -> None:
        """The last lease of an object has ended."""
        if obj.phase is GONE:
            self.lingering.remove(obj)
            self._ledger.linger(-obj.range_bytes)
            self.allocator.free(obj.offset)
        else:
            self._evictor.offer(obj)

    def release_writer(self, client_id: bytes) -> None:
        """The client's writer is dead: what it left in quarantine is free."""
        for held in [held for held in self.quarantine.values() if held.client_id == client_id]:
            self._end_quarantine(held)

    def due_ms(self) -> list[int]:
        """When the next put times out and the next quarantine ends."""
        due = [next(iter(self.writes.values())).deadline_ms] if self.writes else []
        if self.quarantine:
            due.append(next(iter(self.quarantine.values())).until_ms)
        return due

    def expire(self, now_ms: int) -> None:
        """Time out puts and end quarantines that are due."""
        late: list[bytes] = []
        while self.writes and (write := next(iter(self.writes.values()))).deadline_ms <= now_ms:
            self.lose(write, now_ms)
            late.append(write.obj.key)
        if late:
            self._counters["puts_timed_out"] += len(late)
            self._stories.record(now_ms, "put timed out", late)
        while self.quarantine and (held := next(iter(self.quarantine.values()))).until_ms <= now_ms:
            self._end_quarantine(held)

    def _evict(self, victims: Iterable[Object], now_ms: int) -> list[Object]:
        taken = list(victims)
        for obj in taken:
            assert evictable(obj), f"evicting {obj!r}, which is guaranteed or leased"
            del self.objects[obj.key]
            obj.phase = GONE
            self._leave(obj)
        self._counters["evicted_objects"] += len(taken)
        self._counters["evicted_bytes"] += sum(obj.range_bytes for obj in taken)
        self._stories.record(now_ms, "evicted", [obj.key for obj in taken])
        return taken

    def _leave(self, obj: Object) -> None:
        """The object is in no table any more; see to its range."""
        self._ledger.discharge(obj)
        if obj.leases:
            self.lingering.add(obj)
            self._ledger.linger(obj.range_bytes)
        else:
            self.allocator.free(obj.offset)

    def _end_write(self, write: Write) -> None:
        del self.writes[write.obj.key]
        del write.session.writes[write.obj.key]

    def _drop_write(self, write: Write) -> None:
        self._end_write(write)
        self._windows.end_all(write.obj)
        write.obj.phase = GONE
        self._ledger.discharge(write.obj)

    def _end_quarantine(self, held: Quarantined) -> None:
        del self.quarantine[held.offset]
        self._ledger.quarantine(-held.range_bytes)
        self.allocator.free(held.offset)
        self._counters["quarantine_released"] += 1
