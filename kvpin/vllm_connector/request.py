"""What the manager remembers of one request: its marks, its lookup, and its transfers under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey

from kvpin.client import PendingCall
from kvpin.http.sidefield import SideField
from kvpin.protocol import Mark, SegmentInfo
from kvpin.session import Session


@dataclass
class Question:
    """A lookup under way: one call for every BATCH_KEYS_MAX keys."""

    calls: list[tuple[Sequence[OffloadKey], PendingCall]]
    keys: int
    segment: SegmentInfo | None  # the one in use when it was asked


@dataclass
class Answer:
    """What may be loaded: leased ranges of one epoch. Empty when the question failed."""

    keys: int  # how many were asked for
    fresh_until_s: float  # past it, ask again rather than start a load
    offsets: dict[OffloadKey, int] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    segment: SegmentInfo | None = None
    deadline_s: float = 0.0  # loads must end by then


@dataclass
class Load:
    """A load under way. The engine has at most one a request."""

    ticket: int
    answer: Answer


@dataclass
class Put:
    """Ranges granted for one store, until put_end or put_revoke. Past `deadline_s` the master has given it up.

    So it has when `session` is over, even in the same epoch: the keys may be in a later put of this engine by then.
    """

    ticket: int
    object_keys: list[bytes]
    segment: SegmentInfo
    session: Session | None
    deadline_s: float
    failure: str = ""


@dataclass
class RequestState:
    """`namespace` None: this request has nothing to do with kvpin (yet)."""

    marks: list[Mark] = field(default_factory=list)
    report: bytes = b""
    namespace: bytes | None = None
    question: Question | None = None
    answer: Answer | None = None
    load: Load | None = None
    load_failed: bool = False  # once is enough: the rest of the request is computed
    puts: dict[OffloadKey, Put] = field(default_factory=dict)
    put_timed_out: bool = False


def marks_of(field: SideField) -> list[Mark]:
    return [Mark(bytes.fromhex(prefix.id), prefix.end_token, prefix.ttl_ms, prefix.label) for prefix in field.prefixes]
