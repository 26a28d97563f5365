"""The wire protocol between clients and the master: every message as a msgspec Struct.

Transport: one ZeroMQ DEALER per client, one ROUTER in the master, one msgpack frame a message. A client sends
`Request` envelopes and gets `Response` envelopes back, matched by `request_id`, **in any order**. Structs are arrays
on the wire; new fields go to the end with a default, so that an old peer ignores them and a new peer fills them in.
`PROTOCOL_VERSION` changes only when that is not enough.

A client says `Hello` first and gets `Welcome`: the epoch (one life of a master), the segment to map, the limits. Each
later request carries that epoch. A master with another epoch answers `Failure(EPOCH_CHANGED)`; the client then says
`Hello` again. The same (client, request_id) twice has one effect: the master answers the repeat from memory.

Units: sizes in bytes, offsets in bytes from the start of the segment's data area, times in milliseconds and relative
(a duration counted from the receiver's own clock), positions in tokens.
"""

import enum
from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 1

# --- outcomes -------------------------------------------------------------------------------------------------------


class PutStatus(enum.IntEnum):
    """What put_start decided for one key."""

    WRITE = 0  # a range is yours: write it, then put_end
    EXISTS = 1  # a complete object is there; nothing to write
    BUSY = 2  # another put of the key is under way; nothing to write
    NO_SPACE = 3  # nothing evictable makes room; go on without
    GUARANTEED = 4  # replace refused: the object is in an open window


class Grant(enum.IntEnum):
    """What became of the guarantee asked for one key."""

    NONE = 0  # no mark covers the key
    OPENED = 1  # a window opens (at once, or at put_end for a key being written)
    RENEWED = 2  # an open window was extended, or gained this prefix as a holder
    CAPACITY_EXCEEDED = 3  # GUARANTEED_CAPACITY_EXCEEDED: the guaranteed limit or a quota is reached
    GAP = 4  # a block nearer to the root isn't protected, so this one would be of no use


class EndStatus(enum.IntEnum):
    """What put_end, put_revoke or remove did for one key."""

    OK = 0
    NOT_FOUND = 1  # no such put or object (it may have timed out)
    NOT_OWNER = 2  # somebody else's put
    GUARANTEED = 3  # in an open window: needs force
    LEASED = 4  # being read: try later, or force


class ExpireMode(enum.StrEnum):
    """What batch_expire_guaranteed does with a prefix's blocks."""

    EXPIRE = "expire"  # end this prefix's holds; the data stays as ordinary objects
    DELETE = "delete"  # ... and remove the objects, except those that another prefix still holds
    ALL_HOLDERS = "all_holders"  # end every hold on these blocks; the data stays


class ErrorCode(enum.IntEnum):
    BAD_REQUEST = 1  # malformed, unknown, or over a limit; the text says what to change
    EPOCH_CHANGED = 2  # say Hello again
    VERSION = 3  # the peers don't speak the same protocol version
    OVERLOADED = 4  # a limit of the master is reached; try later
    INTERNAL = 5  # a fault in kvpin; the master logged it


# --- parts ----------------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the structs inside messages."""


class Mark(Part, frozen=True):
    """One marked prefix: it covers every item of the batch whose `end_token` is not beyond its own."""

    prefix_id: bytes  # PREFIX_ID_BYTES long, see keys.prefix_id
    end_token: int
    ttl_ms: int
    label: str = ""


class PutItem(Part, frozen=True):
    """One object to write. `end_token` is where its block ends in the prompt: it is the block's depth in its chain."""

    key: bytes
    size_bytes: int
    end_token: int = 0
    soft_pin: bool = False


class SegmentInfo(Part, frozen=True):
    """The shared memory to map. `size_bytes` is that of the data area; offsets count from its start."""

    path: str
    size_bytes: int
    epoch: int


class PrefixInfo(Part, frozen=True):
    """A live prefix record. `covered_tokens`: how far the leading run of protected blocks reaches."""

    prefix_id: bytes
    label: str
    tenant: str
    end_token: int
    covered_tokens: int
    blocks: int
    bytes: int
    ttl_ms: int
    remaining_ms: int  # until the last of its windows ends
    age_ms: int
    renewals: int


