"""What the documents say of settings, commands, targets and files is so."""

import re
from pathlib import Path

import msgspec
import pytest
import typer

from kvpin.cli import app
from kvpin.config import ClientConfig, MasterConfig
from kvpin.errors import ConfigError
from kvpin.http import routes
from kvpin.http.settings import ENV_PREFIX, http_config
from tests.project.documents import ROOT, section, table, text_of

README = text_of("README.md")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


@pytest.mark.parametrize(("heading", "config"), [("### Master", MasterConfig()), ("### Client", ClientConfig())])
def test_settings_and_their_defaults(heading: str, config: msgspec.Struct) -> None:
    expected = {name: _spelled(getattr(config, name)) for name in config.__struct_fields__}
    assert table(section(README, heading)) == expected


def test_http_settings_and_their_defaults() -> None:
    told = table(section(README, "### HTTP"))
    with pytest.raises(ConfigError) as refused:
        http_config({f"{ENV_PREFIX}NO_SUCH": "1"})
    assert sorted(told) == sorted(re.findall(rf"{ENV_PREFIX}\w+", str(refused.value).partition("known:")[2]))
    assert http_config({name: value.strip('"') for name, value in told.items()}) == http_config({})


def test_commands() -> None:
    command = typer.main.get_command(app)
    told = table(section(README, "## See and end what is protected"))
    names = {name.removeprefix("kvpin ") for name in told if name.startswith("kvpin ")}
    assert names == set(command.commands)  # type: ignore[attr-defined]


def test_routes() -> None:
    told = table(section(README, "## See and end what is protected"))
    holder = type("Nobody", (), {"service": None})()
    found = {(method, route.path) for route in routes.routes(holder) for method in (route.methods or set()) - {"HEAD"}}
    assert {tuple(name.split(" ")) for name in told if "/v1/" in name} == found


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    told = {target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z-]+)", text_of(page), re.MULTILINE)}
    assert {"demo", "test", "check"} <= told <= targets


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:kvpin|tests|examples|benchmarks|docs)/[\w/.]+)`", text_of(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_decisions_are_numbered_without_holes() -> None:
    names = sorted(path.name for path in (ROOT / "docs/adr").glob("*.md"))
    assert [name[:5] for name in names] == [f"{number:04}-" for number in range(1, len(names) + 1)]
    for name in names:
        first, *_ = text_of(f"docs/adr/{name}").splitlines()
        assert first.startswith(f"# {int(name[:4])}. ")
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert section(text_of(f"docs/adr/{name}"), heading).strip()


def test_every_module_has_its_place_in_the_architecture() -> None:
    """All modules of the package, and no others, stand in the list of docs/ARCHITECTURE.md."""
    listed = set(re.findall(r"`([\w/]+\.py)`", section(text_of("docs/ARCHITECTURE.md"), "## 6. Modules")))
    modules = [path.relative_to(ROOT / "kvpin") for path in (ROOT / "kvpin").rglob("*.py")]
    assert listed == {path.as_posix() for path in modules if path.name != "__init__.py"}


def test_the_changelog_has_a_place_for_what_comes() -> None:
    assert "## [Unreleased]" in text_of("CHANGELOG.md")
    assert Path(ROOT / "LICENSE").read_text().strip().startswith("Apache License")
