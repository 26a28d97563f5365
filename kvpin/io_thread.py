"""The client's I/O thread: it owns the socket and the conversation with the master.

A turn: wait for something to happen, take what has arrived, send what was handed over, see to what is due. The
conversation: connected -> Hello (every `retry_ms` until answered) -> Welcome: the session -> requests; Ping after
`heartbeat_ms` of silence, and every `retry_ms` while the breaker is open. Whatever ends the session fails the calls
under way and starts over.
"""

import logging
import os
import threading
import time

import msgspec

from kvpin.call_table import CallTable, epoch_changed
from kvpin.calls import PendingCall
from kvpin.connection import Connection
from kvpin.dealer import Dealer, Link
from kvpin.embedded import EmbeddedMaster
from kvpin.errors import EpochChanged, KvpinError, ProtocolError, Unavailable
from kvpin.limits import CLOSE_WAIT_MS
from kvpin.protocol import (
    PROTOCOL_VERSION,
    Bye,
    ErrorCode,
    Failure,
    Hello,
    Ping,
    RequestBody,
    Welcome,
    decode_response,
)
from kvpin.session import Session

logger = logging.getLogger(__name__)


def start(connection: Connection, embedded: EmbeddedMaster | None) -> threading.Thread:
    """Run the I/O of a connection in a daemon thread until the connection is closed."""
    thread = threading.Thread(target=IoThread(connection, embedded).run, name="kvpin-io", daemon=True)
    thread.start()
    return thread


