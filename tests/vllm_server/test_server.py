"""Marked requests to a real server, in both dialects: what is granted, shown, ended, and what a client can't do."""

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpin.http.sidefield import MarkedPrefix, SideField, sign
from kvpin.keys import prefix_ids
from tests.support.master import MasterProcess, wait_until
from tests.vllm_server.server import BLOCK_TOKENS, Server, events

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    """As the engine loads it: transformers may put a model's own splitting over that of the file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def fresh_text(words: int = 12) -> str:
    """Text that no other test has sent."""
    number = next(_numbers)
    return f"Chapter {number}. " + f"The quick brown fox number {number} jumps over the lazy dog. " * words


def part(text: str, marker: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": marker} if marker else {})


def marked_chat(text: str, marker: Any = MARK) -> list[dict[str, Any]]:
    return [{"role": "system", "content": [part(text, marker)]}, {"role": "user", "content": "Which one?"}]


def granted(response: httpx.Response) -> list[tuple[str, int]]:
    """(id, tokens) of each prefix in the headers."""
    assert response.status_code == 200, response.text
    shown = [each.strip().split(";") for each in response.headers["x-kvpin-prefixes"].split(",")]
    return [(prefix_id, int(tokens.removeprefix("tokens="))) for prefix_id, tokens, _ in shown]


def brute_force_tokens(tokenizer: Any, head: str, whole: str) -> int:
    """Whole blocks of those tokens of the prompt that lie within its beginning."""
    assert whole.startswith(head)
    ends = [end for _, end in tokenizer(whole, return_offsets_mapping=True)["offset_mapping"]]
    tokens = sum(1 for end in ends if end <= len(head))
    return tokens - tokens % BLOCK_TOKENS


# --- chat completions -----------------------------------------------------------------------------------------------


def test_a_marked_chat_is_protected_and_says_so(server: Server, tokenizer: Any) -> None:
    text = fresh_text()
    response = server.chat(marked_chat(text))
    ((prefix_id, tokens),) = granted(response)
    head = f"<|im_start|>system\n{text.rstrip()}"
    whole = f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\nWhich one?<|im_end|>\n<|im_start|>assistant\n"
    assert tokens == brute_force_tokens(tokenizer, head, whole) > 0
    assert response.headers["x-kvpin-status"] == "ok"
    assert response.headers["x-kvpin-protected-tokens"] == str(tokens)
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["cache_write_tokens"] == details["cache_creation_input_tokens"] == tokens
    assert details["cached_tokens"] == 0
    assert response.json()["usage"]["prompt_tokens"] == len(tokenizer.encode(whole))
    shown = server.prefixes()[prefix_id]
    assert (shown["end_token"], shown["covered_tokens"], shown["ttl_ms"]) == (tokens, tokens, 300_000)


def test_ids_are_those_of_the_engines_own_tokens(server: Server, model: Path) -> None:
    messages = marked_chat(fresh_text())
    ((prefix_id, tokens),) = granted(server.chat(messages))
    engine_tokens = server.post("/tokenize", {"model": "tiny", "messages": messages}).json()["tokens"]
    scope = json.dumps([str(model), "", ""])
    assert prefix_ids(scope, engine_tokens, [tokens])[0].hex() == prefix_id


def test_the_second_request_reads_and_renews(server: Server) -> None:
    messages = marked_chat(fresh_text())
    first, second = server.chat(messages), server.chat(messages)
    assert granted(first) == granted(second)
    ((prefix_id, tokens),) = granted(second)
    details = second.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= tokens
    assert details["cache_write_tokens"] == 0
    assert server.prefixes()[prefix_id]["renewals"] > 0
    assert first.json()["choices"][0]["message"] == second.json()["choices"][0]["message"]


def test_an_unmarked_request_is_answered_as_without_kvpin(server: Server) -> None:
    text = fresh_text()
    before = set(server.prefixes())
    plain = server.chat(marked_chat(text, None))
    assert not [name for name in plain.headers if name.startswith("x-kvpin")]
    assert "cache_write_tokens" not in plain.text
    assert set(server.prefixes()) == before
    marked = server.chat(marked_chat(text))
    assert marked.json()["choices"][0]["message"] == plain.json()["choices"][0]["message"]
    ((_, tokens),) = granted(marked)
    assert marked.json()["usage"]["prompt_tokens_details"]["cache_write_tokens"] == tokens  # it was there unprotected


def test_a_stream_ends_with_a_true_usage(server: Server) -> None:
    messages = marked_chat(fresh_text())
    response = server.chat(messages, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    usage = events(response)[-1]["usage"]
    ((_, tokens),) = granted(response)
    assert usage["prompt_tokens_details"]["cache_write_tokens"] == tokens
    assert response.text.endswith("data: [DONE]\n\n")


def test_nested_breakpoints_hold_what_they_share_together(server: Server) -> None:
    messages = [
        {"role": "system", "content": [part(fresh_text(), HOUR)]},
        {"role": "user", "content": [part(fresh_text(), MARK), part("What does this say?")]},
    ]
    response = server.chat(messages)
    (outer, outer_tokens), (inner, inner_tokens) = granted(response)
    assert 0 < outer_tokens < inner_tokens
    assert response.json()["usage"]["prompt_tokens_details"]["cache_write_tokens"] == inner_tokens
    shown = server.prefixes()
    assert shown[outer]["blocks"] * BLOCK_TOKENS == outer_tokens
    assert shown[inner]["blocks"] * BLOCK_TOKENS == inner_tokens
    ended = server.evict(prefixes=[inner])
    assert ended["kept_blocks"] * BLOCK_TOKENS == outer_tokens
    assert ended["memory_blocks"] * BLOCK_TOKENS == inner_tokens - outer_tokens


def test_tools_are_marked_up_to_the_last(server: Server, tokenizer: Any) -> None:
    description = fresh_text(4)
    parameters = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    function = {"name": "find_order", "description": description, "parameters": parameters}
    tool = {"type": "function", "function": function, "cache_control": MARK}
    response = server.chat([{"role": "user", "content": "x"}], tools=[tool])
    ((_, tokens),) = granted(response)
    head = f"<|im_start|>tools\n[{json.dumps({'type': 'function', 'function': function})}"
    assert abs(tokens - len(tokenizer.encode(head))) <= BLOCK_TOKENS + 32  # vLLM adds fields of its own
    answer = server.post(
        "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{**tool}]}
    )
    covered = tokenizer.decode(answer.json()["tokens"][:tokens], skip_special_tokens=False)
    assert covered.startswith("<|im_start|>tools\n")
    assert "user" not in covered


@pytest.mark.parametrize(
    ("marker", "note"),
    [
        ("yes", "must be"),
        ({"type": "ephemeral", "ttl": "soon"}, "ttl"),
        ({"type": "ephemeral", "ttl": "99h"}, "maximum"),
    ],
)
def test_a_bad_marker_never_fails_a_request(server: Server, marker: Any, note: str) -> None:
    response = server.chat(marked_chat(fresh_text(), marker))
    assert response.status_code == 200
    assert note in response.headers["x-kvpin-notes"]


def test_what_the_engine_refuses_it_refuses_as_ever(server: Server) -> None:
    bad = {"model": "nobody", "messages": marked_chat("x")}
    marked = server.post("/v1/chat/completions", bad)
    plain = server.post("/v1/chat/completions", {"model": "nobody", "messages": marked_chat("x", None)})
    assert (marked.status_code, marked.json()) == (plain.status_code, plain.json())
    assert marked.status_code == 404
    assert (
        server.chat([{"role": 7, "cache_control": MARK}]).status_code == server.chat([{"role": 7}]).status_code == 400
    )
    long = server.chat(marked_chat("word " * 4000))
    assert long.status_code == 400


# --- messages -------------------------------------------------------------------------------------------------------


def test_messages_count_what_was_written_read_and_neither(server: Server, tokenizer: Any) -> None:
    system = [part("You answer briefly."), part(fresh_text(), HOUR)]
    content = [part(fresh_text(), MARK), part("What should I do?")]
    body: dict[str, Any] = {"system": system, "messages": [{"role": "user", "content": content}]}
    first = server.messages(**body)
    (_, outer_tokens), (_, inner_tokens) = granted(first)
    joined = "".join(block["text"] for block in system)
    asked = "".join(block["text"] for block in content)
    whole = f"<|im_start|>system\n{joined}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert outer_tokens == brute_force_tokens(tokenizer, f"<|im_start|>system\n{joined.rstrip()}", whole)
    assert inner_tokens == brute_force_tokens(tokenizer, whole[: whole.index("What should I do?") - 1], whole)
    usage = first.json()["usage"]
    total = len(tokenizer.encode(whole))
    assert usage["cache_creation_input_tokens"] == inner_tokens
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": outer_tokens,
        "ephemeral_5m_input_tokens": inner_tokens - outer_tokens,
    }
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + inner_tokens == total
    again = server.messages(**body).json()["usage"]
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= inner_tokens
    assert again["input_tokens"] + again["cache_read_input_tokens"] == total


def test_a_messages_stream(server: Server) -> None:
    body = {"system": [part(fresh_text(), MARK)], "messages": [{"role": "user", "content": "x"}]}
    response = server.messages(**body, stream=True)
    ((_, tokens),) = granted(response)
    found = {event["type"]: event for event in events(response)}
    assert {"message_start", "content_block_delta", "message_delta", "message_stop"} <= found.keys()
    usage = found["message_delta"]["usage"]
    assert usage["cache_creation_input_tokens"] == tokens
    start = found["message_start"]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + tokens == start["input_tokens"]


def test_the_requests_own_marker_moves_with_the_conversation(server: Server) -> None:
    body = {"system": fresh_text(), "cache_control": MARK, "messages": [{"role": "user", "content": fresh_text()}]}
    ((_, first),) = granted(server.messages(**body))
    body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": fresh_text()}]
    ((_, second),) = granted(server.messages(**body))
    assert second > first


def test_a_tool_result_is_marked(server: Server) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part(fresh_text(), MARK)]}
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {"cache_control": "kept"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, part("And?")]},
    ]
    ((_, tokens),) = granted(server.messages(messages=messages))
    assert tokens > BLOCK_TOKENS


# --- ending protection ----------------------------------------------------------------------------------------------


def test_evict_by_messages_as_they_were_sent(server: Server) -> None:
    messages = marked_chat(fresh_text())
    ((prefix_id, tokens),) = granted(server.chat(messages))
    assert server.evict(messages=messages, dry_run=True)["ids"] == [prefix_id]
    ended = server.evict(messages=messages)
    assert (ended["prefixes"], ended["memory_blocks"] * BLOCK_TOKENS) == (1, tokens)
    assert prefix_id not in server.prefixes()


def test_evict_by_messages_without_markers(server: Server) -> None:
    text = fresh_text()
    ((prefix_id, _),) = granted(server.chat(marked_chat(text)))
    assert server.evict(messages=marked_chat(text, None))["ids"] == [prefix_id]


def test_evict_by_anthropic_messages(server: Server) -> None:
    body = {"system": [part(fresh_text(), MARK)], "messages": [{"role": "user", "content": "x"}]}
    ((prefix_id, _),) = granted(server.messages(**body))
    assert server.evict(**body)["ids"] == [prefix_id]


def test_evict_by_token_ids_id_and_label(server: Server) -> None:
    def protect(**headers: str) -> tuple[str, list[dict[str, Any]]]:
        messages = marked_chat(fresh_text())
        body = {"model": "tiny", "max_tokens": 2, "messages": messages}
        ((prefix_id, _),) = granted(server.post("/v1/chat/completions", body, **headers))
        return prefix_id, messages

    by_tokens, messages = protect()
    tokens = server.post("/tokenize", {"model": "tiny", "messages": messages}).json()["tokens"]
    assert server.evict(token_ids=tokens)["ids"] == [by_tokens]
    by_id, _ = protect()
    assert server.evict(prefixes=[by_id], mode="delete")["memory_blocks"] > 0
    by_label, _ = protect(**{"x-kvpin-label": "team-a"})
    assert server.prefixes()[by_label]["label"] == "team-a"
    assert server.evict(label="team-a")["ids"] == [by_label]
    assert not {by_tokens, by_id, by_label} & server.prefixes().keys()


# --- what a client can't do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_forged_side_field_protects_nothing(server: Server, path: str) -> None:
    forged = sign(SideField([MarkedPrefix("ab" * 16, 96, 10**7)]), b"x" * 32)
    text = fresh_text()
    body = {"model": "tiny", "max_tokens": 2, "kv_transfer_params": {"kvpin": forged}}
    body |= {"prompt": text} if path == "/v1/completions" else {"messages": marked_chat(text, None)}
    assert server.post(path, body).status_code == 200
    assert "ab" * 16 not in server.prefixes()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/prefixes"),
        ("GET", "/v1/cache/status"),
        ("POST", "/v1/cache/evict"),
        ("POST", f"/v1/cache/prefixes/{'00' * 16}/renew"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_without_the_api_key_there_is_nothing(server: Server, method: str, path: str) -> None:
    body = json.dumps({"messages": marked_chat("x"), "label": "x"})
    anonymous = httpx.request(method, f"{server.http.base_url}{path}", content=body if method == "POST" else None)
    assert anonymous.status_code == 401


# --- under load, and without a master -------------------------------------------------------------------------------


def test_many_at_once(server: Server) -> None:
    text = fresh_text()
    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda _: server.chat(marked_chat(text)), range(32)))
    assert {response.status_code for response in responses} == {200}
    assert len({response.json()["choices"][0]["message"]["content"] for response in responses}) == 1
    assert len({granted(response)[0] for response in responses}) == 1


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        "messages": marked_chat(fresh_text()),
    }
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_bytes())

    def running() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    wait_until(lambda: running() == 0, "the abandoned request has ended", 5)


def test_a_killed_master_fails_no_request(server: Server, master: MasterProcess) -> None:
    messages = marked_chat(fresh_text())
    before = server.chat(messages)
    master.kill()
    for _ in range(3):
        started_s = time.monotonic()
        response = server.chat(messages)
        assert response.status_code == 200
        assert time.monotonic() - started_s < 5
        assert response.headers["x-kvpin-status"] == "unknown; reason=unavailable"
        assert response.json()["choices"][0]["message"] == before.json()["choices"][0]["message"]
        assert "cache_write_tokens" not in response.text
    assert server.http.get("/v1/cache/prefixes").status_code == 503
    assert server.http.get("/v1/cache/status").json()["master"] is None
    master.start()
    wait_until(lambda: server.chat(messages).headers["x-kvpin-status"] == "ok", "protection is back")
