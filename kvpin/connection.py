"""The application's side of a client's connection: hand requests over, and know what state the connection is in.

The socket belongs to one I/O thread (io_thread.py). Requests reach it by a bounded queue and a wake-up; answers settle
the calls. Nothing here waits for the master, but `wait_ready` and `wait_verdict`, which have a deadline.

The breaker: a call without an answer at its deadline opens it. While it's open every new call fails at once, and only
the I/O thread asks (Ping, every `retry_ms`). The first answer, to whatever, closes it.
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from typing import TypeAlias

import msgspec

from kvpin.calls import PendingCall
from kvpin.config import ClientConfig
from kvpin.counters import Counters
from kvpin.dealer import Waker
from kvpin.errors import EpochChanged, KvpinError, ProtocolError, Unavailable
from kvpin.limits import CALLS_PENDING_MAX, FAULT_LOG_PERIOD_S, FRAME_BYTES_MAX, LEASES_MAX_PER_CLIENT
from kvpin.log import Throttle
from kvpin.protocol import Hello, Request, RequestBody, encode
from kvpin.session import Session

logger = logging.getLogger(__name__)


class Outgoing(msgspec.Struct, frozen=True):
    """An encoded request on its way to the I/O thread. It counts only in the session that it was made for.

    `send_by_s` (time.monotonic): later it must not be sent.
    """

    request_id: int
    session: Session
    frame: bytes
    call: PendingCall
    send_by_s: float


Work: TypeAlias = Outgoing | PendingCall
"""What the I/O thread is handed: something to send, or a call that its caller has abandoned."""


class Connection:
    """Shared by the application's threads and the I/O thread; the latter sets `session` and `refusal`."""

    def __init__(self, address: str, hello: Hello, config: ClientConfig, counters: Counters) -> None:
        self.address = address
        self.hello = hello
        self.config = config
        self.counters = counters
        self.waker = Waker()
        self.work: deque[Work] = deque()
        self.in_flight = 0  # sent and not answered; set by the I/O thread
        self.session: Session | None = None
        self.tripped = False
        self.refusal: KvpinError | None = None  # set: there's no use in trying again
        self.closing = False
        self.asleep = False  # the I/O thread waits, or is about to: it needs a wake-up
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self._released: deque[int] = deque(maxlen=LEASES_MAX_PER_CLIENT)  # what falls out runs out by itself
        self._first_verdict_s = time.monotonic() + config.connect_timeout_ms / 1000
        self._throttle = Throttle(FAULT_LOG_PERIOD_S)

    # --- for the application ----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.session is not None and not self.tripped

    def submit(self, body: RequestBody, only_in: Session | None = None, send_by_s: float = float("inf")) -> PendingCall:
        """Hand a request over. If it can't be sent the call has failed already.

        It makes no sense after the session `only_in`, or after `send_by_s`. The I/O thread looks at both when it sends:
        what other threads hand over meanwhile can't overtake it then.
        """
        session = self.session
        call = PendingCall(body, self, time.monotonic(), session)
        self.counters.add("calls")
        if session is None or self.tripped or self.refusal is not None:
            return self._failed(call, self._why_not_ready())
        if only_in is not None and only_in is not session:
            return self._failed(call, EpochChanged("the master was started anew since the ranges were granted"))
        if len(self.work) + self.in_flight >= CALLS_PENDING_MAX:
            return self._failed(call, Unavailable(f"{CALLS_PENDING_MAX} calls are under way: wait for some"))
        request_id, frame = self.frame(session, body)
        if len(frame) > FRAME_BYTES_MAX:
            return self._failed(call, ProtocolError(f"a message of {len(frame)} bytes: send smaller batches"))
        self._hand_over(Outgoing(request_id, session, frame, call, send_by_s))
        return call

    def release(self, lease_id: int) -> None:
        """End a lease: the next request or heartbeat says so."""
        if lease_id:
            self._released.append(lease_id)

    def wait_ready(self, timeout_ms: float) -> bool:
        """Until requests can be sent; False at the deadline, or at once when there's no use in waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self.refusal is not None, timeout_ms / 1000)
        return self.ready

    def wait_verdict(self) -> None:
        """A client that has just been made gets its connect timeout to reach the master; afterwards no call waits."""
        if self.session is None and self.refusal is None:
            left_s = self._first_verdict_s - time.monotonic()
            if left_s > 0:
                self.wait_ready(left_s * 1000)
                self._first_verdict_s = 0.0

    def close(self) -> None:
        """Ask the I/O thread to take leave of the master and end. In a forked child: nothing, it isn't the child's."""
        if self._pid == os.getpid():
            self.closing = True
            self.waker.wake()

    # --- for calls (calls.Line) -------------------------------------------------------------------------------------

    def give_up(self, call: PendingCall) -> None:
        if self.refusal is None:
            self._hand_over(call)

    def timed_out(self, why: str) -> None:
        self.counters.add("timeouts")
        self.trip(why)

    # --- for the I/O thread -----------------------------------------------------------------------------------------

    def trip(self, why: str) -> None:
        """Open the breaker."""
        with self._changed:
            if self.tripped or self.session is None:
                return
            self.tripped = True
            self.counters.add("breaker_opens")
        self.warn("breaker_opened", why)
        self.waker.wake()

    def frame(self, session: Session | None, body: RequestBody) -> tuple[int, bytes]:
        """A request's id and its message. Released leases ride along."""
        request_id = next(self._ids)
        if session is None:
            return request_id, encode(Request(request_id, 0, body))
        released = self._take_released(session) if self._released else []
        return request_id, encode(Request(request_id, session.welcome.epoch, body, released))

    def set_session(self, session: Session | None) -> None:
        with self._changed:
            self.session = session
            self.tripped = False
            self._changed.notify_all()

    def close_breaker(self) -> None:
        with self._changed:
            self.tripped = False
            self._changed.notify_all()
        if self._throttle.admit("breaker_closed") is not None:
            logger.info("event=breaker_closed address=%s", self.address)

    def refuse(self, error: KvpinError) -> None:
        """From now on every call fails with this error."""
        with self._changed:
            self.session = None
            self.refusal = error
            self._changed.notify_all()

    def drop_work(self, error: KvpinError) -> None:
        """Fail what has been handed over and not been taken. Each item goes to one thread only."""
        while self.work:
            try:
                work = self.work.popleft()
            except IndexError:
                return
            if isinstance(work, Outgoing):
                self._failed(work.call, error)

    def warn(self, event: str, why: object) -> None:
        """A fault that comes and goes must not fill the engine's log."""
        held = self._throttle.admit(event)
        if held is not None:
            logger.warning("event=%s address=%s reason=%r more_before=%d", event, self.address, str(why), held)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _hand_over(self, work: Work) -> None:
        self.work.append(work)
        if self.refusal is not None:
            self.drop_work(self.refusal)  # the I/O thread may have ended just before
        elif self.asleep:
            self.waker.wake()

    def _take_released(self, session: Session) -> list[int]:
        released: list[int] = []
        while self._released:
            try:
                lease_id = session.lease_to_wire(self._released.popleft())
            except IndexError:  # another thread took the last one
                break
            if lease_id is not None:
                released.append(lease_id)
        return released

    def _failed(self, call: PendingCall, error: KvpinError) -> PendingCall:
        self.counters.add("failures")
        call.settle(error)
        return call

    def _why_not_ready(self) -> KvpinError:
        if self.refusal is not None:
            return self.refusal
        if self.session is None:
            return Unavailable(f"no connection to a master at {self.address}; it is tried in the background")
        return Unavailable(f"the master at {self.address} doesn't answer; it is asked in the background")
