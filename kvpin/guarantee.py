"""What an application asks for when it wants objects guaranteed: a ttl, and the prefix that holds the windows."""

from collections.abc import Iterator, Sequence

import msgspec

from kvpin.keys import PREFIX_ID_BYTES, named_prefix_id
from kvpin.limits import BATCH_KEYS_MAX, LABEL_BYTES_MAX
from kvpin.protocol import Mark


def prefix_id_of(prefix: str | bytes) -> bytes:
    """The id of a prefix given by name (str) or by its id (bytes). Raises ValueError for an id of wrong length."""
    if isinstance(prefix, str):
        return named_prefix_id(prefix)
    if len(prefix) != PREFIX_ID_BYTES:
        raise ValueError(f"a prefix id has {len(prefix)} bytes: give {PREFIX_ID_BYTES}, or the prefix's name as str")
    return prefix


class Guarantee(msgspec.Struct, frozen=True):
    """`ttl_ms` 0: none is asked for. `prefix` None: each key is held by a prefix that is named after it."""

    ttl_ms: int = 0
    prefix: str | bytes | None = None

    def batches(self, keys: Sequence[bytes]) -> Iterator[tuple[slice, list[Mark]]]:
        """The keys in messages, each with its marks. A mark covers a whole message, so own prefixes mean own messages.

        Raises ValueError for a negative ttl, or a prefix without one.
        """
        self.check()
        alone = self.ttl_ms > 0 and self.prefix is None
        step = 1 if alone else BATCH_KEYS_MAX
        for start in range(0, len(keys), step):
            yield slice(start, start + step), self.marks(keys[start])

    def marks(self, key: bytes) -> list[Mark]:
        """The mark for a message that begins with `key`. It has no tokens: all its objects end at token 0."""
        if not self.ttl_ms:
            return []
        prefix = key if self.prefix is None else self.prefix
        if self.prefix is None:
            return [Mark(named_prefix_id(key), 0, self.ttl_ms, _label(key))]
        label = _label(prefix.encode()) if isinstance(prefix, str) else ""
        return [Mark(prefix_id_of(prefix), 0, self.ttl_ms, label)]

    def check(self) -> None:
        if self.ttl_ms < 0:
            raise ValueError(f"guaranteed ttl {self.ttl_ms} ms: give 1 or more, or 0 for no guarantee")
        if self.prefix is not None and not self.ttl_ms:
            raise ValueError(f"prefix {self.prefix!r} without a ttl does nothing: give the guaranteed ttl in ms")


def _label(name: bytes) -> str:
    return name[:LABEL_BYTES_MAX].decode(errors="ignore")
