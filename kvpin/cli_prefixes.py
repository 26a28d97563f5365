"""Commands about guaranteed prefixes: prefixes, evict, renew."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvpin import protocol
from kvpin.cli_inspect import Address, Json
from kvpin.cli_output import (
    connected,
    duration_text,
    fields,
    out,
    parse_prefix_id,
    show_json,
    show_table,
    size_text,
    table,
)
from kvpin.errors import ConfigError
from kvpin.limits import LIST_LIMIT_MAX, PREFIXES_MAX
from kvpin.protocol import Expired, ExpireMode, PrefixInfo

if TYPE_CHECKING:
    from kvpin.client import Client

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="PREFIX...", help="Ids in hex, as `kvpin prefixes` shows, or name:NAME.")
]


def register(app: typer.Typer) -> None:
    for command in (prefixes, evict, renew):
        app.command()(command)


def prefixes(
    label: Annotated[str, typer.Option("--label", help="Only those with this label.")] = "",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """List the prefixes under guarantee: how much of each is covered and for how long.

    \b
    Examples:
      kvpin prefixes
      kvpin prefixes --label rag --json
    """
    with connected(address) as client:
        listed = list(_listed(client, label))
    if as_json:
        show_json([fields(info) for info in listed])
        return
    shown = table("prefix", "label", "tenant", "#tokens", "#covered", "#blocks", "#size", "#remaining", "#renewals")
    for info in listed:
        shown.add_row(
            info.prefix_id.hex(), escape(info.label), escape(info.tenant), str(info.end_token),
            str(info.covered_tokens), str(info.blocks), size_text(info.bytes),
            duration_text(info.remaining_ms), str(info.renewals),
        )  # fmt: skip
    show_table(shown)


def evict(
    prefix: Ids = None,
    label: Annotated[str, typer.Option("--label", help="All prefixes with this label.")] = "",
    every: Annotated[bool, typer.Option("--all", help="All prefixes.")] = False,
    mode: Annotated[
        ExpireMode,
        typer.Option(
            help="expire: end the guarantee, keep the data as ordinary objects. delete: remove the data too, except "
            "what another prefix holds. all_holders: end every prefix's guarantee on these blocks."
        ),
    ] = ExpireMode.EXPIRE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """End guarantees before their time: a wrong document, a new system prompt.

    \b
    Examples:
      kvpin evict 5d41402abc4b2a76b9719d911017c592
      kvpin evict --label rag --mode delete
      kvpin evict --all --dry-run
    """
    if bool(prefix) + bool(label) + every != 1:
        raise ConfigError("evict: give prefix ids, or --label, or --all")
    ids = [parse_prefix_id(text) for text in prefix or []]
    with connected(address) as client:
        ids = ids or [info.prefix_id for info in _listed(client, label)]
        if not dry_run and not yes:
            _confirm(_expire(client, ids, mode, dry_run=True), mode)
        done = _expire(client, ids, mode, dry_run)
    if as_json:
        show_json({"mode": mode, "dry_run": dry_run, **fields(done)})
        return
    out.print(f"{'would affect' if dry_run else 'affected'} {_counts(done)}")


def renew(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Id in hex, or name:NAME.")],
    ttl: Annotated[int, typer.Option("--ttl-s", min=1, help="The open windows last so long from now, at least.")],
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Lengthen the open windows of one prefix; what has lapsed isn't opened again.

    \b
    Examples:
      kvpin renew 5d41402abc4b2a76b9719d911017c592 --ttl-s 3600
    """
    prefix_id = parse_prefix_id(prefix)
    with connected(address) as client:
        reply = client.call(protocol.Renew(prefix_id, ttl * 1000))
    assert isinstance(reply, Expired)
    if as_json:
        show_json(fields(reply))
        return
    out.print(f"renewed {_counts(reply)}")


def _listed(client: "Client", label: str) -> Iterator[PrefixInfo]:
    """All prefixes (of the label), page by page."""
    after = b""
    for _ in range(PREFIXES_MAX // LIST_LIMIT_MAX + 1):
        reply = client.call(protocol.ListPrefixes(label=label, after=after, limit=LIST_LIMIT_MAX))
        assert isinstance(reply, protocol.Prefixes)
        yield from reply.prefixes
        if len(reply.prefixes) < LIST_LIMIT_MAX:
            return
        after = reply.prefixes[-1].prefix_id


def _expire(client: "Client", ids: list[bytes], mode: ExpireMode, dry_run: bool) -> Expired:
    """Expire them in batches, and add the counts up."""
    total = Expired(0, 0, 0)
    for start in range(0, len(ids), LIST_LIMIT_MAX):
        reply = client.call(protocol.ExpireGuaranteed(ids[start : start + LIST_LIMIT_MAX], mode, dry_run))
        assert isinstance(reply, Expired)
        names = Expired.__struct_fields__
        total = Expired(**{name: getattr(total, name) + getattr(reply, name) for name in names})
    return total


def _confirm(preview: Expired, mode: ExpireMode) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("evict: nobody is there to ask; add --yes, or --dry-run to look first")
    typer.confirm(f"{mode.value}: this affects {_counts(preview)}. Go on?", abort=True, err=True)


def _counts(done: Expired) -> str:
    text = f"{done.prefixes} prefixes, {done.memory_blocks} blocks ({size_text(done.memory_bytes)}) in memory"
    if done.ssd_blocks:
        text += f", {done.ssd_blocks} blocks ({size_text(done.ssd_bytes)}) on SSD"
    return text + (f"; {done.kept_blocks} blocks kept" if done.kept_blocks else "")
