"""The signed side field: what the HTTP middleware tells the engine's adapter about one request.

It travels inside the engine's own per-request parameters, which a client can also send. So it carries an HMAC made
with a key that only processes of this user can read; a field that isn't signed with it is ignored.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from kvpin import limits
from kvpin.errors import ConfigError
from kvpin.keys import PREFIX_ID_BYTES

FIELD = "kvpin"
KEY_FILE = "side_field.key"
KEY_BYTES = 32


class MarkedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One marked breakpoint of a request. `id`: its prefix id in hex; `end_token` is floored to a block."""

    id: str
    end_token: int
    ttl_ms: int
    label: str = ""


class SideField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`report`: a token in hex under which the master keeps what the request achieved; empty = keep nothing."""

    prefixes: list[MarkedPrefix]
    report: str = ""
    signature: str = ""


def sign(field: SideField, key: bytes) -> dict[str, object]:
    """The field as plain JSON-able data, with its signature."""
    signed = msgspec.structs.replace(field, signature=_signature(field, key))
    plain: dict[str, object] = msgspec.to_builtins(signed)
    return plain


def verify(raw: object, key: bytes) -> SideField | None:
    """The field, or None if it's absent, malformed, over a limit or not signed with `key`. Never raises."""
    try:
        field = msgspec.convert(raw, SideField, strict=True)
        if len(field.prefixes) > limits.MARKS_MAX or len(bytes.fromhex(field.report)) > limits.REPORT_BYTES_MAX:
            return None
        if any(len(bytes.fromhex(prefix.id)) != PREFIX_ID_BYTES for prefix in field.prefixes):
            return None
        genuine = hmac.compare_digest(field.signature.encode(), _signature(field, key).encode())
    except (msgspec.ValidationError, ValueError):
        return None
    return field if genuine else None


def load_key(run_dir: Path) -> bytes:
    """The signing key of this user's run directory (absolute path), made by whoever needs it first.

    Raises ConfigError if the file can't be read or made, or isn't a key.
    """
    path = Path(run_dir) / KEY_FILE
    try:
        if not path.exists():
            _create_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read or make the side field key {path}: {error}") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(key)} bytes, not {KEY_BYTES}: remove it and start again")
    return key


def _create_key(path: Path) -> None:
    # Written beside and then linked: the name appears with all its bytes or not at all, and only once.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, secrets.token_bytes(KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        os.close(handle)
        draft.unlink()


def _signature(field: SideField, key: bytes) -> str:
    unsigned = msgspec.structs.replace(field, signature="")
    return hmac.new(key, msgspec.json.encode(unsigned), hashlib.sha256).hexdigest()
