"""The core's one door: commands and time go in, replies come out.

It is a plain state machine. Time is an argument, so a test or a simulation decides what the clock says; nothing in
here waits, sends, or reads anything. Before a command is looked at, everything due by then has expired: what a command
sees is exact at its `now_ms`.

What leaves the state leaves no reference cycles behind, so its owner may do without the cyclic garbage collector, whose
pauses would grow with the number of objects.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvpin.limits import BATCH_KEYS_MAX, EVICT_BACKOFF_MS, TICK_EVICT_OBJECTS_MAX
from kvpin.master.core import guarantees, puts, queries, reads, removal, validate
from kvpin.master.core.config import CoreConfig
from kvpin.master.core.invariants import violations
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import Session
from kvpin.protocol import (
    BatchEvict,
    Bye,
    Check,
    Clear,
    Done,
    ErrorCode,
    Exists,
    ExpireGuaranteed,
    Failure,
    GetReplicas,
    ListPrefixes,
    Ping,
    Protect,
    PutEnd,
    PutRevoke,
    PutStart,
    Release,
    Remove,
    Renew,
    ReplyBody,
    Report,
    RequestBody,
    Stats,
    Story,
)


class _Command(NamedTuple):
    check: Callable[[CoreConfig, Any], validate.Fault]
    run: Callable[[Tables, int, Session, Any], ReplyBody]
    has_effect: bool  # then a repeated request id gets the first answer; a mere question is asked again


def _ping(tables: Tables, now_ms: int, session: Session, body: Ping) -> Done:
    return Done()


def _bye(tables: Tables, now_ms: int, session: Session, body: Bye) -> Done:
    tables.leases.release(session, list(session.leases))
    _end_session(tables, now_ms, session, writer_dead=False)
    return Done()


_COMMANDS: dict[type, _Command] = {
    PutStart: _Command(validate.put_start, puts.put_start, True),
    PutEnd: _Command(validate.keys_only, puts.put_end, True),
    PutRevoke: _Command(validate.keys_only, puts.put_revoke, True),
    GetReplicas: _Command(validate.get_replicas, reads.get_replicas, True),
    Exists: _Command(validate.keys_only, reads.exists, False),
    Release: _Command(validate.release, reads.release, True),
    Protect: _Command(validate.protect, guarantees.protect, True),
    ExpireGuaranteed: _Command(validate.expire, guarantees.expire, True),
    Renew: _Command(validate.renew, guarantees.renew, True),
    ListPrefixes: _Command(validate.list_prefixes, guarantees.list_prefixes, False),
    Remove: _Command(validate.keys_only, removal.remove, True),
    Clear: _Command(validate.clear, removal.clear, True),
    BatchEvict: _Command(validate.evict, removal.evict, True),
    Report: _Command(validate.report, queries.report, False),
    Stats: _Command(validate.nothing, queries.stats, False),
    Story: _Command(validate.story, queries.story, False),
    Check: _Command(validate.nothing, queries.check, False),
    Ping: _Command(validate.nothing, _ping, False),
    Bye: _Command(validate.nothing, _bye, False),
}


class State:
    """All that a master knows. One owner calls it; it isn't thread-safe."""

    def __init__(self, config: CoreConfig) -> None:
        self.tables = Tables(config)
        self._now_ms = 0  # the latest time seen: it never runs backwards in here
        self._draining = False  # above the high watermark, and not yet below the low one
        self._evict_after_ms = 0  # background eviction backs off until then

    def handle(
        self, now_ms: int, client_id: bytes, request_id: int, body: RequestBody, released_leases: Sequence[int] = ()
    ) -> ReplyBody:
        """Carry out one command of a client. Never raises on what a client may send: the reply is a Failure then."""
        now_ms = self._advance(now_ms)
        tables = self.tables
        session = tables.sessions.get(client_id)
        if session is None:
            return self._refuse(ErrorCode.EPOCH_CHANGED, "this master doesn't know you: say Hello")
        if len(released_leases) > BATCH_KEYS_MAX:
            return self._refuse(ErrorCode.BAD_REQUEST, f"over {BATCH_KEYS_MAX} released leases: send fewer")
        if released_leases:
            tables.leases.release(session, released_leases)
        known = session.replies.get(request_id)
        if known is not None:
            tables.counters["requests_repeated"] += 1
            return known
        command = _COMMANDS.get(type(body))
        if command is None:
            return self._refuse(ErrorCode.BAD_REQUEST, f"{type(body).__name__} is no command: see kvpin/protocol.py")
        fault = command.check(tables.config, body)
        if fault is not None:
            return self._refuse(ErrorCode.BAD_REQUEST, fault)
        reply = command.run(tables, now_ms, session, body)
        if command.has_effect:
            session.remember(request_id, reply)
        tables.windows.sweep()
        return reply

    def client_joined(self, now_ms: int, client_id: bytes, tenant: str, name: str) -> None:
        """A client said Hello. One that is known already keeps what it has."""
        self._advance(now_ms)
        session = self.tables.sessions.get(client_id)
        if session is None:
            self.tables.sessions[client_id] = Session(client_id, tenant, name)
            self.tables.counters["clients_joined"] += 1
        else:
            session.tenant, session.name = tenant, name

    def client_left(self, now_ms: int, client_id: bytes, writer_dead: bool) -> None:
        """A client is gone: its puts are void.

        `writer_dead`: whoever copied for it is known to be dead, so its leases end and its ranges are free at once,
        those from before too (so it may be called again for a client that has left, when that becomes known).
        Otherwise its ranges go into quarantine and its leases run out by themselves: somebody may yet be copying.
        """
        now_ms = self._advance(now_ms)
        session = self.tables.sessions.get(client_id)
        if session is not None:
            if writer_dead:
                self.tables.leases.release(session, list(session.leases))
            _end_session(self.tables, now_ms, session, writer_dead)
        if writer_dead:
            self.tables.memory.release_writer(client_id)
        self.tables.windows.sweep()

    def tick(self, now_ms: int) -> int | None:
        """Expire what is due and evict in the background; when to call again at the latest, in ms (None: no need)."""
        now_ms = self._advance(now_ms)
        self._drain(now_ms)
        return min(self._due_ms(now_ms), default=None)

    def check_invariants(self, now_ms: int) -> list[str]:
        """All violations of the invariants, in words; empty if they hold. Looks at everything: O(objects)."""
        return violations(self.tables, max(now_ms, self._now_ms))

    def stats(self, now_ms: int) -> dict[str, int]:
        """All counters and gauges, by the names of counters.py."""
        self._advance(now_ms)
        return queries.values(self.tables)

    def _advance(self, now_ms: int) -> int:
        """Take the time, which never runs backwards, and let expire what is due by then."""
        now_ms = self._now_ms = max(now_ms, self._now_ms)
        tables = self.tables
        tables.memory.expire(now_ms)
        tables.windows.expire(now_ms)
        tables.leases.expire(now_ms)
        tables.windows.sweep()
        return now_ms

    def _drain(self, now_ms: int) -> None:
        """Evict a bounded piece of what lies above the watermarks."""
        config, memory = self.tables.config, self.tables.memory
        low_bytes = int(config.low_watermark * config.pool_bytes)
        if memory.used_bytes > config.high_watermark * config.pool_bytes:
            self._draining = True
        if memory.used_bytes > low_bytes:
            self.tables.evictor.refresh(TICK_EVICT_OBJECTS_MAX)
        if not self._draining or now_ms < self._evict_after_ms:
            return
        if memory.used_bytes > low_bytes:
            taken = memory.evict_some(memory.used_bytes - low_bytes, TICK_EVICT_OBJECTS_MAX, now_ms)
            if not taken and self.tables.evictor.is_empty():
                self._evict_after_ms = now_ms + EVICT_BACKOFF_MS
        self._draining = memory.used_bytes > low_bytes

    def _due_ms(self, now_ms: int) -> Iterable[int]:
        tables = self.tables
        yield from tables.memory.due_ms()
        for due_ms in (tables.windows.due_ms(), tables.leases.due_ms()):
            if due_ms is not None:
                yield due_ms
        if self._draining:
            yield max(now_ms + 1, self._evict_after_ms)

    def _refuse(self, code: ErrorCode, text: str) -> Failure:
        self.tables.counters["requests_refused"] += 1
        return Failure(code, text)


def _end_session(tables: Tables, now_ms: int, session: Session, writer_dead: bool) -> None:
    writes = list(session.writes.values())
    for write in writes:
        if writer_dead:
            tables.memory.revoke(write)
        else:
            tables.memory.lose(write, now_ms)
    tables.counters["puts_revoked"] += len(writes)
    tables.counters["clients_left"] += 1
    tables.stories.record(now_ms, f"put void: {session.name} left", [write.obj.key for write in writes])
    del tables.sessions[session.client_id]
