"""The project's documents, and what can be read out of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text_of(path: str) -> str:
    return (ROOT / path).read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found[1]


def table(text: str) -> dict[str, str]:
    """The first two cells of each row of a text's tables whose first cell is code, without the backticks."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", text, re.MULTILINE)
    found = {first: second.strip("`") for first, second in rows}
    assert len(found) == len(rows), "a name is there twice"
    return found


def code_lines(text: str) -> list[str]:
    """All lines in fenced blocks."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]
