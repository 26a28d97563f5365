"""The calls that wait for answers, in the I/O thread: match, settle, fail, forget, and undo what nobody wants.

An abandoned call stays in the table: its answer may still grant a lease, or ranges, and these have to be given back.
"""

import time

import msgspec

from kvpin.calls import PendingCall
from kvpin.connection import Connection
from kvpin.errors import EpochChanged, KvpinError, Unavailable
from kvpin.limits import ANSWER_MS_MAX
from kvpin.protocol import ErrorCode, Failure, PutRevoke, PutStart, PutStarted, PutStatus, Replicas, ReplyBody, Response
from kvpin.session import Session


class CallTable:
    """`len(table)` and all methods are for the I/O thread only."""

    def __init__(self, connection: Connection) -> None:
        self._shared = connection
        self._calls: dict[int, PendingCall] = {}  # by request id, so oldest first
        self._answered: list[tuple[PendingCall, ReplyBody]] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._calls

    def add(self, request_id: int, call: PendingCall) -> None:
        self._calls[request_id] = call
        self._shared.in_flight = len(self._calls)

    def answered(self, response: Response, session: Session) -> PutRevoke | None:
        """Take an answer. It reaches its caller with `settle`. Returns what must be sent to undo an unwanted one."""
        call = self._calls.pop(response.request_id, None)
        self._shared.in_flight = len(self._calls)
        if call is None:
            return None  # to a message of the connection's own
        reply = response.body
        if session.life and isinstance(reply, Replicas) and reply.lease_id:
            reply = msgspec.structs.replace(reply, lease_id=session.lease_to_caller(reply.lease_id))
        if call.abandoned:
            return self.undo(call, reply, session)
        if isinstance(reply, Failure):
            self._shared.counters.add("failures")
        self._answered.append((call, reply))
        return None

    def settle(self) -> None:
        """Wake the callers. It's the last thing in a turn: they need the GIL, which this thread then gives up."""
        for call, reply in self._answered:
            call.settle(reply)
        self._answered.clear()

    def undo(self, call: PendingCall, reply: ReplyBody | None, session: Session | None) -> PutRevoke | None:
        """Give back what an abandoned call was granted, once, and in its own session. Returns what must be sent."""
        if reply is None or call.taken or session is None or call.session is not session:
            return None
        call.taken = True
        if isinstance(reply, Replicas):
            self._shared.release(reply.lease_id)
        # Later the master has given the put up by itself, and a revoke could hit a new put of the key.
        in_time = time.monotonic() - call.sent_s < session.welcome.put_timeout_ms / 1000
        if isinstance(reply, PutStarted) and isinstance(call.body, PutStart) and in_time:
            pairs = zip(call.body.items, reply.statuses, strict=False)
            keys = [item.key for item, status in pairs if status is PutStatus.WRITE]
            self._shared.counters.add("late_puts_revoked", len(keys))
            return PutRevoke(keys) if keys else None
        return None

    def fail(self, call: PendingCall, error: KvpinError) -> None:
        if not call.abandoned:
            self._shared.counters.add("failures")
            call.settle(error)

    def fail_all(self, error: KvpinError) -> None:
        """Nothing that is under way will be answered any more."""
        calls, self._calls = self._calls, {}
        self._shared.in_flight = 0
        for call in calls.values():
            self.fail(call, error)

    def forget_old(self, now_s: float) -> None:
        """Fail what the master has never answered, so that the table can't fill up with it."""
        while self._calls:
            request_id, call = next(iter(self._calls.items()))
            if now_s - call.sent_s < ANSWER_MS_MAX / 1000:
                return
            del self._calls[request_id]
            self._shared.in_flight = len(self._calls)
            self.fail(call, Unavailable(f"no answer within {ANSWER_MS_MAX} ms"))


def epoch_changed(response: Response) -> EpochChanged | None:
    """Does the answer say that the session is over?"""
    body = response.body
    if isinstance(body, Failure) and body.code is ErrorCode.EPOCH_CHANGED:
        return EpochChanged(body.message)
    return None
