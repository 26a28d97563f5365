"""The part of the client that every user of it needs: connect, know the state, ask, take leave, survive a fork."""

import os
import threading
import weakref
from types import TracebackType
from typing import Self

import msgspec

from kvpin import io_thread
from kvpin.calls import PendingCall
from kvpin.config import ClientConfig, check_address, client_config, pool_address
from kvpin.connection import Connection
from kvpin.counters import Counters
from kvpin.embedded import EmbeddedMaster
from kvpin.errors import ConfigError
from kvpin.limits import CLOSE_WAIT_MS, NAME_BYTES_MAX
from kvpin.mapping import Mapping
from kvpin.processes import pid_namespace
from kvpin.protocol import PROTOCOL_VERSION, Hello, ReplyBody, RequestBody, SegmentInfo
from kvpin.reader import Reader
from kvpin.session import Session
from kvpin.writer import Writer

_clients: "weakref.WeakSet[BaseClient]" = weakref.WeakSet()


class Io:
    """What a client has in one process. A forked child gets its own: neither socket nor thread survive a fork."""

    def __init__(self, address: str, hello: Hello, config: ClientConfig, counters: Counters) -> None:
        embedded = EmbeddedMaster(config, address, counters) if config.address is None and config.embedded else None
        self.connection = Connection(address, hello, config, counters)
        self.mapping = Mapping()
        self.reader = Reader(self.connection, self.mapping)
        self.writer = Writer(self.connection, self.mapping)
        self.thread = io_thread.start(self.connection, embedded)

    def close(self) -> None:
        self.connection.close()
        if self.thread is not threading.current_thread():
            self.thread.join(2 * CLOSE_WAIT_MS / 1000)
        self.mapping.close()


class BaseClient:
    """See `kvpin.client.Client`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        config: ClientConfig | None = None,
        name: str = "client",
        writer: bool = True,
    ) -> None:
        if config is None:
            config = client_config()
        if address is not None:
            config = msgspec.structs.replace(config, address=address)
        if len(name.encode()) > NAME_BYTES_MAX:
            raise ConfigError(f"client name {name!r} is longer than {NAME_BYTES_MAX} bytes: shorten it")
        self.config = config
        self._address = _checked(config.address) if config.address is not None else pool_address(config.pool)
        self._name = name
        self._writer = writer
        self._counters = Counters()
        self._lock = threading.Lock()
        self._io: Io | None = self._start()
        _clients.add(self)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Is the master there, and does it answer?"""
        return self._live().connection.ready

    @property
    def epoch(self) -> int:
        """The life of the master that this client is connected to; 0 if it isn't connected."""
        session = self._live().connection.session
        return session.welcome.epoch if session else 0

    @property
    def segment(self) -> SegmentInfo | None:
        """The shared memory of the current epoch; None if not connected."""
        session = self._live().connection.session
        return session.welcome.segment if session else None

    @property
    def put_timeout_ms(self) -> int:
        """A put that isn't ended so long after `sent_s` is lost; 0 if not connected."""
        session = self._live().connection.session
        return session.welcome.put_timeout_ms if session else 0

    @property
    def counters(self) -> dict[str, int]:
        """What happened so far, by name: calls, failures, timeouts, breaker_opens, sessions, leases_expired ..."""
        return self._counters.snapshot()

    def wait_ready(self, timeout_ms: float) -> bool:
        """Wait until the master answers. False at the deadline, or when it has refused this client for good."""
        return self._live().connection.wait_ready(timeout_ms)

    # --- requests of the protocol, for adapters ---------------------------------------------------------------------

    def submit(self, body: RequestBody, only_in: Session | None = None) -> PendingCall:
        """Send a request and go on. Never waits, and doesn't raise: a call that can't be made has failed at once.

        `only_in`: the session of the call that this one follows up (`PendingCall.session`); it fails in any other.
        """
        return self._live().connection.submit(body, only_in)

    def call(self, body: RequestBody, timeout_ms: float | None = None) -> ReplyBody:
        """Send a request and wait for its answer (`timeout_ms` None: the configured one).

        A client that has just been made waits for its connection first, at most `connect_timeout_ms` after it was made.
        """
        connection = self._live().connection
        connection.wait_verdict()
        return connection.submit(body).wait(self.config.call_timeout_ms if timeout_ms is None else timeout_ms)

    def release(self, lease_id: int) -> None:
        """End a lease early: the next request or heartbeat carries it. 0, and leases of an older epoch, are ignored."""
        self._live().connection.release(lease_id)

    # --- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take leave of the master: what this client was writing is given up. Calls under way fail."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _live(self) -> Io:
        """The I/O of this process, made at the first use."""
        if self._io is None:
            with self._lock:
                if self._io is None:
                    self._io = self._start()
        return self._io

    def _start(self) -> Io:
        pid = os.getpid()
        hello = Hello(PROTOCOL_VERSION, self._name, pid, pid if self._writer else 0, pid_namespace=pid_namespace())
        io = Io(self._address, hello, self.config, self._counters)
        self._finalizer = weakref.finalize(self, io.close)
        return io

    def forget_io(self) -> None:
        """For a forked child: what was there is the parent's, and whatever lock it has may be held for ever."""
        self._finalizer.detach()
        self._lock = threading.Lock()
        self._counters.renew_lock()
        self._io = None


def _checked(address: str) -> str:
    try:
        return check_address(address)
    except ConfigError as error:
        raise ConfigError(f"address = {error}") from error


def _restart_after_fork() -> None:
    for client in _clients:
        client.forget_io()


os.register_at_fork(after_in_child=_restart_after_fork)
