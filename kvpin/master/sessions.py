"""Who is connected, who went silent, and whose memory is safe to use again.

A client that left may still have a thread copying into a range it was granted. Its ranges stay in quarantine until
its writer is known dead, so it is remembered for that long as *departed*.
"""

from collections.abc import Iterator

from kvpin.limits import CLIENTS_MAX, DEPARTED_MAX
from kvpin.processes import Process, identify
from kvpin.protocol import Hello


class Session:
    """`process` says when the client is gone, `writer` when its ranges can be used again: often the same process.

    `core_id` is its name in the core: the routing id alone may come again from another process, and what that one's
    death frees must never be the memory of the first.
    """

    __slots__ = ("client_id", "core_id", "last_ms", "name", "process", "writer")

    def __init__(self, client_id: bytes, hello: Hello, now_ms: int) -> None:
        self.client_id = client_id
        self.name = hello.name
        self.process = identify(hello.pid, hello.pid_namespace)
        self.writer = identify(hello.writer_pid, hello.pid_namespace)
        who = (hello.pid, hello.writer_pid, hello.pid_namespace, self.process.start_ticks, self.writer.start_ticks)
        self.core_id = client_id + repr(who).encode()
        self.last_ms = now_ms


class Sessions:
    """All and only the clients that said Hello and are taken to be alive, by ZeroMQ routing id."""

    def __init__(self, timeout_ms: int, quarantine_ms: int, now_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._quarantine_ms = quarantine_ms
        self._live: dict[bytes, Session] = {}
        self._departed: dict[bytes, tuple[Process, int]] = {}  # core id -> its writer, until when it matters
        self._idle_since_ms: int | None = now_ms

    def __len__(self) -> int:
        return len(self._live)

    @property
    def departed(self) -> int:
        """How many clients are gone whose writers may still write."""
        return len(self._departed)

    def get(self, client_id: bytes) -> Session | None:
        return self._live.get(client_id)

    def is_full(self) -> bool:
        return len(self._live) >= CLIENTS_MAX

    def join(self, client_id: bytes, hello: Hello, now_ms: int) -> Session:
        self._idle_since_ms = None
        session = self._live[client_id] = Session(client_id, hello, now_ms)
        self._departed.pop(session.core_id, None)
        return session

    def leave(self, session: Session, now_ms: int, writer_dead: bool) -> None:
        """Forget the session; remember its writer as long as that may still write."""
        if self._live.get(session.client_id) is session:
            del self._live[session.client_id]
        if not self._live:
            self._idle_since_ms = now_ms
        if not writer_dead and session.writer.known:
            self._departed[session.core_id] = (session.writer, now_ms + self._quarantine_ms)
            if len(self._departed) > DEPARTED_MAX:  # the oldest: its ranges wait for the quarantine's end
                del self._departed[next(iter(self._departed))]

    def heard_of(self, client_id: bytes, now_ms: int) -> None:
        """Any message, even a wrong one, shows that its sender lives."""
        if (session := self._live.get(client_id)) is not None:
            session.last_ms = now_ms

    def excuse(self, absence_ms: int) -> None:
        """The master itself was away for so long (stopped, or starved of CPU): that is nobody's silence."""
        for session in self._live.values():
            session.last_ms += absence_ms
        if self._idle_since_ms is not None:
            self._idle_since_ms += absence_ms

    def silent(self, now_ms: int) -> list[Session]:
        """Sessions that said nothing for the session timeout."""
        return [s for s in self._live.values() if now_ms - s.last_ms >= self._timeout_ms]

    def dead(self) -> list[Session]:
        """Sessions whose process is dead."""
        return [s for s in self._live.values() if s.process.is_dead()]

    def departed_dead(self, now_ms: int) -> Iterator[bytes]:
        """Core ids of clients gone before whose writers are dead by now; each is told once."""
        for core_id, (writer, until_ms) in list(self._departed.items()):
            if writer.is_dead():
                del self._departed[core_id]
                yield core_id
            elif now_ms >= until_ms:
                del self._departed[core_id]

    def idle_ms(self, now_ms: int) -> int:
        """How long there has been no session."""
        return 0 if self._idle_since_ms is None else now_ms - self._idle_since_ms
