"""Objects out of the segment: ask where they lie, copy under the lease, look at the clock again.

The lease counts from when the request was sent. What was copied after its end may be somebody else's bytes by now: it
is a miss.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpin.calls import expect
from kvpin.connection import Connection
from kvpin.copying import copy_bytes, flat
from kvpin.errors import Unavailable
from kvpin.guarantee import Guarantee
from kvpin.limits import BATCH_KEYS_MAX, CLOCK_MARGIN_MS
from kvpin.mapping import Mapping
from kvpin.protocol import GetReplicas, Mark, Replicas

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Reader:
    """`clock` (monotonic seconds) and `copy` (target, source) are arguments, so that a test can be slow."""

    def __init__(
        self,
        connection: Connection,
        mapping: Mapping,
        clock: Callable[[], float] = time.monotonic,
        copy: Callable[[memoryview, memoryview], None] = copy_bytes,
    ) -> None:
        self._connection = connection
        self._mapping = mapping
        self._clock = clock
        self._copy = copy

    def read(self, key: bytes, guarantee: Guarantee) -> bytes | None:
        """A copy of one object, None for a miss."""
        guarantee.check()
        copies: list[bytes] = []
        trusted = self._under_lease([key], guarantee.marks(key), lambda _, view: copies.append(bytes(view)))
        return copies[0] if copies and trusted else None

    def read_into(self, keys: Sequence[bytes], buffers: Sequence["Buffer"]) -> list[int | None]:
        """What was copied into each buffer, in bytes; None for a miss.

        Raises ValueError for a buffer that is read-only, not contiguous, or smaller than its object.
        """
        targets = [flat(buffer, f"buffer {index}") for index, buffer in enumerate(buffers)]
        if len(targets) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(targets)} buffers: give one buffer for each key")
        if any(target.readonly for target in targets):
            raise ValueError("a buffer is read-only: give writable ones")
        sizes: list[int | None] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            stop = start + BATCH_KEYS_MAX
            sizes += self._read_batch(keys[start:stop], targets[start:stop])
        return sizes

    def _read_batch(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int | None]:
        sizes: list[int | None] = [None] * len(keys)

        def take(index: int, view: memoryview) -> None:
            target = targets[index]
            if view.nbytes > target.nbytes:
                raise ValueError(f"object {keys[index]!r} has {view.nbytes} bytes, its buffer only {target.nbytes}")
            self._copy(target, view)
            sizes[index] = view.nbytes

        trusted = self._under_lease(keys, [], take)
        sizes[trusted:] = [None] * (len(keys) - trusted)
        return sizes

    def _under_lease(self, keys: Sequence[bytes], marks: list[Mark], take: Callable[[int, memoryview], None]) -> int:
        """Take each hit, by index. How many of the keys, from the first on, were done before the lease ended."""
        connection = self._connection
        end_tokens = [0] * len(keys) if marks else []
        call = connection.submit(GetReplicas(list(keys), connection.config.lease_ms, marks, end_tokens))
        replicas = expect(call.wait(connection.config.call_timeout_ms), Replicas)
        if not replicas.lease_id or call.session is None:
            return len(keys)
        deadline_s = call.sent_s + (replicas.lease_ms - CLOCK_MARGIN_MS) / 1000
        try:
            views = self._mapping.views(call.session.welcome.segment, replicas.offsets, replicas.sizes)
            for index, view in enumerate(views):
                if replicas.offsets[index] < 0:
                    continue
                take(index, view)
                if connection.closing:  # Bye ends the lease
                    raise Unavailable("the client was closed during the copy")
                if self._clock() >= deadline_s:
                    connection.counters.add("leases_expired")
                    connection.warn("lease_expired", f"copying took longer than the lease of {replicas.lease_ms} ms")
                    return index
        finally:
            connection.release(replicas.lease_id)
        return len(keys)
