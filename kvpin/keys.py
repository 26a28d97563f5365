"""Keys of objects and ids of prefixes.

An object key is `cache id | NUL | namespace | engine block hash | group`. The namespace is a fingerprint of all that
must be equal for bytes to be interchangeable; the block hash is the engine's own chained hash, so a key stands for
its whole prefix. Hashes are SHA-256, never Python's `hash()`, which differs from process to process.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

KEY_FORMAT = 1  # part of every fingerprint: raise it when the bytes of an object change their meaning
KV_CACHE_ID = "kv"
NAMESPACE_BYTES = 16
PREFIX_ID_BYTES = 16


class KvKey(msgspec.Struct, frozen=True):
    """A decoded KV block key."""

    namespace: bytes
    block_hash: bytes
    group: int


def fingerprint(parts: Mapping[str, object]) -> bytes:
    """The 16-byte namespace of everything in `parts` (JSON-able; the order of the keys doesn't matter)."""
    text = msgspec.json.encode({**parts, "key_format": KEY_FORMAT}, order="sorted")
    return hashlib.sha256(text).digest()[:NAMESPACE_BYTES]


def kv_key(namespace: bytes, block_hash: bytes, group: int) -> bytes:
    """The key of one KV block (32-byte SHA-256 hash: 55 bytes)."""
    return b"%s\0%s%s%s" % (KV_CACHE_ID.encode(), namespace, block_hash, group.to_bytes(4, "big"))


def parse_kv_key(key: bytes) -> KvKey:
    """The parts of a key made by `kv_key`. Raises ValueError for other keys."""
    head = len(KV_CACHE_ID) + 1
    if key[:head] != KV_CACHE_ID.encode() + b"\0" or len(key) <= head + NAMESPACE_BYTES + 4:
        raise ValueError("not a KV block key")
    body = key[head:]
    return KvKey(body[:NAMESPACE_BYTES], body[NAMESPACE_BYTES:-4], int.from_bytes(body[-4:], "big"))


def kv_namespace_prefix(namespace: bytes) -> bytes:
    """What every KV key of the namespace starts with."""
    return KV_CACHE_ID.encode() + b"\0" + namespace


def named_prefix_id(name: str | bytes) -> bytes:
    """The id of a prefix that an application names itself. A str stands for its UTF-8."""
    raw = name.encode() if isinstance(name, str) else name
    return hashlib.sha256(b"name\0" + raw).digest()[:PREFIX_ID_BYTES]


def prefix_id(scope: str, token_ids: Sequence[int]) -> bytes:
    """The id of the prefix `token_ids` in `scope` (model, salt, tenant: whatever separates equal tokens)."""
    return prefix_ids(scope, token_ids, [len(token_ids)])[0]


def prefix_ids(scope: str, token_ids: Sequence[int], lengths: Iterable[int]) -> list[bytes]:
    """`prefix_id` of several leading lengths of `token_ids`, ascending, in one pass over the tokens."""
    chain = hashlib.sha256(b"tokens\0" + len(scope.encode()).to_bytes(4, "big") + scope.encode())
    ids: list[bytes] = []
    done = 0
    for length in lengths:
        if not done <= length <= len(token_ids):
            raise ValueError(f"lengths must ascend and stay within {len(token_ids)} tokens, not {length}")
        piece = array("I", token_ids[done:length])
        chain.update(piece.tobytes())
        done = length
        ids.append(chain.copy().digest()[:PREFIX_ID_BYTES])
    return ids
