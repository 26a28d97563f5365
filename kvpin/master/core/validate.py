"""What may be wrong with a well-formed message. Each check answers None, or a text that says what to do.

A message that fails here has changed nothing.
"""

from collections.abc import Sequence

from kvpin.keys import PREFIX_ID_BYTES
from kvpin.limits import (
    BATCH_KEYS_MAX,
    KEY_BYTES_MAX,
    LABEL_BYTES_MAX,
    LIST_LIMIT_MAX,
    MARKS_MAX,
    NAME_BYTES_MAX,
    OBJECT_BYTES_MAX,
    REPORT_BYTES_MAX,
)
from kvpin.master.core.config import CoreConfig
from kvpin.master.core.types import NO_GAP
from kvpin.protocol import (
    BatchEvict,
    Clear,
    Exists,
    ExpireGuaranteed,
    GetReplicas,
    ListPrefixes,
    Mark,
    Protect,
    PutEnd,
    PutRevoke,
    PutStart,
    Release,
    Remove,
    Renew,
    Report,
    Story,
)

Fault = str | None


def _batch(number: int, what: str) -> Fault:
    return f"{number} {what}: send at most {BATCH_KEYS_MAX} in a batch" if number > BATCH_KEYS_MAX else None


def _keys(keys: Sequence[bytes]) -> Fault:
    if not keys:
        return None
    if len(keys) > BATCH_KEYS_MAX:
        return _batch(len(keys), "keys")
    lengths = set(map(len, keys))
    if not min(lengths) or max(lengths) > KEY_BYTES_MAX:
        return f"a key has {max(lengths) if min(lengths) else 0} bytes: give 1 to {KEY_BYTES_MAX}"
    if len(set(keys)) != len(keys):
        return "a key is there twice: send each key of a batch once"
    return None


def _end_tokens(end_tokens: Sequence[int], keys: Sequence[bytes]) -> Fault:
    if len(end_tokens) != len(keys):
        return f"{len(end_tokens)} end_tokens for {len(keys)} keys: give one for each key"
    return _tokens(end_tokens)


def _tokens(end_tokens: Sequence[int]) -> Fault:
    if end_tokens and not 0 <= min(end_tokens) <= max(end_tokens) < NO_GAP:
        return f"end_tokens from {min(end_tokens)} to {max(end_tokens)}: give 0 to {NO_GAP - 1}"
    return None


def _ttl(config: CoreConfig, ttl_ms: int) -> Fault:
    if not 0 < ttl_ms <= config.ttl_ms_max:
        return f"ttl_ms = {ttl_ms}: give 1 to {config.ttl_ms_max}"
    return None


def _prefix_ids(prefix_ids: Sequence[bytes]) -> Fault:
    for prefix_id in prefix_ids:
        if len(prefix_id) != PREFIX_ID_BYTES:
            return f"a prefix id has {len(prefix_id)} bytes: give {PREFIX_ID_BYTES} (see kvpin.keys)"
    if len(set(prefix_ids)) != len(prefix_ids):
        return "a prefix id is there twice: give each once"
    return _batch(len(prefix_ids), "prefix ids")


def _marks(config: CoreConfig, marks: Sequence[Mark]) -> Fault:
    if not marks:
        return None
    if len(marks) > MARKS_MAX:
        return f"{len(marks)} marks: send at most {MARKS_MAX}"
    for mark in marks:
        if len(mark.label.encode(errors="replace")) > LABEL_BYTES_MAX:
            return f"a label has over {LABEL_BYTES_MAX} bytes: shorten it"
        fault = _ttl(config, mark.ttl_ms)
        if fault:
            return fault
    return _tokens([mark.end_token for mark in marks]) or _prefix_ids([mark.prefix_id for mark in marks])


def _report(report: bytes) -> Fault:
    if len(report) > REPORT_BYTES_MAX:
        return f"a report token of {len(report)} bytes: give at most {REPORT_BYTES_MAX}"
    return None


def put_start(config: CoreConfig, body: PutStart) -> Fault:
    items = body.items
    fault = _keys([item.key for item in items]) or _tokens([item.end_token for item in items])
    if fault:
        return fault
    if items:
        sizes = [item.size_bytes for item in items]
        most_bytes = min(OBJECT_BYTES_MAX, config.pool_bytes)
        if min(sizes) <= 0 or max(sizes) > most_bytes:
            return f"sizes from {min(sizes)} to {max(sizes)} bytes: give 1 to {most_bytes}"
    if len(body.cache.encode(errors="replace")) > NAME_BYTES_MAX:
        return f"a cache id has over {NAME_BYTES_MAX} bytes: shorten it"
    return _marks(config, body.marks) or _report(body.report)


def keys_only(config: CoreConfig, body: PutEnd | PutRevoke | Exists | Remove) -> Fault:
    return _keys(body.keys)


def get_replicas(config: CoreConfig, body: GetReplicas) -> Fault:
    fault = _keys(body.keys)
    if fault:
        return fault
    if body.lease_ms <= 0:
        return f"lease_ms = {body.lease_ms}: give 1 to {config.lease_ms_max}"
    if body.marks or body.end_tokens:
        fault = _end_tokens(body.end_tokens, body.keys)
    return fault or _marks(config, body.marks) or _report(body.report)


def release(config: CoreConfig, body: Release) -> Fault:
    return _batch(len(body.lease_ids), "lease ids")


def protect(config: CoreConfig, body: Protect) -> Fault:
    return (
        _keys(body.keys)
        or _end_tokens(body.end_tokens, body.keys)
        or _marks(config, body.marks)
        or _report(body.report)
    )


def expire(config: CoreConfig, body: ExpireGuaranteed) -> Fault:
    return _prefix_ids(body.prefix_ids)


def renew(config: CoreConfig, body: Renew) -> Fault:
    return _prefix_ids([body.prefix_id]) or _ttl(config, body.ttl_ms)


def clear(config: CoreConfig, body: Clear) -> Fault:
    if len(body.key_prefix) > KEY_BYTES_MAX:
        return f"a key prefix of {len(body.key_prefix)} bytes: give at most {KEY_BYTES_MAX}"
    return None


def evict(config: CoreConfig, body: BatchEvict) -> Fault:
    return None if body.bytes > 0 else f"bytes = {body.bytes}: give 1 or more"


def list_prefixes(config: CoreConfig, body: ListPrefixes) -> Fault:
    if not 0 < body.limit <= LIST_LIMIT_MAX:
        return f"limit = {body.limit}: give 1 to {LIST_LIMIT_MAX}"
    return _prefix_ids(body.prefix_ids)


def report(config: CoreConfig, body: Report) -> Fault:
    return _report(body.report) if body.report else "an empty report token: give the one that the request carried"


def story(config: CoreConfig, body: Story) -> Fault:
    return _keys([body.key])


def nothing(config: CoreConfig, body: object) -> Fault:
    """For messages that carry nothing that could be wrong."""
    return None
