"""One request under way: who waits for its answer, and what becomes of an answer that nobody waits for."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvpin.errors import CallTimeout, EpochChanged, KvpinError, ProtocolError, Unavailable
from kvpin.protocol import ErrorCode, Failure, ReplyBody, RequestBody
from kvpin.session import Session

Reply = TypeVar("Reply")

logger = logging.getLogger(__name__)


class Line(Protocol):
    """What a call needs of its connection."""

    def give_up(self, call: "PendingCall") -> None:
        """The caller has abandoned the call: if an answer comes, or is there, undo what it granted."""

    def timed_out(self, why: str) -> None:
        """A call wasn't answered in time: open the breaker."""


class PendingCall:
    """A request under way. Any thread may use it; made by `Client.submit`.

    `sent_s` (time.monotonic) is when it was handed over, which is before it was sent: a lease or a put timeout counted
    from it ends before the master's own.
    """

    __slots__ = ("_callbacks", "_error", "_latch", "_line", "_reply", "abandoned", "body", "sent_s", "session", "taken")

    def __init__(self, body: RequestBody, line: Line, sent_s: float, session: Session | None) -> None:
        self.body = body
        self.sent_s = sent_s
        self.session = session  # what is granted counts in this one only
        self.abandoned = False
        self.taken = False  # the caller has the answer, so undoing what it granted is the caller's business
        self._line = line
        self._reply: ReplyBody | None = None
        self._error: KvpinError | None = None
        self._callbacks: list[Callable[[PendingCall], None]] = []
        self._latch = threading.Lock()  # held until the call is settled; far cheaper than an Event
        self._latch.acquire()

    @property
    def reply(self) -> ReplyBody | None:
        """The answer if it's there, without taking it."""
        return self._reply

    @property
    def settled(self) -> bool:
        return self._reply is not None or self._error is not None

    def poll(self) -> ReplyBody | None:
        """The answer, or None if it isn't there yet. Raises KvpinError if the call failed, never waits."""
        if self._error is not None:
            raise self._error
        if self._reply is None and self.abandoned:
            raise CallTimeout("the call was abandoned")
        self.taken = self._reply is not None
        return self._reply

    def wait(self, timeout_ms: float) -> ReplyBody:
        """The answer. Raises CallTimeout after `timeout_ms`, having abandoned the call and opened the breaker.

        Raises KvpinError if the call failed.
        """
        if not self.settled and not self.abandoned and self._latch.acquire(timeout=max(0.0, timeout_ms) / 1000):
            self._latch.release()  # for others who wait
        reply = self.poll()
        if reply is None:
            self.abandon()
            what = f"no answer to {type(self.body).__name__} within {timeout_ms:g} ms"
            self._line.timed_out(what)
            raise CallTimeout(what)
        return reply

    def abandon(self) -> None:
        """Nobody will look at the answer. Ranges it grants are given back when it comes, and so are leases.

        Nothing happens if the answer has been taken already. Callbacks of an abandoned call are not called.
        """
        if not self.taken and not self.abandoned and self._error is None:
            self.abandoned = True
            self._line.give_up(self)

    def add_done_callback(self, callback: Callable[["PendingCall"], None]) -> None:
        """Call `callback(call)` when the call is settled: in the I/O thread, or here and now if it is already.

        It must be short and must not wait for other calls: nothing is received meanwhile.
        """
        self._callbacks.append(callback)
        if self.settled:
            self._call_back()

    def settle(self, outcome: ReplyBody | KvpinError) -> None:
        """Set the outcome, once; by the connection only."""
        if isinstance(outcome, KvpinError):
            self._error = outcome
        elif isinstance(outcome, Failure):
            self._error = error_of(outcome)
        else:
            self._reply = outcome
        self._latch.release()
        if self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        # Two threads may be here at once; each callback goes to the one that takes it off the list.
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                logger.exception("event=callback_failed request=%s", type(self.body).__name__)


def error_of(failure: Failure) -> KvpinError:
    """The exception that stands for a failure on the wire."""
    match failure.code:
        case ErrorCode.EPOCH_CHANGED:
            return EpochChanged(failure.message)
        case ErrorCode.OVERLOADED | ErrorCode.INTERNAL:
            return Unavailable(failure.message)
        case ErrorCode.BAD_REQUEST | ErrorCode.VERSION:
            return ProtocolError(failure.message)


def expect(reply: ReplyBody, kind: type[Reply]) -> Reply:
    """The reply, if it is of that kind. Raises ProtocolError."""
    if not isinstance(reply, kind):
        raise ProtocolError(f"the master answered {type(reply).__name__} where {kind.__name__} was due")
    return reply
