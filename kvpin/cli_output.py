"""What every command shares: exit codes, where text goes, how a master is reached, how values are shown."""

import contextlib
import enum
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpin.config import client_config
from kvpin.errors import ConfigError, KvpinError, MasterBusy, Unavailable
from kvpin.keys import PREFIX_ID_BYTES, named_prefix_id

if TYPE_CHECKING:
    from kvpin.client import Client

# Long lines go to pipes whole: scripts read them.
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

TABLE_WIDTH_MAX = 1000  # characters; labels have at most 200 bytes


class Exit(enum.IntEnum):
    """The exit codes of `kvpin`."""

    OK = 0
    FAILURE = 1  # it failed, or a check found something
    USAGE = 2  # wrong usage or settings
    BUSY = 3  # another master owns the pool
    UNREACHABLE = 4  # no master answers


def exit_code(error: KvpinError) -> Exit:
    match error:
        case ConfigError():
            return Exit.USAGE
        case MasterBusy():
            return Exit.BUSY
        case Unavailable():
            return Exit.UNREACHABLE
        case _:
            return Exit.FAILURE


@contextlib.contextmanager
def connected(address: str | None) -> "Iterator[Client]":
    """A client of a master that is there already. Raises Unavailable if none answers."""
    from kvpin.client import Client  # lazily: `kvpin --help` opens no socket

    overrides: dict[str, Any] = {"embedded": False}
    if address is not None:
        overrides["address"] = address
    config = client_config(overrides)
    with contextlib.closing(Client(config=config, name="cli", writer=False)) as client:
        if not client.wait_ready(config.connect_timeout_ms):
            where = config.address or f"pool {config.pool!r} on this host"
            raise Unavailable(f"no master answers at {where}: start one with `kvpin master`, or give --address")
        yield client


def parse_prefix_id(text: str) -> bytes:
    """A prefix id from its hex form or from `name:NAME`. Raises ConfigError."""
    if text.startswith("name:"):
        return named_prefix_id(text.removeprefix("name:"))
    raw = parse_hex(text, "prefix id")
    if len(raw) != PREFIX_ID_BYTES:
        raise ConfigError(f"prefix id {text!r}: give {2 * PREFIX_ID_BYTES} hex digits, as `kvpin prefixes` shows them")
    return raw


def parse_hex(text: str, what: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{what} {text!r} is not hexadecimal") from None


def fields(struct: msgspec.Struct) -> dict[str, Any]:
    """A message as a dict that JSON can hold: bytes in hex."""
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


def show_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def show_error(text: str) -> None:
    err.print(f"[bold red]kvpin:[/] {escape(text)}")


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; columns whose name begins with '#' are numbers."""
    made = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.lstrip("#"), justify="right" if column.startswith("#") else "left", no_wrap=True)
    return made


def show_table(shown: Table) -> None:
    """As wide as it needs to be: an id cut to the terminal's width is of no use."""
    width = out.measure(shown, options=out.options.update(width=TABLE_WIDTH_MAX)).maximum
    Console(highlight=False, soft_wrap=True, width=width).print(shown)


def size_text(size_bytes: int) -> str:
    """1234567 -> 1.2 MiB."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration_text(duration_ms: int) -> str:
    """3723000 -> 1h02m03s."""
    seconds = max(0, duration_ms) // 1000
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    if hours:
        return f"{hours}h{minutes:02d}m{seconds:02d}s"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
