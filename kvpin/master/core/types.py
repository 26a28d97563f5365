"""The nouns of the core. Plain records: the rules live with the tables that hold them.

Identity, not key, tells two objects apart: during a replace the old and the new one share a key.
"""

import enum
from collections import OrderedDict

from kvpin.limits import REPLIES_KEPT_PER_CLIENT
from kvpin.master.core.heap import Entry
from kvpin.protocol import Mark, ReplyBody

NO_GAP = 1 << 62  # beyond every position in a prompt
UNKNOWN_TOKEN = -1


class Phase(enum.IntEnum):
    """Where an object is in its life."""

    WRITING = 0  # in `writes`; invisible
    COMPLETE = 1  # in `objects`; readable
    GONE = 2  # removed. Its range is free, or waits in `lingering` for its last lease


# Module constants: looking an enum member up costs more than the comparison, on paths that run per block.
WRITING, COMPLETE, GONE = Phase.WRITING, Phase.COMPLETE, Phase.GONE


class Object:
    """One immutable value and its replica in memory."""

    __slots__ = (
        "cache", "end_token", "evict_entry", "holders", "key", "last_access_ms", "leases", "offset", "phase",
        "range_bytes", "size_bytes", "soft_pin", "tenant",
    )  # fmt: skip

    def __init__(
        self, key: bytes, offset: int, size_bytes: int, range_bytes: int, end_token: int, soft_pin: bool,
        cache: str, tenant: str, now_ms: int,
    ) -> None:  # fmt: skip
        self.key = key
        self.offset = offset
        self.size_bytes = size_bytes  # as written
        self.range_bytes = range_bytes  # as taken from the pool, whole pages: what every counter counts
        self.end_token = end_token  # where its block ends in the prompt: its depth in the chain
        self.soft_pin = soft_pin
        self.cache = cache
        self.tenant = tenant  # of the client that wrote it; its quota is charged
        self.phase = WRITING
        self.last_access_ms = now_ms
        self.leases = 0  # running leases that cover it
        # All and only the prefixes that hold a window on it, or will at put_end; the oldest first. None: never any.
        self.holders: dict[Prefix, None] | None = None
        self.evict_entry: Entry | None = None  # in an eviction heap, or None: parked

    def __repr__(self) -> str:
        return f"<Object {self.key!r} {self.phase.name} at {self.offset}+{self.range_bytes}>"


class Write:
    """A put under way: its object isn't visible yet."""

    __slots__ = ("cancelled", "deadline_ms", "force", "obj", "session")

    def __init__(self, obj: Object, session: "Session", deadline_ms: int, force: bool) -> None:
        self.obj = obj
        self.session = session  # the only one that may end or revoke it
        self.deadline_ms = deadline_ms
        self.force = force  # may replace an object in an open window
        self.cancelled = False  # deleted while being written: put_end frees it instead of making it visible


class Prefix:
    """One marked breakpoint: the holder of windows on the chain of blocks up to it. It goes with its last hold."""

    __slots__ = (
        "created_ms", "end_token", "entry", "gap_token", "gaps", "held_bytes", "held_token", "holds", "label",
        "prefix_id", "renewals", "reserved", "tenant", "ttl_ms",
    )  # fmt: skip

    def __init__(self, prefix_id: bytes, tenant: str, now_ms: int) -> None:
        self.prefix_id = prefix_id
        self.tenant = tenant
        self.label = ""
        self.end_token = 0  # the deepest mark seen
        self.ttl_ms = 0  # of the latest mark
        self.created_ms = now_ms
        self.renewals = 0
        self.holds: dict[Object, int] = {}  # all and only its open windows: complete object -> until when, in ms
        self.reserved: dict[Object, int] = {}  # windows to open at put_end: object being written -> ttl in ms
        self.held_bytes = 0  # of holds
        self.held_token = 0  # the deepest end_token of holds, or UNKNOWN_TOKEN while there are gaps
        self.gaps: dict[bytes, int] = {}  # blocks it should hold and doesn't: key -> end_token; the shallowest ones
        self.gap_token = NO_GAP  # the shallowest gap: nothing deeper is admitted
        self.entry: Entry | None = None  # in the deadline heap, not later than its earliest window ends

    def note_mark(self, mark: Mark) -> None:
        """A request marked this prefix once more."""
        self.end_token = max(self.end_token, mark.end_token)
        self.ttl_ms = mark.ttl_ms
        self.label = mark.label or self.label


class Lease:
    """Read protection for the objects of one answer."""

    __slots__ = ("entry", "lease_id", "objects", "session", "until_ms")

    def __init__(self, lease_id: int, session: "Session", objects: list[Object], until_ms: int) -> None:
        self.lease_id = lease_id
        self.session = session
        self.objects = objects
        self.until_ms = until_ms
        self.entry: Entry | None = None


class Quarantined:
    """A range whose writer may still write into it."""

    __slots__ = ("client_id", "offset", "range_bytes", "until_ms")

    def __init__(self, client_id: bytes, offset: int, range_bytes: int, until_ms: int) -> None:
        self.client_id = client_id
        self.offset = offset
        self.range_bytes = range_bytes
        self.until_ms = until_ms


class Session:
    """A client between its Hello and its end."""

    __slots__ = ("client_id", "leases", "name", "replies", "tenant", "writes")

    def __init__(self, client_id: bytes, tenant: str, name: str) -> None:
        self.client_id = client_id
        self.tenant = tenant
        self.name = name
        self.writes: dict[bytes, Write] = {}
        self.leases: dict[int, Lease] = {}
        self.replies: OrderedDict[int, ReplyBody] = OrderedDict()  # to repeated request ids, the oldest first

    def remember(self, request_id: int, reply: ReplyBody) -> None:
        self.replies[request_id] = reply
        if len(self.replies) > REPLIES_KEPT_PER_CLIENT:
            self.replies.popitem(last=False)
