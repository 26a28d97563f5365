"""`cache_control` markers in a raw request body: the breakpoints they ask for.

Markers are read from the JSON as sent, before the engine's own parsing can drop them. Lenient mode takes what it can
and says what it changed; strict mode refuses what the hosted API answers 400 to.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from kvpin.http.places import (
    MARKER,
    NATIVE_MARKER,
    NATIVE_OPTIONS,
    Dialect,
    Path,
    Place,
    Spot,
    last_block,
    spell,
    spots,
)
from kvpin.limits import BREAKPOINTS_MAX

TTL_DEFAULT_MS = 5 * 60_000
NATIVE_TTL_DEFAULT_MS = 30 * 60_000
_TTL = re.compile(r"([0-9]{1,9})([smh])")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}
_SECONDS_MAX = 10**9
_QUOTED_MAX = 40  # characters of a client's value in a note

Objection = Callable[[str], None]


class Breakpoint(msgspec.Struct, frozen=True):
    """One marked prefix: everything up to the end of the block at `path`."""

    path: Path
    place: Place
    ttl_ms: int


class Marked(msgspec.Struct, frozen=True):
    """`breakpoints` in render order; `markers` that were understood (two may mean one block); `notes` in words."""

    breakpoints: list[Breakpoint]
    markers: int
    notes: list[str]


class MarkerError(Exception):
    """Strict mode: the hosted API answers 400 to this. The text says what to change."""


def parse(dialect: Dialect, body: dict[str, Any], *, strict: bool, ttl_max_ms: int) -> Marked:
    """The breakpoints of a body. Raises MarkerError, in strict mode only."""
    notes: list[str] = []

    def objection(text: str) -> None:
        if strict:
            raise MarkerError(text)
        notes.append(text)

    reader = _Reader(dialect, body, ttl_max_ms, objection)
    for spot in spots(dialect, body):
        reader.take(spot)
    reader.take_automatic(body)
    breakpoints = list(reader.found.values())
    if len(breakpoints) > BREAKPOINTS_MAX:
        objection(f"at most {BREAKPOINTS_MAX} blocks may be marked, not {len(breakpoints)}: the last ones count")
        breakpoints = breakpoints[-BREAKPOINTS_MAX:]
    for earlier, later in itertools.pairwise(breakpoints):
        if earlier.ttl_ms < later.ttl_ms:
            objection(f"{spell(later.path)}: a longer ttl must not come after a shorter one ({spell(earlier.path)})")
    return Marked(breakpoints, reader.markers, notes)


def parse_ttl(ttl: object) -> int | None:
    """Milliseconds of "5m", "1h", "90s" or whole seconds; None for anything else."""
    if isinstance(ttl, int) and not isinstance(ttl, bool):
        return ttl * 1000 if 0 < ttl < _SECONDS_MAX else None
    matched = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    return (int(matched[1]) * _UNIT_MS[matched[2]] or None) if matched else None


class _Reader:
    """Collects breakpoints by the block that they mean."""

    def __init__(self, dialect: Dialect, body: dict[str, Any], ttl_max_ms: int, objection: Objection) -> None:
        self.found: dict[Path, Breakpoint] = {}
        self.markers = 0
        self._ttl_max_ms = ttl_max_ms
        self._objection = objection
        self._native_options = body.get(NATIVE_OPTIONS) if dialect is Dialect.OPENAI else None
        self._native = dialect is Dialect.OPENAI

    def take(self, spot: Spot) -> None:
        """Add the spot's breakpoint, if it carries a marker."""
        ttl_ms = None
        where = spell(spot.path) if spot.path else "messages"
        marked = spot.holder.get(MARKER) is not None
        native = self._native and spot.holder.get(NATIVE_MARKER) is not None
        if not marked and not native:
            return
        if spot.objection:
            self._objection(f"{where}: {spot.objection}")
            return
        ttl_ms = self._ttl_ms(spot.holder[MARKER], where) if marked else self._native_ttl_ms(where)
        if spot.path is not None and ttl_ms is not None:
            self._add(Breakpoint(spot.path, spot.place, ttl_ms))

    def take_automatic(self, body: dict[str, Any]) -> None:
        """The request's own marker means its last block that can carry one, and takes a slot."""
        if body.get(MARKER) is None or (ttl_ms := self._ttl_ms(body[MARKER], "request")) is None:
            return
        block = last_block(body)
        if block is None:
            return
        path, place = block
        before = self.found.get(path)
        if before is not None and before.ttl_ms != ttl_ms:
            self._objection(f"{spell(path)}: its ttl is not that of the request's own {MARKER}: the longer counts")
        self._add(Breakpoint(path, place, ttl_ms))

    def _add(self, mark: Breakpoint) -> None:
        self.markers += 1
        before = self.found.get(mark.path)
        if before is None or before.ttl_ms < mark.ttl_ms:
            self.found[mark.path] = mark

    def _ttl_ms(self, marker: object, where: str) -> int | None:
        """The window asked for. None: the marker is no good."""
        if not isinstance(marker, dict) or marker.get("type") != "ephemeral":
            self._objection(f'{where}: {MARKER} must be {{"type": "ephemeral"}}, with a "ttl" if you like')
            return None
        # "scope" is newer than most servers, and changes nothing here: a prefix is always the tenant's own.
        if unknown := marker.keys() - {"type", "ttl", "scope"}:
            self._objection(f"{where}: {MARKER} has no key {_quoted(min(unknown))}: it's ignored")
        return self._bounded_ms(marker.get("ttl"), TTL_DEFAULT_MS, where)

    def _native_ttl_ms(self, where: str) -> int | None:
        options = self._native_options
        ttl = options.get("ttl") if isinstance(options, dict) else None
        return self._bounded_ms(ttl, NATIVE_TTL_DEFAULT_MS, where)

    def _bounded_ms(self, ttl: object, default_ms: int, where: str) -> int | None:
        ttl_ms = parse_ttl(ttl) if ttl is not None else default_ms
        if ttl_ms is None:
            self._objection(f'{where}: ttl {_quoted(ttl)}: give "5m", "1h", "90s" or whole seconds')
        elif ttl_ms > self._ttl_max_ms:
            if ttl is not None:
                self._objection(f"{where}: ttl {_quoted(ttl)} is over the maximum of {self._ttl_max_ms // 1000} s")
            return self._ttl_max_ms
        return ttl_ms


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED_MAX else text[:_QUOTED_MAX] + "..."
