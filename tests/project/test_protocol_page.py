"""docs/PROTOCOL.md has every message, part, outcome and number of the protocol, and none that isn't there."""

import enum
import re
from typing import get_args

import msgspec
import pytest

from kvpin import protocol
from kvpin.master import counters as server_counters
from kvpin.master.core import counters as core_counters
from tests.project.documents import code_lines, section, table, text_of
from tests.project.signatures import signature

PAGE = text_of("docs/PROTOCOL.md")
REQUESTS = get_args(protocol.RequestBody)
REPLIES = get_args(protocol.ReplyBody)


def _structs(base: type) -> list[type[msgspec.Struct]]:
    found = [value for value in vars(protocol).values() if isinstance(value, type) and issubclass(value, base)]
    return [struct for struct in found if struct is not base]


def test_the_unions_hold_every_body() -> None:
    assert set(_structs(protocol.Body)) == {*REQUESTS, *REPLIES}


@pytest.mark.parametrize(("heading", "bodies"), [("## Requests", REQUESTS), ("## Replies", REPLIES)])
def test_every_body_is_described(heading: str, bodies: tuple[type[msgspec.Struct], ...]) -> None:
    text = section(PAGE, heading)
    headings = re.findall(r"^### (\w+) · `(\w+)`$", text, re.MULTILINE)
    assert headings == [(body.__name__, body.__struct_config__.tag) for body in bodies]
    written = [line.partition(" -> ")[0] for line in code_lines(text)]
    assert written == [signature(body) for body in bodies]


def test_every_request_has_its_answer() -> None:
    answers = dict(line.split(" -> ") for line in code_lines(section(PAGE, "## Requests")))
    by_request = {line.partition("(")[0]: answer for line, answer in answers.items()}
    assert set(by_request.values()) == {reply.__name__ for reply in REPLIES} - {"Failure"}
    told = {body: re.search(r"Answer: `(\w+)`", body.__doc__ or "") for body in REQUESTS}
    assert {body for body, answer in told.items() if answer is None} == {protocol.Hello}
    assert all(by_request[body.__name__] == answer[1] for body, answer in told.items() if answer)


@pytest.mark.parametrize("heading", ["## Envelopes", "## Parts"])
def test_every_other_struct_is_described(heading: str) -> None:
    structs = [protocol.Request, protocol.Response] if heading == "## Envelopes" else _structs(protocol.Part)
    assert sorted(code_lines(section(PAGE, heading))) == sorted(signature(struct) for struct in structs)


def test_every_outcome_is_described() -> None:
    enums = [value for value in vars(protocol).values() if isinstance(value, enum.EnumMeta)]
    text = section(PAGE, "## Outcomes") + section(PAGE, "## Errors")
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(kind.__name__ for kind in enums)
    for kind in enums:
        values = {member.name: str(member.value) for member in kind}
        assert table(section(text, f"### {kind.__name__}")) == values


@pytest.mark.parametrize(
    ("heading", "numbers"),
    [
        ("### Counters of the core", core_counters.COUNTERS),
        ("### Gauges of the core", core_counters.GAUGES),
        ("### Counters of the server", server_counters.COUNTERS),
        ("### Gauges of the server", server_counters.GAUGES),
    ],
)
def test_every_number_is_described(heading: str, numbers: dict[str, str]) -> None:
    assert table(section(PAGE, heading)) == numbers


def test_the_version_is_told() -> None:
    assert f"Version {protocol.PROTOCOL_VERSION}." in PAGE
