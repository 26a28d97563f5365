"""The client's socket, with its options, its link events, and a way to wake the thread that waits on it."""

import contextlib
import enum
import os
import weakref

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpin.errors import ConfigError
from kvpin.limits import (
    FRAME_BYTES_MAX,
    HEARTBEAT_MS,
    RECEIVE_BURST_MAX,
    RECONNECT_MS_MIN,
    SEND_QUEUE_MAX,
    SESSION_TIMEOUT_MS,
)


class Link(enum.Enum):
    """What happens to the connection below the protocol."""

    UP = enum.auto()
    DOWN = enum.auto()


class Waker:
    """Wakes a thread that waits in `Dealer.wait`. Any thread may call it, at any time.

    Its descriptor is closed when nobody has the waker any more: closed earlier, its number could be another file's
    when a late call writes to it.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class Dealer:
    """A DEALER and its context, made, used and closed in one thread.

    IMMEDIATE: nothing is queued for a peer that isn't there. The identity outlives reconnects, so that the master
    knows the client again. Raises ConfigError for an address that ZeroMQ can't use.
    """

    def __init__(self, address: str, identity: bytes, retry_ms: int, waker: Waker) -> None:
        self._context = zmq.Context()
        self._waker = waker
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.SNDHWM: SEND_QUEUE_MAX,
            zmq.RCVHWM: SEND_QUEUE_MAX,
            zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: SESSION_TIMEOUT_MS,
            zmq.HEARTBEAT_TTL: SESSION_TIMEOUT_MS,
            zmq.RECONNECT_IVL: min(RECONNECT_MS_MIN, retry_ms),
            zmq.RECONNECT_IVL_MAX: retry_ms,
        }.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._arrivals = zmq.Poller()
        self._arrivals.register(self._socket, zmq.POLLIN)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, waker.fileno()):
            self._poller.register(source, zmq.POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"address = {address!r}: ZeroMQ can't connect to it: {error}") from error

    def wait(self, timeout_ms: int) -> tuple[bool, bool]:
        """Until the waker was used, or: something is to be received, the link has changed. These two are returned."""
        received = changed = False
        for source, _ in self._poller.poll(timeout_ms):
            if source is self._socket:
                received = True
            elif source is self._monitor:
                changed = True
            else:
                self._waker.clear()
        return received, changed

    def send(self, frame: bytes) -> bool:
        """False: there's no peer, or its queue is full."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes]:
        """What has arrived, at most RECEIVE_BURST_MAX messages."""
        frames: list[bytes] = []
        while len(frames) < RECEIVE_BURST_MAX and self._arrivals.poll(0):  # far cheaper than to catch zmq.Again
            frames.append(self._socket.recv(zmq.NOBLOCK))
        return frames

    def link_changes(self) -> list[Link]:
        changes: list[Link] = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                changes.append(Link.UP if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Link.DOWN)
        return changes

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
