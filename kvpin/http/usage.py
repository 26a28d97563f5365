"""The `usage` of an answer, completed by what kvpin newly protected. What isn't known is left out, never written as 0.

OpenAI: `prompt_tokens_details.cached_tokens` stays the engine's; `cache_write_tokens` (OpenAI's name) and
`cache_creation_input_tokens` (DashScope's) are the newly protected tokens, whether or not they were cached before.

Anthropic: `input_tokens + cache_read_input_tokens + cache_creation_input_tokens` is the whole prompt, so a token that
was read from a cache and is newly protected counts as read only.
"""

from typing import Any

from kvpin.http.outcome import Written
from kvpin.http.places import Dialect

READ = "cache_read_input_tokens"
CREATED = "cache_creation_input_tokens"
DETAILS = "prompt_tokens_details"


def complete_answer(dialect: Dialect, answer: dict[str, Any], written: Written | None) -> bool:
    """Complete a whole answer, or a stream's event, in place. Was there anything to complete?"""
    usage = answer.get("usage")
    if isinstance(answer.get("message"), dict):  # message_start: before the engine tells what it read
        usage = answer["message"].get("usage")
        if not isinstance(usage, dict) or READ not in usage:
            return False
    if not isinstance(usage, dict):
        return False
    if dialect is Dialect.ANTHROPIC:
        return _complete_anthropic(usage, written)
    return _complete_openai(usage, written)


def _complete_openai(usage: dict[str, Any], written: Written | None) -> bool:
    if written is None or "prompt_tokens" not in usage:
        return False
    details = usage.get(DETAILS)
    known = details if isinstance(details, dict) else {}
    usage[DETAILS] = {**known, "cache_write_tokens": written.tokens, CREATED: written.tokens}
    return True


def _complete_anthropic(usage: dict[str, Any], written: Written | None) -> bool:
    if not isinstance(usage.get("input_tokens"), int):
        return False
    rest = usage["input_tokens"] + _count(usage, CREATED)  # the engine's own cache made an entry: not our promise
    if written is None:
        usage.pop(CREATED, None)
        usage["input_tokens"] = rest
        return True
    created = min(written.tokens, rest)
    overlap = written.tokens - created  # what was read lies in front, where the longer windows are
    long_tokens = max(0, written.long_tokens - overlap)
    usage["input_tokens"] = rest - created
    usage[CREATED] = created
    usage["cache_creation"] = {
        "ephemeral_5m_input_tokens": created - long_tokens,
        "ephemeral_1h_input_tokens": long_tokens,
    }
    return True


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0
