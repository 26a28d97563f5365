"""Breakpoints to token offsets, over templates that trim, fold, insist and move; checked against brute force."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpin.http.markers import parse
from kvpin.http.offsets import Located, locate
from kvpin.http.places import Dialect, strip
from kvpin.http.sentinels import STRANGER, common_prefix
from kvpin.http.sidefield import MarkedPrefix
from kvpin.keys import prefix_id
from tests.http.fake_engine import CHATML, DEAF, SHOUTING, TEMPLATES, TOKENIZER, FakeEngine

MARK = {"type": "ephemeral"}
REQUESTS = Path(__file__).parent / "requests"
SYSTEM = "Answer questions about parcels, briefly and with the handbook's section. " * 3
ORDER = ["system", "user", "assistant", "user"]


def find(engine: FakeEngine, dialect: Dialect, body: dict[str, Any]) -> Located:
    marked = parse(dialect, body, strict=False, ttl_max_ms=10**9)
    strip(dialect, body)
    return asyncio.run(locate(engine, dialect, body, marked.breakpoints, "label"))


def text_of(engine: FakeEngine, dialect: Dialect, body: dict[str, Any]) -> str:
    return asyncio.run(engine.render_text(dialect, body))


def tokens_within(text: str, end: int, block_tokens: int) -> int:
    """Brute force: the tokens of the whole text whose characters all lie before `end`, in whole blocks."""
    encoding = TOKENIZER.encode(text)
    tokens = 0
    for _, token_end in encoding.offsets:
        if token_end > end:
            break
        tokens += 1
    return tokens - tokens % block_tokens


def conversation(marked: int, trailing: str = "", form: str = "string") -> dict[str, Any]:
    """Messages whose texts occur once each; one of them is marked."""
    messages: list[dict[str, Any]] = []
    for index, role in enumerate(ORDER):
        text = f"{SYSTEM if role == 'system' else 'Where is parcel number'} {index}{index}{index}." + trailing
        if form == "string":
            message = {"role": role, "content": text}
            if index == marked:
                message["cache_control"] = MARK
        else:
            part = {"type": "text", "text": text}
            if index == marked:
                part["cache_control"] = MARK
            message = {"role": role, "content": [part]}
        messages.append(message)
    return {"model": "m", "messages": messages}


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
@pytest.mark.parametrize("marked", range(4))
@pytest.mark.parametrize("trailing", ["", " \n", "\n\n"])
@pytest.mark.parametrize("form", ["string", "parts"])
def test_a_prefix_ends_with_the_last_token_of_its_marked_text(
    template: str, marked: int, trailing: str, form: str
) -> None:
    engine = FakeEngine(TEMPLATES[template], block_tokens=1)
    body = conversation(marked, trailing, form)
    located = find(engine, Dialect.OPENAI, body)
    text = text_of(engine, Dialect.OPENAI, body)
    end = text.index(f"{marked}{marked}{marked}.") + 4
    assert located.problems == []
    (prefix,) = located.prefixes
    assert prefix.end_token == tokens_within(text, end, 1)
    assert engine.tokenised == 1


def test_ids_are_those_of_the_prompts_tokens() -> None:
    engine = FakeEngine(block_tokens=16)
    body = conversation(0)
    (prefix,) = find(engine, Dialect.OPENAI, body).prefixes
    ids = TOKENIZER.encode(text_of(engine, Dialect.OPENAI, body)).ids
    assert prefix.end_token % 16 == 0
    expected = prefix_id("m/", ids[: prefix.end_token]).hex()
    assert prefix == MarkedPrefix(expected, prefix.end_token, 300_000, "label")


def test_a_salt_separates_equal_prompts() -> None:
    plain, salted = conversation(0), {**conversation(0), "cache_salt": "a"}
    first, second = (find(FakeEngine(), Dialect.OPENAI, body).prefixes[0] for body in (plain, salted))
    assert first.end_token == second.end_token
    assert first.id != second.id


def test_several_marks_take_two_renderings_and_one_tokenisation() -> None:
    body = conversation(0)
    for index in (1, 2, 3):
        body["messages"][index]["cache_control"] = MARK
    engine = FakeEngine(block_tokens=1)
    located = find(engine, Dialect.OPENAI, body)
    assert len(located.prefixes) == 4
    assert (engine.rendered, engine.tokenised) == (2, 1)
    assert [prefix.end_token for prefix in located.prefixes] == sorted({p.end_token for p in located.prefixes})


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=40)


@given(
    texts=st.lists(TEXT, min_size=2, max_size=5),
    block_tokens=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
@settings(deadline=None)
def test_any_texts(texts: list[str], block_tokens: int, data: st.DataObject) -> None:
    marked = data.draw(st.integers(0, len(texts) - 1))
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    parts[marked]["cache_control"] = MARK
    engine = FakeEngine(block_tokens=block_tokens)
    body = {"messages": [{"role": "user", "content": parts}]}
    located = find(engine, Dialect.OPENAI, body)
    head = "<|im_start|>user\n" + "".join(texts[:marked]) + texts[marked].rstrip()
    expected = tokens_within(text_of(engine, Dialect.OPENAI, body), len(head), block_tokens)
    if not texts[marked].strip():
        assert located == Located([], [])  # the marker was refused before
    elif expected:
        assert [prefix.end_token for prefix in located.prefixes] == [expected]
    else:
        assert located.problems == [(f"messages.0.content.{marked}", "too_short")]


# --- tools ----------------------------------------------------------------------------------------------------------


def tool(name: str, **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}, **extra}


@pytest.mark.parametrize(("marked", "last_name"), [(0, "find_order"), (1, "refund")])
def test_a_marked_tool_ends_behind_its_own_text(marked: int, last_name: str) -> None:
    engine = FakeEngine(block_tokens=1)
    tools = [tool("find_order"), tool("refund")]
    tools[marked]["cache_control"] = MARK
    body = {"tools": tools, "messages": [{"role": "user", "content": "x"}]}
    (prefix,) = find(engine, Dialect.OPENAI, body).prefixes
    covered = TOKENIZER.decode(TOKENIZER.encode(text_of(engine, Dialect.OPENAI, body)).ids[: prefix.end_token])
    assert last_name in covered
    assert "parameters" in covered[covered.index(last_name) :]
    assert STRANGER not in covered
    assert "user" not in covered.rpartition(last_name)[2]


def test_a_tool_that_the_template_leaves_out_is_not_protected() -> None:
    body = {"tools": [tool("f", cache_control=MARK)], "messages": [{"role": "user", "content": "x"}]}
    located = find(FakeEngine(TEMPLATES["trimming"]), Dialect.OPENAI, body)
    assert located == Located([], [("tools.0", "not_rendered")])


def test_a_marked_tool_call_and_its_result() -> None:
    engine = FakeEngine(block_tokens=1)
    call = {"type": "tool_use", "id": "1", "name": "find_order", "input": {"q": "12"}, "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "It ships on Monday."}]}
    result["cache_control"] = MARK
    body = {
        "messages": [
            {"role": "user", "content": "Order 12?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    }
    located = find(engine, Dialect.ANTHROPIC, body)
    text = text_of(engine, Dialect.ANTHROPIC, body)
    ids = TOKENIZER.encode(text).ids
    called, resulted = (TOKENIZER.decode(ids[: p.end_token], skip_special_tokens=False) for p in located.prefixes)
    assert called.endswith("</tool_call>")
    assert resulted.endswith("Monday.")


# --- what can't be proven -------------------------------------------------------------------------------------------


def test_a_template_that_changes_sentinels_falls_back_to_a_cut_off_request() -> None:
    engine = FakeEngine(SHOUTING, block_tokens=1)
    body = conversation(1)
    (prefix,) = find(engine, Dialect.OPENAI, body).prefixes
    text = text_of(engine, Dialect.OPENAI, body)
    end = text.index("111.") + 4
    next_header = len("<|im_end|>\n<|im_start|>assistant\n")
    assert tokens_within(text, end, 1) <= prefix.end_token <= tokens_within(text, end + next_header, 1)


def test_content_that_is_not_rendered_protects_next_to_nothing() -> None:
    located = find(FakeEngine(DEAF, block_tokens=16), Dialect.OPENAI, conversation(1))
    assert located == Located([], [("messages.1.content", "too_short")])


def test_a_block_that_is_no_text_is_not_protected() -> None:
    case = json.loads((REQUESTS / "05_anthropic_image_document.json").read_text())
    located = find(FakeEngine(), Dialect.ANTHROPIC, case["body"])
    assert located.prefixes == []
    assert located.problems == [("messages.0.content.0", "not_text"), ("messages.0.content.1", "not_text")]


def test_without_offsets_nothing_is_protected() -> None:
    engine = FakeEngine()
    engine.offsets = False
    assert find(engine, Dialect.OPENAI, conversation(0)) == Located([], [("messages.0.content", "no_offsets")])


def test_a_prefix_shorter_than_a_block_is_not_protected() -> None:
    located = find(FakeEngine(block_tokens=4096), Dialect.OPENAI, conversation(3))
    assert located == Located([], [("messages.3.content", "too_short")])


def test_two_marks_within_one_block_are_one_prefix_for_the_longer_time() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": SYSTEM, "cache_control": MARK}]}]}
    body["messages"][0]["content"].append({"type": "text", "text": "a", "cache_control": {**MARK, "ttl": "1h"}})
    (prefix,) = find(FakeEngine(block_tokens=32), Dialect.OPENAI, body).prefixes
    assert prefix.ttl_ms == 3_600_000


@pytest.mark.parametrize("path", sorted(REQUESTS.glob("0[1-4]*.json")) + sorted(REQUESTS.glob("[01][08]_open*.json")),
                         ids=lambda path: path.stem)  # fmt: skip
def test_every_breakpoint_of_real_clients_is_found(path: Path) -> None:
    case = json.loads(path.read_text())
    dialect = Dialect.ANTHROPIC if case["_path"] == "/v1/messages" else Dialect.OPENAI
    located = find(FakeEngine(CHATML, block_tokens=16), dialect, case["body"])
    assert located.problems == []
    assert located.prefixes


@given(st.text(max_size=30), st.text(max_size=10), st.text(max_size=10))
def test_common_prefix(shared: str, first: str, second: str) -> None:
    one, other = shared + first, shared + second
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