class MarkReport(Part, frozen=True):
    """What one request achieved for one of its marks, in tokens (see `Report`)."""

    prefix_id: bytes
    end_token: int
    covered_tokens: int  # leading run that is protected (or will be at put_end)
    opened_tokens: int  # of these, newly protected by this request
    renewed_tokens: int  # of these, already protected and extended
    refusal: Grant = Grant.NONE  # why it does not reach end_token: CAPACITY_EXCEEDED, GAP, or NONE


class StoryLine(Part, frozen=True):
    age_ms: int
    event: str


# --- requests -------------------------------------------------------------------------------------------------------


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Base of every request and reply body."""


class Hello(Body, frozen=True, tag="hello"):
    """First message. `writer_pid`: the process that writes into granted ranges, or 0 if others write for this client;
    the master frees a dead writer's ranges at once, an unknown writer's only after the release time.
    `pid_namespace`: in which the pids count (`processes.pid_namespace()`), or 0: then the master draws no conclusion
    from them.
    """

    protocol: int
    name: str
    pid: int
    writer_pid: int = 0
    tenant: str = ""
    pid_namespace: int = 0


class Bye(Body, frozen=True, tag="bye"):
    """The client leaves: its puts are revoked and its leases end. Answer: `Done`."""


class Ping(Body, frozen=True, tag="ping"):
    """Heartbeat. Answer: `Done`."""


class PutStart(Body, frozen=True, tag="put_start"):
    """Reserve ranges for new objects; protect what already exists. Answer: `PutStarted`.

    Marks open windows on existing complete objects at once and reserve guaranteed bytes for those to be written, in
    order of `end_token` (root first), until the limit is reached. `replace`: write over an existing object (allocate,
    swap at put_end, then free); refused in an open window unless `force`. `report`: see `Report`; empty = don't keep
    one.
    """

    items: list[PutItem]
    marks: list[Mark] = []
    cache: str = ""
    report: bytes = b""
    replace: bool = False
    force: bool = False


class PutEnd(Body, frozen=True, tag="put_end"):
    """The bytes are written: make the objects visible and open their windows. Answer: `Ended`."""

    keys: list[bytes]


class PutRevoke(Body, frozen=True, tag="put_revoke"):
    """Give ranges back unwritten. Answer: `Ended`."""

    keys: list[bytes]


class GetReplicas(Body, frozen=True, tag="get"):
    """get_replica_list: where the bytes lie, under a lease. Answer: `Replicas`.

    Renews only: a mark extends windows that are still open (and never shortens one), it creates none. Without marks
    no window changes. `end_tokens` is parallel to `keys`, or empty when there are no marks.
    """

    keys: list[bytes]
    lease_ms: int
    marks: list[Mark] = []
    end_tokens: list[int] = []
    report: bytes = b""


class Exists(Body, frozen=True, tag="exists"):
    """Answer: `Found`. Changes nothing at all: no lease, no recency, no window."""

    keys: list[bytes]


class Release(Body, frozen=True, tag="release"):
    """End leases early. Answer: `Done`. (Any request may carry released leases too.)"""

    lease_ids: list[int]


class Protect(Body, frozen=True, tag="protect"):
    """Open or renew windows on complete objects. Answer: `Protected`. A missing key is a GAP."""

    keys: list[bytes]
    end_tokens: list[int]
    marks: list[Mark]
    report: bytes = b""


class ExpireGuaranteed(Body, frozen=True, tag="expire"):
    """batch_expire_guaranteed: end the windows of these prefixes. Answer: `Expired`. Unknown ids count as zero."""

    prefix_ids: list[bytes]
    mode: ExpireMode = ExpireMode.EXPIRE
    dry_run: bool = False


class Renew(Body, frozen=True, tag="renew"):
    """Extend the open windows of one prefix to now + ttl. Answer: `Expired` with the counts of what was extended."""

    prefix_id: bytes
    ttl_ms: int


class Remove(Body, frozen=True, tag="remove"):
    """Remove objects from every tier. Answer: `Ended`. Refused in an open window or under a lease unless `force`."""

    keys: list[bytes]
    force: bool = False


class Clear(Body, frozen=True, tag="clear"):
    """Remove all objects whose key starts with `key_prefix`, sparing open windows unless `force`. Answer: `Expired`."""

    key_prefix: bytes
    force: bool = False


class BatchEvict(Body, frozen=True, tag="evict"):
    """Evict at least `bytes`, or nothing. Answer: `Expired` (zero blocks: not that much is evictable)."""

    bytes: int


class ListPrefixes(Body, frozen=True, tag="prefixes"):
    """Live prefixes in order of id. Answer: `Prefixes`. `after`: the last id of the page before."""

    prefix_ids: list[bytes] = []  # empty: all
    label: str = ""
    after: bytes = b""
    limit: int = 1000


class Report(Body, frozen=True, tag="report"):
    """What the requests that carried this `report` token achieved. Answer: `Reported`."""

    report: bytes


class Stats(Body, frozen=True, tag="stats"):
    """Answer: `StatsReply`."""


class Story(Body, frozen=True, tag="story"):
    """All that happened to a key, oldest first, as far as it is kept. Answer: `Stories`."""

    key: bytes


class Check(Body, frozen=True, tag="check"):
    """Check every invariant on the live state. Answer: `Checked`."""


RequestBody: TypeAlias = (
    Hello | Bye | Ping | PutStart | PutEnd | PutRevoke | GetReplicas | Exists | Release | Protect
    | ExpireGuaranteed | Renew | Remove | Clear | BatchEvict | ListPrefixes | Report | Stats | Story | Check
)  # fmt: skip


# --- replies --------------------------------------------------------------------------------------------------------


class Failure(Body, frozen=True, tag="failure"):
    code: ErrorCode
    message: str


class Welcome(Body, frozen=True, tag="welcome"):
    epoch: int
    segment: SegmentInfo
    put_timeout_ms: int  # a put not ended by then is lost: writers must stop before
    lease_ms_max: int
    ttl_ms_max: int
    heartbeat_ms: int  # a client silent for several of these is taken for gone
    protocol: int = PROTOCOL_VERSION


class Done(Body, frozen=True, tag="done"):
    pass


class PutStarted(Body, frozen=True, tag="put_started"):
    """Three lists parallel to the items. An offset counts only where the status is WRITE (else -1)."""

    statuses: list[PutStatus]
    offsets: list[int]
    grants: list[Grant]


class Ended(Body, frozen=True, tag="ended"):
    statuses: list[EndStatus]


class Replicas(Body, frozen=True, tag="replicas"):
    """Parallel to the keys: offset -1 and size 0 = a miss. `lease_id` 0: no hit, so no lease. The lease counts from
    when the client *sent* the request.
    """

    offsets: list[int]
    sizes: list[int]
    lease_id: int
    lease_ms: int
    grants: list[Grant]  # empty without marks; RENEWED or NONE


class Found(Body, frozen=True, tag="found"):
    found: list[bool]


class Protected(Body, frozen=True, tag="protected"):
    grants: list[Grant]


class Expired(Body, frozen=True, tag="expired"):
    """How many were affected. `memory_*`: what lies in the memory tier, `ssd_*`: on SSD."""

    prefixes: int
    memory_blocks: int
    memory_bytes: int
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    kept_blocks: int = 0  # spared, because another prefix holds them or a window is open


class Prefixes(Body, frozen=True, tag="prefix_list"):
    prefixes: list[PrefixInfo]
    total: int


class Reported(Body, frozen=True, tag="reported"):
    """`known` False: nothing was recorded under the token (yet)."""

    known: bool
    marks: list[MarkReport]


class StatsReply(Body, frozen=True, tag="stats_reply"):
    """Gauges and counters by name; the names are listed in docs/PROTOCOL.md."""

    values: dict[str, int]


class Stories(Body, frozen=True, tag="stories"):
    lines: list[StoryLine]


class Checked(Body, frozen=True, tag="checked"):
    violations: list[str]


ReplyBody: TypeAlias = (
    Failure | Welcome | Done | PutStarted | Ended | Replicas | Found | Protected | Expired | Prefixes
    | Reported | StatsReply | Stories | Checked
)  # fmt: skip


# --- envelopes ------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, array_like=True):
    request_id: int
    epoch: int  # 0 in Hello
    body: RequestBody
    released_leases: list[int] = []


class Response(msgspec.Struct, frozen=True, array_like=True):
    request_id: int
    epoch: int
    body: ReplyBody


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_response = msgspec.msgpack.Decoder(Response).decode
