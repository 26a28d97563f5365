"""The owner loop: one thread, one socket, one order of decisions.

A round: let the core expire what is due, wait for messages until the core's next deadline, take a bounded batch of
them, and for each decode -> check session and epoch -> ask the core -> answer without waiting. Whatever a peer sends,
the answer is a message; whatever fails in here, the loop goes on.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from kvpin.limits import HEARTBEAT_MS, HOUSEKEEPING_MS, NAME_BYTES_MAX, ROUND_FRAMES_MAX
from kvpin.log import Throttle
from kvpin.master.core.config import CoreConfig
from kvpin.master.core.state import State
from kvpin.master.counters import COUNTERS
from kvpin.master.sessions import Session, Sessions
from kvpin.protocol import (
    PROTOCOL_VERSION,
    Bye,
    ErrorCode,
    Failure,
    Hello,
    ReplyBody,
    Request,
    Response,
    SegmentInfo,
    StatsReply,
    Welcome,
    decode_request,
    encode,
)

Outcome = TypeVar("Outcome")

logger = logging.getLogger(__name__)


def monotonic_ms() -> int:
    return time.monotonic_ns() // 10**6


class Server:
    """Answers on `socket` until `stop` is called, or, if `exit_when_idle_ms` isn't 0, nobody was there so long.

    `wake_fd`: readable when the process got a signal, so that a waiting loop looks at `stop` at once.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        segment: SegmentInfo,
        config: CoreConfig,
        *,
        session_timeout_ms: int,
        exit_when_idle_ms: int = 0,
        wake_fd: int | None = None,
        clock: Callable[[], int] = monotonic_ms,
    ) -> None:
        self.state = State(config)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._socket = socket
        self._clock = clock
        self._started_ms = clock()
        self._sessions = Sessions(session_timeout_ms, config.quarantine_ms, self._started_ms)
        self._exit_when_idle_ms = exit_when_idle_ms
        self._housekeeping_ms = max(1, min(HOUSEKEEPING_MS, session_timeout_ms // 4))
        self._housekeeping_due_ms = self._started_ms
        self._throttle = Throttle()
        self._stopping = False
        self._epoch = segment.epoch
        self._welcome = Welcome(
            epoch=segment.epoch,
            segment=segment,
            put_timeout_ms=config.put_timeout_ms,
            lease_ms_max=config.lease_ms_max,
            ttl_ms_max=config.ttl_ms_max,
            heartbeat_ms=max(1, min(HEARTBEAT_MS, session_timeout_ms // 5)),
        )
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)

    def stop(self) -> None:
        """End `run` after the round in hand. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        while not self._stopping:
            due_ms = self._guarded(self.state.tick, self._clock())
            self._wait(self._housekeeping_due_ms if due_ms is None else min(due_ms, self._housekeeping_due_ms))
            if (now_ms := self._clock()) >= self._housekeeping_due_ms:
                self._guarded(self._keep_house, now_ms)

    def _wait(self, until_ms: int) -> None:
        """Wait for a message or a signal, and take a round of messages.

        At least 1 ms: a deadline that never goes away must not become a busy loop.
        """
        ready = dict(self._poller.poll(max(1, until_ms - self._clock())))
        if self._wake_fd is not None and self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        if self._socket in ready:
            self._receive_round()

    def _receive_round(self) -> None:
        for _ in range(ROUND_FRAMES_MAX):
            try:
                client_id = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._socket.recv() if self._socket.getsockopt(zmq.RCVMORE) else b""
            parts = 1
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv()
                parts += 1
            self.counters["server_frames"] += 1
            self._sessions.heard_of(client_id, self._clock())
            self._send(client_id, self._answer(client_id, frame, parts))

    def _answer(self, client_id: bytes, frame: bytes, parts: int) -> bytes:
        try:
            if parts != 1:
                raise ValueError(f"{parts} frames in one message: send one")
            request = decode_request(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            return encode(self._malformed(client_id, frame, error))
        try:
            reply = self._handle(self._clock(), client_id, request)
            return encode(Response(request.request_id, self._epoch, reply))
        except Exception:
            self._internal_error(type(request.body).__name__)
            failure = Failure(ErrorCode.INTERNAL, "a fault in kvpin; the master's log has the traceback")
            return encode(Response(request.request_id, self._epoch, failure))

    def _handle(self, now_ms: int, client_id: bytes, request: Request) -> ReplyBody:
        body = request.body
        if isinstance(body, Hello):
            return self._hello(now_ms, client_id, body)
        session = self._sessions.get(client_id)
        if session is None or request.epoch != self._epoch:
            self.counters["server_epoch_refused"] += 1
            return Failure(ErrorCode.EPOCH_CHANGED, f"this master's epoch is {self._epoch}: say Hello first")
        reply = self.state.handle(now_ms, session.core_id, request.request_id, body, request.released_leases)
        if isinstance(body, Bye):
            self._sessions.leave(session, now_ms, writer_dead=False)
            logger.info("event=client_left reason=bye name=%r sessions=%d", session.name, len(self._sessions))
        elif isinstance(reply, StatsReply):
            return StatsReply(reply.values | self._values(now_ms))
        return reply

    def _hello(self, now_ms: int, client_id: bytes, hello: Hello) -> ReplyBody:
        if hello.protocol != PROTOCOL_VERSION:
            self.counters["server_version_refused"] += 1
            return Failure(
                ErrorCode.VERSION,
                f"you speak protocol {hello.protocol}, this master {PROTOCOL_VERSION}: run one kvpin on both sides",
            )
        for name, text in (("name", hello.name), ("tenant", hello.tenant)):
            if len(text.encode(errors="surrogatepass")) > NAME_BYTES_MAX:
                return Failure(ErrorCode.BAD_REQUEST, f"{name} has more than {NAME_BYTES_MAX} bytes")
        known = self._sessions.get(client_id)
        if known is None and self._sessions.is_full():
            self.counters["server_clients_refused"] += 1
            return Failure(ErrorCode.OVERLOADED, f"there are {len(self._sessions)} clients, the most allowed")
        session = self._sessions.join(client_id, hello, now_ms)
        if known is not None and known.core_id != session.core_id:
            self._part(now_ms, known, "replaced")
        self.state.client_joined(now_ms, session.core_id, hello.tenant, hello.name)
        logger.info(
            "event=client_joined name=%r pid=%d writer_pid=%d sessions=%d",
            hello.name, hello.pid, hello.writer_pid, len(self._sessions),
        )  # fmt: skip
        return self._welcome

    def _malformed(self, client_id: bytes, frame: bytes, error: Exception) -> Response:
        self.counters["server_frames_malformed"] += 1
        held = self._throttle.admit("malformed")
        if held is not None:
            logger.warning(
                "event=malformed_frame client=%s bytes=%d error=%r more_before=%d",
                client_id.hex(), len(frame), str(error), held,
            )  # fmt: skip
        text = f"not a message of kvpin's protocol {PROTOCOL_VERSION}: {error}"
        return Response(_request_id(frame), self._epoch, Failure(ErrorCode.BAD_REQUEST, text))

    def _send(self, client_id: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((client_id, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # its queue is full, or it has gone: it will ask again, or not
            self.counters["server_replies_dropped"] += 1
            held = self._throttle.admit("dropped")
            if held is not None:
                logger.warning(
                    "event=reply_dropped client=%s error=%r more_before=%d", client_id.hex(), error.strerror, held
                )

    def _guarded(self, step: Callable[[int], Outcome], now_ms: int) -> Outcome | None:
        """A step of the loop, which goes on whatever fails in it."""
        try:
            return step(now_ms)
        except Exception:
            self._internal_error("none")
            return None

    def _internal_error(self, request: str) -> None:
        """Count the exception being handled, and log it with its traceback, unless it repeats."""
        self.counters["server_internal_errors"] += 1
        held = self._throttle.admit(request)
        if held is not None:
            logger.exception("event=internal_error request=%s more_before=%d", request, held)

    def _keep_house(self, now_ms: int) -> None:
        """Part with dead and silent clients; leave if nobody needs this master."""
        self._sessions.excuse(now_ms - self._housekeeping_due_ms)
        self._housekeeping_due_ms = now_ms + self._housekeeping_ms
        for session in self._sessions.dead():
            self._part(now_ms, session, "dead")
        for session in self._sessions.silent(now_ms):
            self._part(now_ms, session, "silent")
        for core_id in self._sessions.departed_dead(now_ms):
            self.counters["server_writers_found_dead"] += 1
            self.state.client_left(now_ms, core_id, writer_dead=True)
        if self._exit_when_idle_ms and self._sessions.idle_ms(now_ms) >= self._exit_when_idle_ms:
            logger.info("event=idle_exit idle_ms=%d", self._sessions.idle_ms(now_ms))
            self.stop()

    def _part(self, now_ms: int, session: Session, reason: str) -> None:
        self.counters[f"server_clients_{reason}"] += 1
        writer_dead = session.writer.is_dead()
        self._sessions.leave(session, now_ms, writer_dead)
        self.state.client_left(now_ms, session.core_id, writer_dead)
        logger.info(
            "event=client_left reason=%s name=%r writer_dead=%s sessions=%d",
            reason, session.name, writer_dead, len(self._sessions),
        )  # fmt: skip

    def _values(self, now_ms: int) -> dict[str, int]:
        return self.counters | {
            "server_sessions": len(self._sessions),
            "server_departed": self._sessions.departed,
            "server_uptime_ms": now_ms - self._started_ms,
            "server_pid": os.getpid(),
            "server_epoch": self._epoch,
        }


def _request_id(frame: bytes) -> int:
    """The request id of a frame that is no request otherwise, so that its sender can match the answer; or 0."""
    try:
        first = msgspec.msgpack.decode(frame)[0]
    except Exception:  # whatever it was
        return 0
    return first if type(first) is int else 0
