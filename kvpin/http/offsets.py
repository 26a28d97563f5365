"""From marked blocks to token offsets, by the engine's own rendering. What can't be proven is not protected.

The request is rendered and tokenised once as it is. Then it is rendered, not tokenised, with a sentinel in each marked
text. If the two prompts are equal but for the sentinels, these stand where the blocks end. Else each block is looked
for alone, and at last by what the prompt has in common with that of a request cut off behind the block. A prefix ends
with the last token that ends within its text, floored to a whole block of tokens.

A wrong offset could do no harm but to protect too much or too little: blocks are found by the hash of their tokens.
"""

from bisect import bisect_right
from typing import Any

import msgspec

from kvpin.http.engine import Engine, Rendered, RenderError
from kvpin.http.markers import Breakpoint
from kvpin.http.places import Dialect, Place, spell
from kvpin.http.sentinels import (
    Unprovable,
    common_prefix,
    name_of,
    new_sentinel,
    truncated,
    with_sentinel,
    with_stranger,
)
from kvpin.http.sidefield import MarkedPrefix
from kvpin.keys import prefix_ids


class Located(msgspec.Struct, frozen=True):
    """`prefixes` by rising end, one for each. `problems`: (block, reason) of breakpoints that protect nothing."""

    prefixes: list[MarkedPrefix]
    problems: list[tuple[str, str]]


async def locate(
    engine: Engine, dialect: Dialect, body: dict[str, Any], breakpoints: list[Breakpoint], label: str = ""
) -> Located:
    """The prefixes that the breakpoints of a body (without its markers) mean. Raises RenderError."""
    rendered = await engine.render(dialect, body)
    if rendered.text is None or rendered.ends is None:
        return Located([], [(spell(mark.path), "no_offsets") for mark in breakpoints])
    finder = _Finder(engine, dialect, body, rendered.text)
    ttls_ms: dict[int, int] = {}  # by end
    problems: list[tuple[str, str]] = []
    together = await finder.find_texts(breakpoints)
    for mark in breakpoints:
        try:
            offset = together[mark] if mark in together else await finder.find(mark)
            end = whole_blocks(rendered, offset, engine.block_tokens)
            if end == 0:
                raise Unprovable("too_short")
            ttls_ms[end] = max(mark.ttl_ms, ttls_ms.get(end, 0))
        except (Unprovable, RenderError) as reason:
            why = str(reason) if isinstance(reason, Unprovable) else "unproven"
            problems.append((spell(mark.path), why))
    ends = sorted(ttls_ms)
    ids = prefix_ids(engine.scope(body), rendered.token_ids, ends)
    prefixes = [
        MarkedPrefix(prefix_id.hex(), end, ttls_ms[end], label) for prefix_id, end in zip(ids, ends, strict=True)
    ]
    return Located(prefixes, problems)


def whole_blocks(rendered: Rendered, offset: int, block_tokens: int) -> int:
    """How many tokens end at or before a character, in whole blocks. One that spans it doesn't count."""
    assert rendered.ends is not None
    assert len(rendered.ends) == len(rendered.token_ids)
    tokens = bisect_right(rendered.ends, offset)
    return tokens - tokens % block_tokens


class _Finder:
    """Finds where blocks end in one rendered prompt, in characters."""

    def __init__(self, engine: Engine, dialect: Dialect, body: dict[str, Any], text: str) -> None:
        self._engine = engine
        self._dialect = dialect
        self._body = body
        self._text = text

    async def find_texts(self, breakpoints: list[Breakpoint]) -> dict[Breakpoint, int]:
        """All marked texts by one rendering; none of them if anything is odd."""
        altered = self._body
        sentinels: dict[Breakpoint, str] = {}
        for mark in breakpoints:
            sentinel = new_sentinel()
            try:
                altered = with_sentinel(altered, mark, sentinel)
            except Unprovable:
                continue  # found, or refused, on its own
            sentinels[mark] = sentinel
        if not sentinels:
            return {}
        try:
            offsets = self._sentinel_offsets(await self._render(altered), list(sentinels.values()))
        except (Unprovable, RenderError):
            return {}
        return dict(zip(sentinels, offsets, strict=True))

    async def find(self, mark: Breakpoint) -> int:
        """One block on its own. Raises Unprovable or RenderError."""
        if mark.place in (Place.TOOL, Place.TOOL_CALL):
            return await self._find_by_stranger(mark)
        sentinel = new_sentinel()
        altered = with_sentinel(self._body, mark, sentinel)
        try:
            (offset,) = self._sentinel_offsets(await self._render(altered), [sentinel])
            return offset
        except (Unprovable, RenderError):
            return common_prefix(self._text, await self._render(truncated(self._body, mark.path)))

    async def _find_by_stranger(self, mark: Breakpoint) -> int:
        name = name_of(self._body, mark.path)
        other = await self._render(with_stranger(self._dialect, self._body, mark))
        offset = common_prefix(self._text, other)
        if other == self._text or name not in self._text[:offset]:
            raise Unprovable("not_rendered")
        return offset

    def _sentinel_offsets(self, marked_text: str, sentinels: list[str]) -> list[int]:
        """Where the sentinels stand, if that's all by which the prompts differ. Raises Unprovable."""
        pieces: list[str] = []
        offsets: list[int] = []
        done = length = 0
        for sentinel in sentinels:  # in render order; a template that puts it otherwise is looked at block by block
            found = marked_text.find(sentinel, done)
            if found < 0:
                raise Unprovable("unproven")
            pieces.append(marked_text[done:found])
            length += found - done
            offsets.append(length)
            done = found + len(sentinel)
        pieces.append(marked_text[done:])
        if "".join(pieces) != self._text:
            raise Unprovable("unproven")
        return offsets

    async def _render(self, body: dict[str, Any]) -> str:
        return await self._engine.render_text(self._dialect, body)
