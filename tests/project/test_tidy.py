"""The code's own rules, where a tool can see them."""

import ast
import contextlib
import functools
import io
import re
import sys

import pytest
from importlinter.cli import lint_imports

from tests.project.documents import ROOT, text_of

LINES_MAX = 300
LONG = {"kvpin/protocol.py"}  # every message, and nothing else: it is read as one text
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kvpin").rglob("*.py"))
CORE = [path for path in SOURCES if path.startswith("kvpin/master/core/")]
CORE_IMPORTS = {"collections", "enum", "heapq", "itertools", "msgspec", "typing"}
CORE_KVPIN_IMPORTS = ("kvpin.errors", "kvpin.keys", "kvpin.limits", "kvpin.master.core", "kvpin.protocol")
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))


def _imports(path: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
    return found


def _limits() -> dict[str, str]:
    """Name -> the rest of the line that sets it."""
    return dict(re.findall(r"^([A-Z][A-Z0-9_]*) = (.*)$", text_of("kvpin/limits.py"), re.MULTILINE))


@functools.cache
def _names_used(path: str) -> set[str]:
    tree = ast.parse(text_of(path))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("path", sorted(set(SOURCES) - LONG))
def test_a_file_is_short(path: str) -> None:
    assert len(text_of(path).splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_is_left_for_later(path: str) -> None:
    assert not UNFINISHED.findall(text_of(path))


@pytest.mark.parametrize("path", CORE)
def test_the_core_imports_nothing_that_acts(path: str) -> None:
    foreign = [name for name in _imports(path) if name.partition(".")[0] not in CORE_IMPORTS]
    assert [name for name in foreign if not name.startswith(CORE_KVPIN_IMPORTS)] == []
    assert not {"open", "print", "input"} & _names_used(path)


@pytest.mark.parametrize("name", sorted(_limits()))
def test_a_limit_has_a_reason_and_a_use(name: str) -> None:
    assert re.search(r"  # \S", _limits()[name]), f"{name}: say why so much"
    assert any(name in _names_used(path) for path in SOURCES if path != "kvpin/limits.py"), f"{name} limits nothing"


def test_the_arrows_between_modules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == 0, said.getvalue()
