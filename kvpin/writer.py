"""Objects into the segment: ask for ranges, copy, and make the objects visible, if that is still in time.

A put has the master's put timeout, counted from when it was asked for. A put_end that could come later is not sent: the
range, and the key, may be somebody else's by then.
"""

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from kvpin.calls import PendingCall, expect
from kvpin.connection import Connection
from kvpin.copying import copy_bytes, flat
from kvpin.guarantee import Guarantee
from kvpin.limits import PIPELINED_BATCHES_MAX, PUT_MARGIN_MS, PUT_MARGIN_SHARE
from kvpin.mapping import Mapping
from kvpin.protocol import Ended, EndStatus, Grant, Mark, PutEnd, PutItem, PutRevoke, PutStart, PutStarted, PutStatus

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PutResult(enum.StrEnum):
    """What became of one object to put."""

    STORED = "stored"
    EXISTS = "exists"  # it was there already; nothing was written
    BUSY = "busy"  # somebody else is writing it
    NO_SPACE = "no_space"  # nothing evictable makes room
    GUARANTEED = "guaranteed"  # not replaced: the object is in an open window
    LOST = "lost"  # the copy took too long, or the put was ended from elsewhere: nothing is stored


class PutOutcome(msgspec.Struct, frozen=True):
    """`grant`: what became of the guarantee that was asked for; NONE if none was."""

    result: PutResult
    grant: Grant = Grant.NONE

    @property
    def readable(self) -> bool:
        """Is a complete object there?"""
        return self.result in (PutResult.STORED, PutResult.EXISTS, PutResult.GUARANTEED)

    @property
    def guaranteed(self) -> bool:
        """Is it there, in a window that this put opened or renewed?"""
        return self.readable and self.grant in (Grant.OPENED, Grant.RENEWED)


class PutOptions(msgspec.Struct, frozen=True):
    guarantee: Guarantee = Guarantee()
    soft_pin: bool = False
    replace: bool = False
    cache: str = ""


_RESULTS = {
    PutStatus.WRITE: PutResult.STORED,
    PutStatus.EXISTS: PutResult.EXISTS,
    PutStatus.BUSY: PutResult.BUSY,
    PutStatus.NO_SPACE: PutResult.NO_SPACE,
    PutStatus.GUARANTEED: PutResult.GUARANTEED,
}


class _Batch:
    """The puts of one message, through their three steps."""

    def __init__(self, writer: "Writer", keys: Sequence[bytes], sources: Sequence[memoryview], start: PendingCall):
        self.writer = writer
        self.keys = keys
        self.sources = sources
        self.start = start
        self.end: PendingCall | None = None
        self.written: list[int] = []
        self.outcomes: list[PutOutcome] = []

    def write(self) -> None:
        """Wait for the ranges, fill them, and send put_end."""
        connection = self.writer.connection
        started = expect(self.start.wait(connection.config.call_timeout_ms), PutStarted)
        self.written = [index for index, status in enumerate(started.statuses) if status is PutStatus.WRITE]
        self.outcomes = [
            PutOutcome(_RESULTS[status], grant) for status, grant in zip(started.statuses, started.grants, strict=True)
        ]
        if not self.written:
            return
        if self.writer.fill(self.start, [(self.sources[index], started.offsets[index]) for index in self.written]):
            self.end = self._send(PutEnd)
        else:
            connection.counters.add("puts_late", len(self.written))
            self._lost(self.written)

    def finish(self) -> list[PutOutcome]:
        """Wait for put_end's answer."""
        if self.end is not None:
            ended = expect(self.end.wait(self.writer.connection.config.call_timeout_ms), Ended)
            self._lost(
                [
                    index
                    for index, status in zip(self.written, ended.statuses, strict=True)
                    if status is not EndStatus.OK
                ]
            )
        return self.outcomes

    def give_up(self) -> None:
        """Another batch failed, or this one: leave nothing half done."""
        self.start.abandon()
        if self.end is None and self.written:
            self._send(PutRevoke)

    def _send(self, body: type[PutEnd] | type[PutRevoke]) -> PendingCall:
        keys = [self.keys[index] for index in self.written]
        return self.writer.connection.submit(body(keys), self.start.session, _deadline_s(self.start))

    def _lost(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.outcomes[index] = PutOutcome(PutResult.LOST)


class Writer:
    """`clock` (monotonic seconds) and `copy` (target, source) are arguments, so that a test can be slow."""

    def __init__(
        self,
        connection: Connection,
        mapping: Mapping,
        clock: Callable[[], float] = time.monotonic,
        copy: Callable[[memoryview, memoryview], None] = copy_bytes,
    ) -> None:
        self.connection = connection
        self._mapping = mapping
        self._clock = clock
        self._copy = copy

    def write(self, keys: Sequence[bytes], buffers: Sequence["Buffer"], options: PutOptions) -> list[PutOutcome]:
        """Put whole buffers as objects. Raises ValueError for buffers that aren't contiguous or of another number."""
        sources = [flat(buffer, f"buffer {index}") for index, buffer in enumerate(buffers)]
        if len(sources) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(sources)} buffers: give one buffer for each key")
        messages = options.guarantee.batches(keys)
        outcomes: list[PutOutcome] = []
        while window := list(islice(messages, PIPELINED_BATCHES_MAX)):
            batches = [self._ask(keys[part], sources[part], marks, options) for part, marks in window]
            try:
                for batch in batches:
                    batch.write()
                for batch in batches:
                    outcomes += batch.finish()
            except BaseException:
                for batch in batches:
                    batch.give_up()
                raise
        return outcomes

    def fill(self, start: PendingCall, ranges: Sequence[tuple[memoryview, int]]) -> bool:
        """Copy each source to its offset. False if that took too long to be ended safely."""
        session = start.session
        assert session is not None  # it was answered
        deadline_s = _deadline_s(start)
        sizes = [source.nbytes for source, _ in ranges]
        targets = self._mapping.views(session.welcome.segment, [offset for _, offset in ranges], sizes)
        for target, (source, _) in zip(targets, ranges, strict=True):
            self._copy(target, source)
            if self._clock() >= deadline_s:
                return False
        return True

    def _ask(
        self, keys: Sequence[bytes], sources: Sequence[memoryview], marks: list[Mark], options: PutOptions
    ) -> _Batch:
        items = [PutItem(key, source.nbytes, 0, options.soft_pin) for key, source in zip(keys, sources, strict=True)]
        body = PutStart(items, marks, options.cache, replace=options.replace)
        return _Batch(self, keys, sources, self.connection.submit(body))


def _deadline_s(start: PendingCall) -> float:
    """Until when a put_end or put_revoke may be sent: later the key may be in another put, of another thread here."""
    assert start.session is not None  # it was answered
    timeout_ms = start.session.welcome.put_timeout_ms
    return start.sent_s + (timeout_ms - min(PUT_MARGIN_MS, timeout_ms * PUT_MARGIN_SHARE)) / 1000
