"""A client whose master is a function, and a clock that moves only when told."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpin.errors import CallTimeout, EpochChanged, KvpinError, Unavailable
from kvpin.protocol import (
    Done,
    Ended,
    EndStatus,
    GetReplicas,
    Grant,
    PutEnd,
    PutRevoke,
    PutStart,
    PutStarted,
    PutStatus,
    Replicas,
    ReplyBody,
    RequestBody,
    SegmentInfo,
)

Answer = ReplyBody | KvpinError | None
EPOCH = 7


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance_ms(self, milliseconds: float) -> None:
        self.now_s += milliseconds / 1000


@dataclass
class FakeCall:
    clock: Clock
    body: RequestBody
    answer: Answer
    sent_s: float
    session: object = None
    abandoned: bool = False

    @property
    def settled(self) -> bool:
        return self.answer is not None

    def poll(self) -> ReplyBody | None:
        if isinstance(self.answer, KvpinError):
            raise self.answer
        return self.answer

    def wait(self, timeout_ms: float) -> ReplyBody:
        reply = self.poll()
        if reply is None:
            self.clock.advance_ms(timeout_ms)
            self.abandoned = True
            raise CallTimeout("no answer")
        return reply

    def abandon(self) -> None:
        self.abandoned = True


@dataclass
class FakeClient:
    """`master` answers what is submitted; None leaves the call unanswered until the test sets its `answer`."""

    clock: Clock
    master: Callable[[RequestBody], Answer]
    ready: bool = True
    put_timeout_ms: int = 30_000
    segment: SegmentInfo | None = field(default_factory=lambda: SegmentInfo("/dev/shm/fake", 1 << 30, EPOCH))
    calls: list[FakeCall] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    session: object = field(default_factory=object)
    closed: bool = False

    @property
    def epoch(self) -> int:
        return self.segment.epoch if self.segment else 0

    def submit(self, body: RequestBody, only_in: object = None) -> FakeCall:
        if only_in is not None and only_in is not self.session:
            return FakeCall(self.clock, body, EpochChanged("another session"), self.clock.now_s)
        answer = self.master(body) if self.ready else Unavailable("breaker open")
        self.calls.append(FakeCall(self.clock, body, answer, self.clock.now_s, self.session))
        return self.calls[-1]

    def call(self, body: RequestBody, timeout_ms: float | None = None) -> ReplyBody:
        return self.submit(body).wait(timeout_ms or 1000)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)

    def close(self) -> None:
        self.closed = True

    def bodies(self, kind: type[RequestBody]) -> list[RequestBody]:
        return [call.body for call in self.calls if isinstance(call.body, kind)]


@dataclass
class Store:
    """A master that keeps what it is told in dictionaries; offsets count up from 0."""

    object_bytes: int
    offsets: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)
    leases: int = 0

    def __call__(self, body: RequestBody) -> Answer:
        match body:
            case GetReplicas(keys=keys, lease_ms=lease_ms, marks=marks):
                self.leases += 1
                hits = [key in self.offsets for key in keys]
                return Replicas(
                    offsets=[self.offsets.get(key, -1) for key in keys],
                    sizes=[self.object_bytes if hit else 0 for hit in hits],
                    lease_id=self.leases if any(hits) else 0,
                    lease_ms=lease_ms if any(hits) else 0,
                    grants=[Grant.RENEWED if hit else Grant.NONE for hit in hits] if marks else [],
                )
            case PutStart(items=items, marks=marks):
                statuses = [self._start(item.key) for item in items]
                return PutStarted(
                    statuses=statuses,
                    offsets=[
                        self.writing[item.key] if status is PutStatus.WRITE else -1
                        for item, status in zip(items, statuses, strict=True)
                    ],
                    grants=[Grant.OPENED if marks else Grant.NONE for _ in items],
                )
            case PutEnd(keys=keys):
                self.offsets.update({key: self.writing.pop(key) for key in keys})
                return Ended([EndStatus.OK for _ in keys])
            case PutRevoke(keys=keys):
                for key in keys:
                    del self.writing[key]
                return Ended([EndStatus.OK for _ in keys])
        return Done()

    def _start(self, key: bytes) -> PutStatus:
        if key in self.offsets:
            return PutStatus.EXISTS
        if key in self.writing:
            return PutStatus.BUSY
        self.writing[key] = (len(self.offsets) + len(self.writing)) * self.object_bytes
        return PutStatus.WRITE