class IoThread:
    def __init__(self, connection: Connection, embedded: EmbeddedMaster | None) -> None:
        self._shared = connection
        self._embedded = embedded
        self._calls = CallTable(connection)
        self._identity = b"c" + os.urandom(15)  # ROUTER keeps identities that begin with NUL for itself
        self._retry_s = connection.config.retry_ms / 1000
        self._answer_s = connection.config.call_timeout_ms / 1000
        self._linked = False
        self._lives = -1  # epochs seen, less one
        self._epoch = 0  # the last one seen
        self._ask_at_s = 0.0  # when Hello or a probe is due, without a session or with the breaker open
        self._asked_s = 0.0  # since when something is unanswered; 0 = nothing is
        self._sent_s = 0.0  # when something was sent last
        self._hello_id = 0  # of the first Hello since there's no session: answers to older requests don't matter

    def run(self) -> None:
        shared = self._shared
        error: KvpinError = Unavailable("the client is closed")
        try:
            self._dealer = Dealer(shared.address, self._identity, shared.config.retry_ms, shared.waker)
        except KvpinError as fault:
            logger.error("event=connect_failed error=%s", fault)
            self._end(fault)
            return
        try:
            while not shared.closing and shared.refusal is None:
                self._turn()
            if shared.refusal is None:
                self._take_leave()
        except Exception as fault:  # a fault of ours: it may cost the cache, never the engine
            logger.exception("event=io_thread_failed address=%s", shared.address)
            error = Unavailable(f"kvpin's I/O thread failed: {fault!r}")
        finally:
            self._end(shared.refusal or error)
            self._dealer.close()

    def _end(self, error: KvpinError) -> None:
        self._calls.settle()
        self._lose_session(error)
        self._shared.refuse(error)
        self._shared.drop_work(error)

    # --- a turn -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        shared = self._shared
        wait_ms = max(0, int((self._due_s() - time.monotonic()) * 1000) + 1)
        shared.asleep = True
        # Looked at after `asleep` is set: whoever hands something over after this look wakes us.
        received, changed = self._dealer.wait(0 if shared.work or shared.closing else wait_ms)
        shared.asleep = False
        if received or changed:  # answers first: what came before the link went down still counts
            for frame in self._dealer.receive():
                self._received(frame)
        if changed:
            self._link_changed()
        if shared.work:
            self._send_work()
        self._see_to_what_is_due(time.monotonic())
        self._calls.settle()

    def _due_s(self) -> float:
        session = self._shared.session
        if session is None:
            return self._ask_at_s
        due_s = self._sent_s + session.welcome.heartbeat_ms / 1000
        if self._shared.tripped:
            due_s = min(due_s, self._ask_at_s)
        elif self._asked_s:
            due_s = min(due_s, self._asked_s + self._answer_s)
        return due_s

    def _see_to_what_is_due(self, now_s: float) -> None:
        shared = self._shared
        session = shared.session
        if session is None:
            if now_s >= self._ask_at_s and shared.refusal is None:
                self._ask_at_s = now_s + self._retry_s
                if self._linked:
                    self._send(shared.hello, now_s)
                elif self._embedded is not None:
                    self._embedded.tend(now_s)
            return
        if shared.tripped and now_s >= self._ask_at_s:
            self._ask_at_s = now_s + self._retry_s
            self._send(Ping(), now_s)
        elif now_s - self._sent_s >= session.welcome.heartbeat_ms / 1000:
            self._send(Ping(), now_s)
        if self._asked_s and now_s - self._asked_s >= self._answer_s and not shared.tripped:
            shared.trip(f"nothing was answered for {shared.config.call_timeout_ms} ms")
        self._calls.forget_old(now_s)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send_work(self) -> None:
        shared = self._shared
        work = shared.work
        while work:
            item = work.popleft()
            if isinstance(item, PendingCall):
                revoke = self._calls.undo(item, item.reply, shared.session)
                if revoke is not None:
                    self._send(revoke, time.monotonic())
            elif item.session is not shared.session:
                self._calls.fail(item.call, self._session_over())
            elif not item.call.abandoned:
                now_s = time.monotonic()
                if now_s >= item.send_by_s:
                    self._calls.fail(item.call, Unavailable("it could not be sent in time"))
                elif self._dealer.send(item.frame):
                    self._calls.add(item.request_id, item.call)
                    self._sent(now_s)
                else:
                    self._calls.fail(item.call, Unavailable("the send queue to the master is full"))
                    shared.trip("the send queue to the master is full")

    def _send(self, body: RequestBody, now_s: float) -> None:
        """A message of our own. It isn't among the calls: that an answer comes is all that matters."""
        request_id, frame = self._shared.frame(self._shared.session, body)
        if isinstance(body, Hello):
            self._hello_id = self._hello_id or request_id
        if self._dealer.send(frame):
            self._sent(now_s)
        self._sent_s = now_s  # or it would be due again at once

    def _sent(self, now_s: float) -> None:
        self._sent_s = now_s
        if not self._asked_s:
            self._asked_s = now_s

    def _session_over(self) -> KvpinError:
        if self._shared.session is None:
            return Unavailable("the connection to the master broke")
        return EpochChanged("the master was started anew")

    # --- receiving --------------------------------------------------------------------------------------------------

    def _received(self, frame: bytes) -> None:
        shared = self._shared
        try:
            response = decode_response(frame)
        except msgspec.MsgspecError as error:
            shared.counters.add("bad_replies")
            shared.warn("bad_reply", error)
            return
        body = response.body
        session = shared.session
        if isinstance(body, Welcome):
            self._welcomed(body)
        elif session is None and isinstance(body, Failure) and response.request_id >= self._hello_id > 0:
            self._not_welcomed(body)
        elif session is not None and (over := epoch_changed(response)) is not None:
            self._lose_session(over)
        elif session is None or response.epoch != session.welcome.epoch:
            shared.counters.add("stray_replies")
            return
        elif (revoke := self._calls.answered(response, session)) is not None:
            self._send(revoke, time.monotonic())
        self._asked_s = 0.0
        if shared.tripped:
            shared.close_breaker()

    # --- the session ------------------------------------------------------------------------------------------------

    def _link_changed(self) -> None:
        for change in self._dealer.link_changes():
            self._linked = change is Link.UP
            if self._linked:
                self._ask_at_s = 0.0
            else:
                self._lose_session(Unavailable("the connection to the master broke"))

    def _welcomed(self, welcome: Welcome) -> None:
        shared = self._shared
        session = shared.session
        if welcome.protocol != PROTOCOL_VERSION:
            text = f"the master at {shared.address} speaks protocol {welcome.protocol}, this client {PROTOCOL_VERSION}"
            self._refuse(ProtocolError(f"{text}: install the same version of kvpin on both sides"))
            return
        if session is not None and session.welcome.epoch == welcome.epoch:
            return  # a Hello that was repeated got its second answer
        if session is not None:
            self._lose_session(EpochChanged("the master was started anew"))
        if welcome.epoch != self._epoch:
            self._epoch = welcome.epoch
            self._lives += 1
        shared.counters.add("sessions")
        shared.set_session(Session(welcome, self._lives))
        logger.info("event=connected address=%s epoch=%d", shared.address, welcome.epoch)

    def _not_welcomed(self, failure: Failure) -> None:
        error = f"the master at {self._shared.address} refused this client: {failure.message}"
        if failure.code in (ErrorCode.VERSION, ErrorCode.BAD_REQUEST):
            self._refuse(ProtocolError(error))
        else:
            self._shared.warn("refused", failure.message)

    def _refuse(self, error: KvpinError) -> None:
        logger.error("event=refused address=%s error=%s", self._shared.address, error)
        self._lose_session(error)
        self._shared.refuse(error)

    def _lose_session(self, error: KvpinError) -> None:
        """Hello is due again, and nothing that is under way will be answered."""
        if self._shared.session is not None:
            self._shared.counters.add("sessions_lost")
            logger.info("event=session_lost address=%s reason=%r", self._shared.address, str(error))
            if self._embedded is not None:
                self._embedded.lost(time.monotonic())
        self._shared.set_session(None)
        self._ask_at_s = 0.0
        self._asked_s = 0.0
        self._hello_id = 0
        self._calls.fail_all(error)

    def _take_leave(self) -> None:
        """Say Bye, so that the master frees at once what is ours; and wait a little for it to be sent."""
        self._send_work()
        session = self._shared.session
        if session is None:
            return
        request_id, frame = self._shared.frame(session, Bye())
        now_s = time.monotonic()
        deadline_s = now_s + CLOSE_WAIT_MS / 1000
        if self._dealer.send(frame):
            self._calls.add(request_id, PendingCall(Bye(), self._shared, now_s, session))
        while request_id in self._calls and now_s < deadline_s:
            self._dealer.wait(int((deadline_s - now_s) * 1000) + 1)
            for reply in self._dealer.receive():
                self._received(reply)
            now_s = time.monotonic()
