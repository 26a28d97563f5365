"""Guaranteed windows: which prefix holds which object until when.

A window is held *by a prefix on an object*; the object may not be evicted while it has any holder. Ended holds are
taken away at their deadline, not when somebody looks, so "has holders" is the whole test and the capacity they took
is free again at once. Deadlines are kept per prefix, since a prefix's blocks are mostly renewed together: one entry,
at or before the earliest of its windows' ends.

A prefix is of use only as far as it has no hole. A block that it should hold and doesn't is a *gap*, and nothing
deeper is admitted until the gap is filled.
"""

from collections.abc import Mapping
from itertools import islice

from kvpin.limits import GAPS_MAX, HOLDERS_MAX_PER_OBJECT, PREFIXES_MAX
from kvpin.master.core.eviction import Evictor
from kvpin.master.core.heap import ORDER, LazyHeap
from kvpin.master.core.ledger import Ledger
from kvpin.master.core.stories import Stories
from kvpin.master.core.types import COMPLETE, NO_GAP, UNKNOWN_TOKEN, WRITING, Object, Prefix
from kvpin.protocol import Mark

_HOLDER_TRIES = 8  # holders looked at for one that may go


class Windows:
    __slots__ = ("_counters", "_emptied", "_evictor", "_ledger", "_objects", "_stories", "deadlines", "prefixes")

    def __init__(
        self, objects: Mapping[bytes, Object], ledger: Ledger, evictor: Evictor, stories: Stories,
        counters: dict[str, int],
    ) -> None:  # fmt: skip
        self._objects = objects  # the complete ones
        self._ledger = ledger
        self._evictor = evictor
        self._stories = stories
        self._counters = counters
        self.prefixes: dict[tuple[str, bytes], Prefix] = {}  # by tenant and id
        self.deadlines: LazyHeap[Prefix] = LazyHeap()
        self._emptied: list[Prefix] = []  # may hold nothing any more: `sweep` looks

    def find(self, tenant: str, prefix_id: bytes) -> Prefix | None:
        return self.prefixes.get((tenant, prefix_id))

    def find_or_make(self, tenant: str, mark: Mark, now_ms: int) -> Prefix | None:
        """The record of a marked prefix, updated from the mark. None: there are PREFIXES_MAX others."""
        prefix = self.prefixes.get((tenant, mark.prefix_id))
        if prefix is None:
            if len(self.prefixes) >= PREFIXES_MAX:
                return None
            prefix = Prefix(mark.prefix_id, tenant, now_ms)
            self.prefixes[tenant, mark.prefix_id] = prefix
            self._counters["prefixes_created"] += 1
            self._emptied.append(prefix)
        prefix.note_mark(mark)
        return prefix

    def hold(self, prefix: Prefix, obj: Object, until_ms: int) -> bool:
        """Hold a complete object, or longer than before. False: it has too many holders already.

        Whether the limit admits it is the caller's question (see admission.py), not this table's.
        """
        held_ms = prefix.holds.get(obj)
        if held_ms is None:
            if not self._attach(prefix, obj, until_ms):
                return False
            self._enter(prefix, obj, until_ms)
        elif until_ms > held_ms:
            prefix.holds[obj] = until_ms
        return True

    def reserve(self, prefix: Prefix, obj: Object, ttl_ms: int) -> bool:
        """Hold an object being written from its put_end on. False: it has too many holders already."""
        if obj not in prefix.reserved and not self._attach(prefix, obj, ttl_ms):
            return False
        self._fill_gap(prefix, obj.key)
        prefix.reserved[obj] = max(ttl_ms, prefix.reserved.get(obj, 0))
        return True

    def open_reserved(self, obj: Object, now_ms: int) -> None:
        """A guaranteed object has become complete: the windows reserved for it open now."""
        self._ledger.settle(obj)
        for prefix in obj.holders or ():
            self._enter(prefix, obj, now_ms + prefix.reserved.pop(obj))

    def end(self, prefix: Prefix, obj: Object) -> None:
        """End one hold or reservation. The object is ordinary again if it was the last."""
        if prefix.holds.pop(obj, None) is None:
            del prefix.reserved[obj]
        else:
            prefix.held_bytes -= obj.range_bytes
        if not prefix.holds and not prefix.reserved:
            self._emptied.append(prefix)
        assert obj.holders is not None
        del obj.holders[prefix]
        if not obj.holders:
            self._ledger.lapse(obj)
            self._evictor.offer(obj)

    def end_all(self, obj: Object) -> None:
        """End every hold on an object, because it leaves or somebody ends them all: a gap in each of its prefixes."""
        for prefix in list(obj.holders or ()):
            self.end(prefix, obj)
            self.note_gap(prefix, obj.key, obj.end_token)

    def note_gap(self, prefix: Prefix, key: bytes, end_token: int) -> None:
        """The prefix should hold this block and doesn't (unless it holds the object that this one was to replace)."""
        if self._objects.get(key) in prefix.holds:
            return
        gaps = prefix.gaps
        if len(gaps) >= GAPS_MAX and key not in gaps:
            deepest = max(gaps, key=gaps.__getitem__)
            if gaps[deepest] <= end_token:
                return
            del gaps[deepest]
        gaps[key] = end_token
        prefix.gap_token = min(gaps.values())
        prefix.held_token = UNKNOWN_TOKEN

    def due_ms(self) -> int | None:
        """When the next window may end."""
        head = self.deadlines.head()
        return None if head is None else head[ORDER]

    def expire(self, now_ms: int) -> None:
        """End all windows whose time has come."""
        while (due_ms := self.due_ms()) is not None and due_ms <= now_ms:
            prefix = self.deadlines.pop()
            assert prefix is not None
            prefix.entry = None
            ended = [obj for obj, until_ms in prefix.holds.items() if until_ms <= now_ms]
            for obj in ended:
                self.end(prefix, obj)
            self._counters["windows_expired"] += len(ended)
            self._stories.record(now_ms, f"window of {prefix.prefix_id.hex()} ended", [obj.key for obj in ended])
            if prefix.holds:
                prefix.entry = self.deadlines.push(min(prefix.holds.values()), prefix)
            if prefix.holds or prefix.reserved:
                for obj in ended:
                    self.note_gap(prefix, obj.key, obj.end_token)

    def sweep(self) -> None:
        """Drop the records of prefixes that hold nothing. Not before a request is done: it may yet fill one."""
        while self._emptied:
            prefix = self._emptied.pop()
            name = (prefix.tenant, prefix.prefix_id)
            if not prefix.holds and not prefix.reserved and self.prefixes.get(name) is prefix:
                del self.prefixes[name]
                self._counters["prefixes_ended"] += 1
                if prefix.entry is not None:
                    self.deadlines.cancel(prefix.entry)
                    prefix.entry = None

    def covered_token(self, prefix: Prefix) -> int:
        """How far the leading run of its open windows reaches, in tokens."""
        if prefix.held_token == UNKNOWN_TOKEN and prefix.gap_token == NO_GAP:
            prefix.held_token = max((obj.end_token for obj in prefix.holds), default=0)
        if prefix.held_token != UNKNOWN_TOKEN:
            return prefix.held_token if prefix.holds else 0
        return max((obj.end_token for obj in prefix.holds if obj.end_token < prefix.gap_token), default=0)

    def _attach(self, prefix: Prefix, obj: Object, until_ms: int) -> bool:
        """Make the prefix a holder of the object, for a window until `until_ms` (being written: of such a ttl)."""
        if obj.holders is None:
            obj.holders = {}
        if not obj.holders:
            self._ledger.guarantee(obj)
        elif len(obj.holders) >= HOLDERS_MAX_PER_OBJECT and not self._make_way(obj, until_ms):
            return False
        obj.holders[prefix] = None
        return True

    def _enter(self, prefix: Prefix, obj: Object, until_ms: int) -> None:
        """Book an open window with its prefix, which is among the object's holders."""
        prefix.holds[obj] = until_ms
        prefix.held_bytes += obj.range_bytes
        if obj.end_token > prefix.held_token >= 0:
            prefix.held_token = obj.end_token
        self._fill_gap(prefix, obj.key)
        if prefix.entry is not None:
            if prefix.entry[ORDER] <= until_ms:
                return
            self.deadlines.cancel(prefix.entry)
        prefix.entry = self.deadlines.push(until_ms, prefix)

    def _fill_gap(self, prefix: Prefix, key: bytes) -> None:
        if prefix.gaps and prefix.gaps.pop(key, None) is not None:
            prefix.gap_token = min(prefix.gaps.values(), default=NO_GAP)

    def _make_way(self, obj: Object, until_ms: int) -> bool:
        """End one of the oldest holds that the new one outlasts, so that the object itself loses nothing."""
        for prefix in islice(obj.holders or (), _HOLDER_TRIES):
            held = prefix.reserved if obj.phase is WRITING else prefix.holds
            if held[obj] <= until_ms:
                self.end(prefix, obj)
                self.note_gap(prefix, obj.key, obj.end_token)
                return True
        return False


def is_open(obj: Object) -> bool:
    """Is the object in an open window?"""
    return obj.phase is COMPLETE and bool(obj.holders)
