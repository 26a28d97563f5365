"""The one client of a kvpin master: for applications, and under the engine adapters.

    with Client() as client:                       # starts a master on this host if there is none
        client.put("prompt-7", data, guaranteed_ttl_ms=60_000)
        client.get("prompt-7")
        client.expire("prompt-7")

Nothing waits for the master without a deadline. If it's gone, calls raise `Unavailable` at once, and the client finds
it again by itself. Misses, full pools and refused guarantees are results, not exceptions.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvpin.base_client import BaseClient, Io
from kvpin.calls import PendingCall, expect
from kvpin.guarantee import Guarantee, prefix_id_of
from kvpin.limits import BATCH_KEYS_MAX, LIST_LIMIT_MAX, PIPELINED_BATCHES_MAX, PREFIXES_MAX
from kvpin.protocol import (
    Ended,
    EndStatus,
    Exists,
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    Found,
    Grant,
    ListPrefixes,
    Prefixes,
    PrefixInfo,
    Protect,
    Protected,
    Remove,
    ReplyBody,
    RequestBody,
    Stats,
    StatsReply,
)
from kvpin.writer import PutOptions, PutOutcome, PutResult

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Client", "Key", "PendingCall", "PutOutcome", "PutResult"]

Key = str | bytes
"""Of an object: 1 to 256 bytes; a str stands for its UTF-8."""


class Client(BaseClient):
    """A connection to one master, for any number of threads. It connects, and reconnects, in the background.

    `address`: "ipc:///path" or "tcp://host:port"; None: `config.address`, else this user's master on this host, which
    is started if there is none (see `ClientConfig.embedded`). `config` None: the defaults and `KVPIN_*`.
    `writer`: this process itself writes into ranges that are granted; False if others write for it.
    Raises ConfigError. All methods that ask the master raise Unavailable (CallTimeout, EpochChanged) if there is no
    answer by `config.call_timeout_ms`, and ProtocolError if it refuses the request. Sizes are in bytes, times in ms.
    """

    # --- objects ----------------------------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        data: "Buffer",
        *,
        guaranteed_ttl_ms: int = 0,
        prefix: str | bytes | None = None,
        soft_pin: bool = False,
        replace: bool = False,
        cache: str = "",
    ) -> PutOutcome:
        """Store one object. See `put_from`."""
        (outcome,) = self.put_from(
            [key], [data], guaranteed_ttl_ms=guaranteed_ttl_ms, prefix=prefix, soft_pin=soft_pin, replace=replace,
            cache=cache,
        )  # fmt: skip
        return outcome

    def put_from(
        self,
        keys: Sequence[Key],
        buffers: Sequence["Buffer"],
        *,
        guaranteed_ttl_ms: int = 0,
        prefix: str | bytes | None = None,
        soft_pin: bool = False,
        replace: bool = False,
        cache: str = "",
    ) -> list[PutOutcome]:
        """Store buffers (anything with contiguous bytes) as objects, copied straight into the shared memory.

        `guaranteed_ttl_ms`: guarantee the objects for so long from when they're readable, those that exist already from
        now; `prefix` (a name, or an id of 16 bytes) holds the guarantee and can be expired; None: each object's own,
        named like its key. `soft_pin`: evicted after all that isn't. `replace`: write over an existing object, unless
        it's guaranteed. `cache`: whose quota counts.

        Raises ValueError for buffers that don't fit the call. If the master is lost on the way, some may be stored.
        """
        io = self._asking()
        guarantee = Guarantee(guaranteed_ttl_ms, prefix)
        return io.writer.write(_encoded(keys), buffers, PutOptions(guarantee, soft_pin, replace, cache))

    def get(self, key: Key, *, guaranteed_ttl_ms: int = 0, prefix: str | bytes | None = None) -> bytes | None:
        """A copy of an object, or None. For large ones `get_into` is faster, and lets other threads run.

        `guaranteed_ttl_ms` renews the guarantee that `prefix` (None: named like the key) holds, if it's still open.
        """
        (encoded,) = _encoded([key])
        return self._asking().reader.read(encoded, Guarantee(guaranteed_ttl_ms, prefix))

    def get_into(self, keys: Sequence[Key], buffers: Sequence["Buffer"]) -> list[int | None]:
        """Copy objects into writable buffers: the size of each, None for a miss.

        Raises ValueError for a buffer that is read-only, not contiguous, or smaller than its object.
        """
        return self._asking().reader.read_into(_encoded(keys), buffers)

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Which objects are there. Changes nothing: neither recency nor any guarantee."""
        encoded = _encoded(keys)
        batches = range(0, len(encoded), BATCH_KEYS_MAX)
        replies = self._ask_all(Exists(encoded[start : start + BATCH_KEYS_MAX]) for start in batches)
        return [found for reply in replies for found in expect(reply, Found).found]

    def protect(self, keys: Sequence[Key], ttl_ms: int, prefix: str | bytes | None = None) -> list[Grant]:
        """Guarantee objects that exist, for `ttl_ms` from now; or renew that. A missing one is a GAP.

        `prefix` holds the guarantee; None: each object's own, named like its key.
        """
        if ttl_ms <= 0:
            raise ValueError(f"ttl_ms = {ttl_ms}: give 1 or more")
        encoded = _encoded(keys)
        batches = Guarantee(ttl_ms, prefix).batches(encoded)
        replies = self._ask_all(Protect(encoded[part], [0] * len(encoded[part]), marks) for part, marks in batches)
        return [grant for reply in replies for grant in expect(reply, Protected).grants]

    def expire(self, prefix: str | bytes, mode: ExpireMode = ExpireMode.EXPIRE, *, dry_run: bool = False) -> Expired:
        """End a prefix's guarantee now; `mode` says what becomes of the objects. The counts of what was affected.

        A prefix that isn't there counts zero.
        """
        return expect(self.call(ExpireGuaranteed([prefix_id_of(prefix)], mode, dry_run)), Expired)

    def remove(self, keys: Sequence[Key], force: bool = False) -> list[EndStatus]:
        """Remove objects. What is guaranteed or being read stays, and the status says so, unless `force`."""
        encoded = _encoded(keys)
        batches = range(0, len(encoded), BATCH_KEYS_MAX)
        replies = self._ask_all(Remove(encoded[start : start + BATCH_KEYS_MAX], force) for start in batches)
        return [status for reply in replies for status in expect(reply, Ended).statuses]

    def prefixes(self, prefix: str | bytes | None = None, *, label: str = "") -> list[PrefixInfo]:
        """The live prefixes, by id: all of them, one, or those with a label."""
        wanted = [] if prefix is None else [prefix_id_of(prefix)]
        found: list[PrefixInfo] = []
        for _ in range(PREFIXES_MAX // LIST_LIMIT_MAX + 1):
            after = found[-1].prefix_id if found else b""
            page = expect(self.call(ListPrefixes(wanted, label, after)), Prefixes).prefixes
            found += page
            if len(page) < LIST_LIMIT_MAX:
                break
        return found

    def stats(self) -> dict[str, int]:
        """The master's gauges and counters by name."""
        return expect(self.call(Stats()), StatsReply).values

    # --- inside -----------------------------------------------------------------------------------------------------

    def _asking(self) -> Io:
        io = self._live()
        io.connection.wait_verdict()
        return io

    def _ask_all(self, bodies: Iterable[RequestBody]) -> list[ReplyBody]:
        """Many requests, some of them under way at a time. Raises what the first that fails raises."""
        connection = self._asking().connection
        rest = iter(bodies)
        replies: list[ReplyBody] = []
        while calls := [connection.submit(body) for body in islice(rest, PIPELINED_BATCHES_MAX)]:
            replies += [call.wait(self.config.call_timeout_ms) for call in calls]
        return replies


def _encoded(keys: Sequence[Key]) -> list[bytes]:
    if isinstance(keys, str | bytes):
        raise ValueError(f"give a list of keys, not the single key {keys!r}")
    return [key if type(key) is bytes else key.encode() if isinstance(key, str) else bytes(key) for key in keys]
