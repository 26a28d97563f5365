"""Commands that look and change nothing: status, story, check."""

from typing import Annotated

import typer
from rich.markup import escape

from kvpin import protocol
from kvpin.cli_output import (
    Exit,
    connected,
    duration_text,
    fields,
    out,
    parse_hex,
    show_json,
    show_table,
    size_text,
    table,
)

CHECK_TIMEOUT_MS = 60_000

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Of the master; also $KVPIN_ADDRESS. Default: this host's.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def register(app: typer.Typer) -> None:
    for command in (status, story, check):
        app.command()(command)


def status(address: Address = None, as_json: Json = False) -> None:
    """Show how full the pool is, what is guaranteed, and every counter.

    \b
    Examples:
      kvpin status
      kvpin status --json --address ipc:///run/kvpin/default.sock
    """
    with connected(address) as client:
        values = client.stats()
        segment = client.segment
    if as_json:
        show_json({"segment": fields(segment) if segment else None, "values": values})
        return
    pool_bytes = max(1, values["pool_bytes"])
    head = table("", "", "")
    head.add_row("epoch", str(values["server_epoch"]), f"pid {values['server_pid']}")
    head.add_row("up", duration_text(values["server_uptime_ms"]), f"{values['server_sessions']} clients")
    for name in ("object_bytes", "guaranteed_bytes", "guaranteed_limit_bytes", "quarantined_bytes", "free_bytes"):
        share = f"{100 * values[name] / pool_bytes:.1f}% of {size_text(pool_bytes)}"
        head.add_row(name.removesuffix("_bytes").replace("_", " "), size_text(values[name]), share)
    show_table(head)
    rest = table("counter", "#value")
    for name in sorted(values):
        rest.add_row(name, str(values[name]))
    out.print()
    show_table(rest)


def story(
    key: Annotated[str, typer.Argument(metavar="KEY_HEX", help="The object's key, in hex.")],
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Tell all that happened to a key, oldest first, as far as it is kept.

    \b
    Examples:
      kvpin story 6b7600a1b2c3...
    """
    raw = parse_hex(key, "key")
    with connected(address) as client:
        reply = client.call(protocol.Story(raw))
    assert isinstance(reply, protocol.Stories)
    if as_json:
        show_json([fields(line) for line in reply.lines])
        return
    if not reply.lines:
        out.print("nothing is known of this key")
    for line in reply.lines:
        out.print(f"{duration_text(line.age_ms):>10} ago  {escape(line.event)}")


def check(address: Address = None, as_json: Json = False) -> None:
    """Check every invariant on the live master; exit code 1 if one is broken.

    It looks at every object, so a large master answers nobody else for a moment.
    """
    with connected(address) as client:
        reply = client.call(protocol.Check(), timeout_ms=CHECK_TIMEOUT_MS)
    assert isinstance(reply, protocol.Checked)
    if as_json:
        show_json({"violations": reply.violations})
    elif reply.violations:
        for violation in reply.violations:
            out.print(escape(violation))
    else:
        out.print("all invariants hold")
    if reply.violations:
        raise typer.Exit(Exit.FAILURE)
