"""Where in a request body a cache marker may stand, and how to take the markers out again.

Two dialects: OpenAI chat completions, as gateways mark them (request, message, content part, tool, tool call), and
Anthropic messages (request, system block, tool, message block). Clients put markers in more places than either hosted
API documents, so every place that clients are known to use counts. Nothing else is looked at: a tool's schema, a tool
call's arguments or a text may well contain the same word.
"""

import enum
from collections.abc import Iterator
from typing import Any

import msgspec

MARKER = "cache_control"
NATIVE_MARKER = "prompt_cache_breakpoint"  # OpenAI's own, with its ttl in the request's NATIVE_OPTIONS
NATIVE_OPTIONS = "prompt_cache_options"
MARKER_NAMES = (MARKER, NATIVE_MARKER, NATIVE_OPTIONS)
_THINKING = ("thinking", "redacted_thinking")
_TEXT = ("text", "input_text", "output_text", "refusal")

Path = tuple[str | int, ...]
"""Keys and indices that lead from the body to a block."""


class Dialect(enum.StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Place(enum.StrEnum):
    """What kind of block it is."""

    TEXT = "text"  # a string, or a part whose "text" is rendered
    TOOL = "tool"
    TOOL_CALL = "tool_call"  # tool_calls[i] or a tool_use block
    TOOL_RESULT = "tool_result"
    OTHER = "other"  # an image, a document ...


class Spot(msgspec.Struct, frozen=True):
    """`holder` may carry a marker. It then means the block at `path`; None: there's no block that could be marked."""

    holder: dict[str, Any]
    path: Path | None
    place: Place
    objection: str = ""  # why a marker doesn't belong here


def spots(dialect: Dialect, body: dict[str, Any]) -> Iterator[Spot]:
    """Every place where clients put markers but the request itself, in render order: tools, system, messages."""
    for index, tool in _dicts(body.get("tools")):
        yield Spot(tool, ("tools", index), Place.TOOL)
        if isinstance(function := tool.get("function"), dict):
            yield Spot(function, ("tools", index), Place.TOOL)
    if dialect is Dialect.ANTHROPIC:
        for index, block in _dicts(body.get("system")):
            yield _block_spot(block, ("system", index))
    for index, message in _dicts(body.get("messages")):
        yield from _message_spots(message, ("messages", index))


def strip(dialect: Dialect, body: dict[str, Any]) -> bool:
    """Remove every marker from the body, in place, and nothing else. Was there any?"""
    holders = [body, *(spot.holder for spot in spots(dialect, body))]
    present = [(holder, name) for holder in holders for name in MARKER_NAMES if name in holder]
    for holder, name in present:
        holder.pop(name, None)  # a message and its only part may be listed twice
    return bool(present)


def last_block(body: dict[str, Any]) -> tuple[Path, Place] | None:
    """The last block of the conversation that can be marked: fillers, empty text and thinking are walked over."""
    for index, message in reversed(list(_dicts(body.get("messages")))):
        if found := _end_of_message(message, ("messages", index)):
            return found
    return None


def spell(path: Path) -> str:
    """messages.0.content.1"""
    return ".".join(str(step) for step in path)


def _message_spots(message: dict[str, Any], path: Path) -> Iterator[Spot]:
    for index, block in _dicts(message.get("content")):
        block_path = (*path, "content", index)
        if block.get("type") == "tool_result":  # a marker on an inner block means the whole result
            for _, inner in _dicts(block.get("content")):
                yield Spot(inner, block_path, Place.TOOL_RESULT, _objection(inner))
        yield _block_spot(block, block_path)
    for index, call in _dicts(message.get("tool_calls")):
        call_path = (*path, "tool_calls", index)
        yield Spot(call, call_path, Place.TOOL_CALL)
        if isinstance(function := call.get("function"), dict):
            yield Spot(function, call_path, Place.TOOL_CALL)
    end = _end_of_message(message, path)
    if end is None:
        yield Spot(message, None, Place.OTHER, "the message has no content that could be marked")
    else:
        yield Spot(message, *end)


def _block_spot(block: dict[str, Any], path: Path) -> Spot:
    return Spot(block, path, _place(block), _objection(block))


def _end_of_message(message: dict[str, Any], path: Path) -> tuple[Path, Place] | None:
    """The last block of a message that can be marked. Tool calls are rendered after the content."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return (*path, "tool_calls", len(calls) - 1), Place.TOOL_CALL
    content = message.get("content")
    if isinstance(content, str):
        return ((*path, "content"), Place.TEXT) if content.strip() else None
    for index, block in reversed(list(_dicts(content))):
        if block and not _objection(block):
            return (*path, "content", index), _place(block)
    return None


def _place(block: dict[str, Any]) -> Place:
    kind = block.get("type")
    if kind in _TEXT and isinstance(block.get(text_key(block)), str):
        return Place.TEXT
    return {"tool_use": Place.TOOL_CALL, "tool_result": Place.TOOL_RESULT}.get(str(kind), Place.OTHER)


def text_key(block: dict[str, Any]) -> str:
    """Under which key a text block has its text."""
    return "refusal" if block.get("type") == "refusal" else "text"


def _objection(block: dict[str, Any]) -> str:
    if block.get("type") in _THINKING:
        return f"{MARKER} can't be set on a {block['type']} block"
    text = block.get(text_key(block))
    if block.get("type") in _TEXT and isinstance(text, str) and not text.strip():
        return f"{MARKER} can't be set on empty text"
    return ""


def _dicts(value: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """The dicts in a list, with their indices."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield index, item
