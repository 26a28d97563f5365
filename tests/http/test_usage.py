"""The sums in usage."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpin.http.outcome import Outcome, Written
from kvpin.http.places import Dialect
from kvpin.http.sidefield import MarkedPrefix
from kvpin.http.usage import complete_answer
from kvpin.protocol import MarkReport

COUNT = st.integers(0, 1000)


def anthropic(usage: dict[str, Any], written: Written | None) -> dict[str, Any]:
    answer = {"type": "message", "usage": usage}
    assert complete_answer(Dialect.ANTHROPIC, answer, written)
    return usage


def total(usage: dict[str, Any]) -> int:
    return sum(
        usage.get(name, 0) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


@given(fresh=COUNT, read=st.one_of(st.none(), COUNT), made=st.one_of(st.none(), COUNT), short=COUNT, long=COUNT)
def test_anthropics_parts_make_up_the_prompt(
    fresh: int, read: int | None, made: int | None, short: int, long: int
) -> None:
    usage: dict[str, Any] = {"input_tokens": fresh, "output_tokens": 3}
    if read is not None:
        usage["cache_read_input_tokens"] = read
    if made is not None:
        usage["cache_creation_input_tokens"] = made
    before = total(usage)
    anthropic(usage, Written(short, long))
    assert total(usage) == before
    assert usage.get("cache_read_input_tokens") == read
    created = usage["cache_creation"]
    assert sum(created.values()) == usage["cache_creation_input_tokens"] <= short + long
    assert min(created.values()) >= 0
    assert usage["input_tokens"] >= 0
    if fresh + (made or 0) >= short + long:
        assert created == {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long}


@given(fresh=COUNT, read=COUNT, made=COUNT)
def test_unknown_is_not_zero(fresh: int, read: int, made: int) -> None:
    usage = {"input_tokens": fresh, "cache_read_input_tokens": read, "cache_creation_input_tokens": made}
    before = total(usage)
    anthropic(usage, None)
    assert usage == {"input_tokens": fresh + made, "cache_read_input_tokens": read}
    assert total(usage) == before


def test_a_streams_start_is_left_alone_while_reads_are_unknown() -> None:
    answer = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}
    assert not complete_answer(Dialect.ANTHROPIC, answer, Written(5, 0))


def test_a_streams_start_that_knows_reads_is_completed() -> None:
    usage = {"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 0}
    assert complete_answer(Dialect.ANTHROPIC, {"type": "message_start", "message": {"usage": usage}}, Written(5, 0))
    assert usage["input_tokens"] == 4


def test_openai_keeps_what_the_engine_said() -> None:
    answer = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "multimodal_tokens": None}}}
    assert complete_answer(Dialect.OPENAI, answer, Written(5, 1))
    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 4,
        "multimodal_tokens": None,
        "cache_write_tokens": 6,
        "cache_creation_input_tokens": 6,
    }
    assert not complete_answer(Dialect.OPENAI, answer, None)


def test_nested_prefixes_count_each_token_once() -> None:
    prefixes = [MarkedPrefix("01" * 16, 64, 3_600_000), MarkedPrefix("02" * 16, 160, 300_000)]
    outcome = Outcome(
        prefixes,
        reports=[MarkReport(b"\1" * 16, 64, 64, 64, 0), MarkReport(b"\2" * 16, 160, 160, 160, 0)],
    )
    assert outcome.written == Written(short_tokens=96, long_tokens=64)
    assert outcome.protected_tokens == 160


def test_renewed_tokens_are_not_written() -> None:
    outcome = Outcome([MarkedPrefix("01" * 16, 64, 1000)], reports=[MarkReport(b"\1" * 16, 64, 64, 0, 64)])
    assert outcome.written == Written(0, 0)
    assert outcome.protected_tokens == 64
