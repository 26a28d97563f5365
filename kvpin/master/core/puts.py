"""put_start, put_end, put_revoke: the write path. What exists and is marked gets protected here too."""

from kvpin.limits import WRITES_MAX_PER_CLIENT
from kvpin.master.core.admission import MarkedBatch
from kvpin.master.core.allocator import NO_RANGE, page_round
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Object, Session, Write
from kvpin.master.core.windows import is_open
from kvpin.protocol import (
    Ended,
    EndStatus,
    ErrorCode,
    Failure,
    Grant,
    PutEnd,
    PutItem,
    PutRevoke,
    PutStart,
    PutStarted,
    PutStatus,
)


def put_start(tables: Tables, now_ms: int, session: Session, body: PutStart) -> PutStarted | Failure:
    """Give ranges to write, root first, so that a full pool or limit cuts the chain at its deep end."""
    items = body.items
    if len(session.writes) + len(items) > WRITES_MAX_PER_CLIENT:
        return Failure(ErrorCode.OVERLOADED, f"over {WRITES_MAX_PER_CLIENT} puts under way: end or revoke some")
    batch = None
    if body.marks:
        batch = MarkedBatch(tables, session, body.marks, body.report, now_ms, create=True)
    starts = _Starts(tables, now_ms, session, body)
    count = len(items)
    statuses, offsets, grants = [PutStatus.NO_SPACE] * count, [NO_RANGE] * count, [Grant.NONE] * count
    ends = [item.end_token for item in items]
    for index in sorted(range(count), key=ends.__getitem__):
        item = items[index]
        status, obj = starts.start(item)
        statuses[index] = status
        if status is PutStatus.WRITE and obj is not None:
            offsets[index] = obj.offset
        if batch is not None and (obj is not None or item.key not in tables.memory.objects):
            # What exists and couldn't be replaced is neither protected nor a gap.
            grants[index] = batch.protect(item.key, item.end_token, obj)
    if batch is not None:
        batch.finish()
    starts.finish(statuses)
    return PutStarted(statuses, offsets, grants)


class _Starts:
    """The single put_starts of one batch."""

    __slots__ = ("_body", "_memory", "_now_ms", "_refused_bytes", "_session", "_tables")

    def __init__(self, tables: Tables, now_ms: int, session: Session, body: PutStart) -> None:
        self._tables = tables
        self._memory = tables.memory
        self._now_ms = now_ms
        self._session = session
        self._body = body
        self._refused_bytes = 1 << 62  # the smallest size that found no room in this batch: not tried again

    def start(self, item: PutItem) -> tuple[PutStatus, Object | None]:
        """The outcome, and the object that a mark would protect: complete, being written, or none."""
        old = self._memory.objects.get(item.key)
        write = self._memory.writes.get(item.key)
        if write is not None and (old is None or self._body.replace):
            return PutStatus.BUSY, None if write.cancelled else write.obj
        if old is not None:
            old.last_access_ms = self._now_ms  # it's in use; and the last that this batch itself evicts
            if not self._body.replace:
                return PutStatus.EXISTS, old
            if is_open(old) and not self._body.force:
                return PutStatus.GUARANTEED, None
        obj = self._place(item)
        return (PutStatus.NO_SPACE if obj is None else PutStatus.WRITE), obj

    def finish(self, statuses: list[PutStatus]) -> None:
        counters = self._tables.counters
        written = [item.key for item, status in zip(self._body.items, statuses, strict=True) if status == 0]
        counters["puts_started"] += len(written)
        counters["puts_existing"] += statuses.count(PutStatus.EXISTS)
        counters["puts_busy"] += statuses.count(PutStatus.BUSY)
        counters["puts_no_space"] += statuses.count(PutStatus.NO_SPACE)
        self._tables.stories.record(self._now_ms, f"put_start by {self._session.name}", written)

    def _place(self, item: PutItem) -> Object | None:
        size_bytes = item.size_bytes
        if size_bytes >= self._refused_bytes:
            return None
        offset = self._memory.make_room(size_bytes, self._now_ms)
        if offset == NO_RANGE:
            self._refused_bytes = size_bytes
            return None
        obj = Object(
            item.key, offset, size_bytes, page_round(size_bytes), item.end_token, item.soft_pin,
            self._body.cache, self._session.tenant, self._now_ms,
        )  # fmt: skip
        self._memory.begin(obj, self._session, self._now_ms, self._body.force)
        return obj


def put_end(tables: Tables, now_ms: int, session: Session, body: PutEnd) -> Ended:
    """Make objects visible. A put that timed out, or whose key was deleted meanwhile, is NOT_FOUND."""
    statuses: list[EndStatus] = []
    done: list[bytes] = []
    for key in body.keys:
        write = tables.memory.writes.get(key)
        status = _owned(write, session)
        if write is not None and status is EndStatus.OK:
            old = tables.memory.objects.get(key)
            if write.cancelled:
                status = EndStatus.NOT_FOUND
            elif old is not None and is_open(old) and not write.force:
                status = EndStatus.GUARANTEED  # somebody protected the old object since put_start
            if status is EndStatus.OK:
                tables.memory.complete(write, now_ms)
                done.append(key)
            else:
                tables.memory.revoke(write)  # its writer has just said that it's done writing
        statuses.append(status)
    tables.counters["puts_completed"] += len(done)
    tables.stories.record(now_ms, f"put_end by {session.name}", done)
    return Ended(statuses)


def put_revoke(tables: Tables, now_ms: int, session: Session, body: PutRevoke) -> Ended:
    """Free ranges of puts: the owner says that nobody writes into them."""
    statuses: list[EndStatus] = []
    done: list[bytes] = []
    for key in body.keys:
        write = tables.memory.writes.get(key)
        status = _owned(write, session)
        if write is not None and status is EndStatus.OK:
            tables.memory.revoke(write)
            done.append(key)
        statuses.append(status)
    tables.counters["puts_revoked"] += len(done)
    tables.stories.record(now_ms, f"put_revoke by {session.name}", done)
    return Ended(statuses)


def _owned(write: Write | None, session: Session) -> EndStatus:
    if write is None:
        return EndStatus.NOT_FOUND
    return EndStatus.OK if write.session is session else EndStatus.NOT_OWNER
