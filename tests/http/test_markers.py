"""Where markers stand, what they ask for, and what's wrong with some: over the bodies that clients really send."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpin.http.markers import MarkerError, parse, parse_ttl
from kvpin.http.places import Dialect, strip

REQUESTS = Path(__file__).parent / "requests"
WHOLE = sorted(path for path in REQUESTS.glob("*.json") if not path.name.startswith("13_"))
EDGES = json.loads((REQUESTS / "13_edge_cases.json").read_text())["cases"]
DAY_MS = 24 * 3600 * 1000
MARK = {"type": "ephemeral"}


def dialect_of(path: str) -> Dialect:
    return Dialect.ANTHROPIC if path == "/v1/messages" else Dialect.OPENAI


def lenient(dialect: Dialect, body: dict[str, Any]) -> Any:
    return parse(dialect, body, strict=False, ttl_max_ms=DAY_MS)


def ends(dialect: Dialect, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [mark.path for mark in lenient(dialect, body).breakpoints]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
@pytest.mark.parametrize("strict", [True, False])
def test_bodies_of_real_clients(path: Path, strict: bool) -> None:
    case = json.loads(path.read_text())
    marked = parse(dialect_of(case["_path"]), case["body"], strict=strict, ttl_max_ms=DAY_MS)
    assert marked.markers == case["_expect"]["breakpoints"]
    assert marked.notes == []
    if "ttl_s" in case["_expect"]:
        expected = case["_expect"]["ttl_s"]
        assert [mark.ttl_ms // 1000 for mark in marked.breakpoints] == (
            expected if isinstance(expected, list) else [expected]
        )


def test_where_the_marked_blocks_of_real_clients_are() -> None:
    def paths(name: str) -> list[tuple[Any, ...]]:
        case = json.loads((REQUESTS / f"{name}.json").read_text())
        return ends(dialect_of(case["_path"]), case["body"])

    assert paths("01_anthropic_system_marker") == [("system", 1)]
    assert paths("03_anthropic_mixed_ttl_tools") == [("tools", 1), ("system", 0), ("messages", 0, "content", 0)]
    assert paths("04_langchain_middleware") == [("tools", 1), ("system", 0), ("messages", 2, "content")]
    assert paths("10_openai_client_filler_part") == [("messages", 1, "content", 0)]
    assert paths("11_openai_native_breakpoints") == [("messages", 0, "content", 0)]


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case["why"])
def test_strict_mode_refuses_what_the_hosted_api_refuses(case: dict[str, Any]) -> None:
    if case["status"] == 400:
        with pytest.raises(MarkerError):
            parse(Dialect.ANTHROPIC, case["body"], strict=True, ttl_max_ms=DAY_MS)
    else:
        assert parse(Dialect.ANTHROPIC, case["body"], strict=True, ttl_max_ms=DAY_MS).breakpoints == []


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case["why"])
def test_lenient_mode_says_what_it_changed(case: dict[str, Any]) -> None:
    marked = lenient(Dialect.ANTHROPIC, case["body"])
    assert bool(marked.notes) is (case["status"] == 400)
    assert len(marked.breakpoints) <= 4


def test_the_last_four_are_kept() -> None:
    body = {"messages": [{"role": "user", "content": str(n), "cache_control": MARK} for n in range(6)]}
    assert ends(Dialect.OPENAI, body) == [("messages", n, "content") for n in (2, 3, 4, 5)]


def test_the_requests_own_marker_takes_a_slot() -> None:
    body = {"cache_control": MARK, "messages": [{"role": "user", "content": str(n)} for n in range(6)]}
    for message in body["messages"][:4]:
        message["cache_control"] = MARK
    assert ends(Dialect.OPENAI, body) == [("messages", n, "content") for n in (1, 2, 3, 5)]


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("text", ("messages", 1, "content")),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": " "}], ("messages", 1, "content", 0)),
        ([{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}], ("messages", 1, "content", 0)),
        ([{"type": "thinking", "thinking": "b"}], ("messages", 0, "content")),
        ("  ", ("messages", 0, "content")),
        ([], ("messages", 0, "content")),
        (None, ("messages", 0, "content")),
        ([{"type": "tool_use", "name": "f", "input": {}}], ("messages", 1, "content", 0)),
    ],
)
def test_the_requests_own_marker_walks_back_to_a_block_that_can_carry_one(content: Any, path: tuple[Any, ...]) -> None:
    messages = [{"role": "user", "content": "first"}, {"role": "assistant", "content": content}]
    assert ends(Dialect.ANTHROPIC, {"cache_control": MARK, "messages": messages}) == [path]


def test_nothing_to_mark_is_no_error() -> None:
    marked = parse(Dialect.ANTHROPIC, {"cache_control": MARK, "messages": []}, strict=True, ttl_max_ms=DAY_MS)
    assert marked.breakpoints == []


def test_a_second_marker_on_the_same_block_takes_no_second_slot() -> None:
    part = {"type": "text", "text": "a", "cache_control": {**MARK, "ttl": "1h"}}
    message = {"role": "user", "content": [part], "cache_control": MARK}
    (mark,) = lenient(Dialect.OPENAI, {"messages": [message]}).breakpoints
    assert (mark.path, mark.ttl_ms) == (("messages", 0, "content", 0), 3_600_000)


OPENAI_PLACES = [
    ({"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": MARK}]}, ("tools", 0)),
    ({"tools": [{"type": "function", "function": {"name": "f", "cache_control": MARK}}]}, ("tools", 0)),
    ({"messages": [{"role": "tool", "content": "r", "cache_control": MARK}]}, ("messages", 0, "content")),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "cache_control": MARK}]}]},
        ("messages", 0, "tool_calls", 0),
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "cache_control": MARK}}]}]},
        ("messages", 0, "tool_calls", 0),
    ),
    (
        {"messages": [{"role": "assistant", "content": "c", "cache_control": MARK, "tool_calls": [{}, {}]}]},
        ("messages", 0, "tool_calls", 1),
    ),
]
ANTHROPIC_PLACES = [
    ({"tools": [{"name": "f", "input_schema": {}, "cache_control": MARK}]}, ("tools", 0)),
    ({"system": [{"type": "text", "text": "s", "cache_control": MARK}]}, ("system", 0)),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "r", "cache_control": MARK}]}]},
        ("messages", 0, "content", 0),
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "content": [{"type": "text", "text": "r", "cache_control": MARK}]}
                    ],
                }
            ]
        },
        ("messages", 0, "content", 0),
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "cache_control": MARK}]}]},
        ("messages", 0, "content", 0),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}, "cache_control": MARK}]}]},
        ("messages", 0, "content", 0),
    ),
]


@pytest.mark.parametrize(
    ("dialect", "body", "path"),
    [(Dialect.OPENAI, *case) for case in OPENAI_PLACES] + [(Dialect.ANTHROPIC, *case) for case in ANTHROPIC_PLACES],
)
def test_every_place_counts_and_is_stripped(dialect: Dialect, body: dict[str, Any], path: tuple[Any, ...]) -> None:
    body = json.loads(json.dumps(body))
    assert ends(dialect, body) == [path]
    assert strip(dialect, body)
    assert "cache_control" not in json.dumps(body)


@pytest.mark.parametrize(
    ("marker", "part_of_note"),
    [
        ("yes", "must be"),
        (1, "must be"),
        ([], "must be"),
        ({}, "must be"),
        ({"type": "ephemeral", "ttl": "soon"}, "ttl 'soon'"),
        ({"type": "ephemeral", "ttl": -1}, "ttl -1"),
        ({"type": "ephemeral", "ttl": True}, "ttl True"),
        ({"type": "ephemeral", "ttl": {"a": 1}}, "ttl {'a': 1}"),
        ({"type": "ephemeral", "ttl": "x" * 500}, "ttl 'xxx"),
        ({"type": "ephemeral", "price": 1}, "'price'"),
        ({"type": "ephemeral", "ttl": "48h"}, "over the maximum of 86400 s"),
    ],
)
def test_a_bad_marker_is_noted_or_refused(marker: Any, part_of_note: str) -> None:
    body = {"messages": [{"role": "user", "content": "a", "cache_control": marker}]}
    (note,) = lenient(Dialect.OPENAI, body).notes
    assert note.startswith("messages.0.content: ")
    assert part_of_note in note
    assert len(note) < 150
    with pytest.raises(MarkerError):
        parse(Dialect.OPENAI, body, strict=True, ttl_max_ms=DAY_MS)


def test_scope_and_null_are_tolerated() -> None:
    messages = [{"role": "user", "content": "a", "cache_control": {**MARK, "scope": "global", "ttl": None}}]
    body = {"cache_control": None, "messages": messages}
    (mark,) = parse(Dialect.ANTHROPIC, body, strict=True, ttl_max_ms=DAY_MS).breakpoints
    assert mark.ttl_ms == 300_000


def test_a_window_over_the_maximum_is_clamped() -> None:
    body = {"messages": [{"role": "user", "content": "a", "cache_control": {**MARK, "ttl": "1h"}}]}
    (mark,) = parse(Dialect.OPENAI, body, strict=False, ttl_max_ms=60_000).breakpoints
    assert mark.ttl_ms == 60_000


# --- ttl ------------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 10**6), unit=st.sampled_from(["s", "m", "h"]))
def test_a_ttl_is_a_count_and_a_unit(count: int, unit: str) -> None:
    assert parse_ttl(f"{count}{unit}") == count * {"s": 1000, "m": 60_000, "h": 3_600_000}[unit]


@given(seconds=st.integers(1, 10**6))
def test_a_number_is_seconds(seconds: int) -> None:
    assert parse_ttl(seconds) == seconds * 1000


@given(st.one_of(st.text(), st.floats(), st.none(), st.booleans(), st.integers(max_value=0), st.lists(st.integers())))
def test_anything_else_is_no_ttl(ttl: Any) -> None:
    if not isinstance(ttl, str) or not (ttl[:-1].isascii() and ttl[:-1].isdigit() and ttl[-1:] in ("s", "m", "h")):
        assert parse_ttl(ttl) is None


@pytest.mark.parametrize("ttl", ["0s", "0m", "m", "", "5", "5 m", "5M", "1.5h", "5m\n", "\u0665m", "9999999999s"])
def test_near_misses_are_no_ttl(ttl: str) -> None:
    assert parse_ttl(ttl) is None


# --- strip ----------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.just("cache_control"))
FREE = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["cache_control", "a", "content"]), inner, max_size=3),
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["cache_control", "type", "text", "content", "role", "tools", "system", "messages", "tool_calls", "function"]
)
ANY_BODY = st.dictionaries(
    KEYS, st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=4), max_leaves=12)
)


@given(schema=FREE, arguments=FREE, text=st.text(), dialect=st.sampled_from(list(Dialect)))
def test_stripping_touches_nothing_of_the_users(schema: Any, arguments: Any, text: str, dialect: Dialect) -> None:
    def body(marker: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "f", "parameters": schema, **marker}
        content = [
            {"type": "text", "text": text, **marker},
            {"type": "tool_use", "name": "f", "input": arguments, **marker},
            {"type": "tool_result", "content": [{"type": "text", "text": text, **marker}], **marker},
        ]
        call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments), **marker}, **marker}
        return {
            "tools": [{"name": "f", "input_schema": schema, "function": function, **marker}],
            "messages": [{"role": "user", "content": content, "tool_calls": [call], **marker}],
            "metadata": {"cache_control": schema},
            **marker,
        }

    stripped = body({"cache_control": MARK})
    assert strip(dialect, stripped)
    assert stripped == body({})


@given(body=ANY_BODY, dialect=st.sampled_from(list(Dialect)))
def test_no_body_is_too_odd(body: dict[str, Any], dialect: Dialect) -> None:
    marked = lenient(dialect, body)
    assert len(marked.breakpoints) <= 4
    strip(dialect, body)
    assert lenient(dialect, body) == parse(dialect, body, strict=True, ttl_max_ms=DAY_MS)
    assert not strip(dialect, body)
