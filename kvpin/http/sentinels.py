"""Altered copies of a request that show where a marked block ends in the rendered prompt.

A text block gets a sentinel, before its trailing whitespace because templates trim. A tool or tool call gets a
stranger put behind it: what the two prompts have in common reaches to the block's end.
"""

import copy
import secrets
from typing import Any

from kvpin.http.markers import Breakpoint
from kvpin.http.places import Dialect, Path, Place, text_key

STRANGER = "zz_kvpin_stranger"
SENTINEL_BYTES = 8


class Unprovable(Exception):
    """The end of a block can't be found; the text is the reason, in a word or two."""


def new_sentinel() -> str:
    """ASCII letters and digits that no template changes and no prompt contains."""
    return f"kvpin{secrets.token_hex(SENTINEL_BYTES)}"


def with_sentinel(body: dict[str, Any], mark: Breakpoint, sentinel: str) -> dict[str, Any]:
    """The body with a sentinel at the end of a marked text; only what is on the way there is copied.

    Raises Unprovable if the block has no text.
    """
    if mark.place not in (Place.TEXT, Place.TOOL_RESULT):
        raise Unprovable("not_text")
    altered, holder, key = _opened(body, mark.path)
    block = holder[key]
    if isinstance(block, str):
        holder[key] = _inserted(block, sentinel)
        return altered
    block = holder[key] = copy.deepcopy(block)
    owner, name = _text_of_result(block) if mark.place is Place.TOOL_RESULT else (block, text_key(block))
    owner[name] = _inserted(owner[name], sentinel)
    return altered


def with_stranger(dialect: Dialect, body: dict[str, Any], mark: Breakpoint) -> dict[str, Any]:
    """The body with one more tool, or tool call, right behind the marked one."""
    altered, siblings, index = _opened(body, mark.path)
    assert isinstance(siblings, list)
    siblings.insert(int(index) + 1, _stranger(dialect, mark.place))
    return altered


def name_of(body: dict[str, Any], path: Path) -> str:
    """The name of a tool or tool call."""
    block = at(body, path)
    named = block.get("function", block)
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or not name:
        raise Unprovable("unnamed")
    return name


def truncated(body: dict[str, Any], path: Path) -> dict[str, Any]:
    """The body without what comes after a block; behind a system block a short conversation is left."""
    if path[0] != "messages":
        system = body["system"][: int(path[1]) + 1]
        return {**body, "system": system, "messages": [{"role": "user", "content": STRANGER}]}
    message_index = int(path[1])
    messages = list(body["messages"][: message_index + 1])
    if len(path) == 4:
        name = str(path[2])
        messages[-1] = {**messages[-1], name: messages[-1][name][: int(path[3]) + 1]}
    return {**body, "messages": messages}


def at(body: dict[str, Any], path: Path) -> Any:
    """What is at a path."""
    found: Any = body
    for step in path:
        found = found[step]
    return found


def common_prefix(first: str, second: str) -> int:
    """How many leading characters are equal."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # by halves: comparing slices runs in C
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _opened(body: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any, str | int]:
    """A copy of the body that can be changed at the path: its copied last container, and the last step."""
    altered = container = dict(body)
    holder: Any = container
    for step in path[:-1]:
        child = holder[step]
        holder[step] = list(child) if isinstance(child, list) else dict(child)
        holder = holder[step]
    return altered, holder, path[-1]


def _inserted(text: str, sentinel: str) -> str:
    kept = len(text.rstrip())
    return text[:kept] + sentinel + text[kept:]


def _text_of_result(block: dict[str, Any]) -> tuple[dict[str, Any], str]:
    content = block.get("content")
    if isinstance(content, str) and content.strip():
        return block, "content"
    for inner in reversed(content if isinstance(content, list) else []):
        if isinstance(inner, dict):
            if inner.get("type") == "text" and isinstance(inner.get("text"), str) and inner["text"].strip():
                return inner, "text"
            break  # something else ends the result
    raise Unprovable("not_text")


def _stranger(dialect: Dialect, place: Place) -> dict[str, Any]:
    if place is Place.TOOL:
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        if dialect is Dialect.ANTHROPIC:
            return {"name": STRANGER, "description": "", "input_schema": schema}
        return {"type": "function", "function": {"name": STRANGER, "description": "", "parameters": schema}}
    if dialect is Dialect.ANTHROPIC:
        return {"type": "tool_use", "id": STRANGER, "name": STRANGER, "input": {}}
    return {"id": STRANGER, "type": "function", "function": {"name": STRANGER, "arguments": "{}"}}
