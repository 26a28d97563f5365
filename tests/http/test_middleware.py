"""The middleware against an application that isn't an engine: what it passes on, and what it never spoils."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpin.http.engine import RenderError
from kvpin.http.sidefield import MarkedPrefix, SideField, sign, verify
from kvpin.protocol import Grant, MarkReport
from tests.http.support import JSON, KEY, MARK, SSE, SYSTEM, App, Exchange, Front, chat, gone, openai_answer, unmarked


def reports(front: Front, covered: float = 1.0, refusal: Grant = Grant.NONE) -> Exchange:
    """Find the ids first, then answer with a report for them."""
    (prefix,) = prefixes(front.ask(chat()))
    end = int(prefix.end_token * covered) // 16 * 16
    front.reports = [MarkReport(bytes.fromhex(prefix.id), prefix.end_token, end, end, 0, refusal)]
    return front.ask(chat())


def prefixes(exchange: Exchange) -> list[MarkedPrefix]:
    field = verify(exchange.side_field, KEY)
    assert field is not None
    return field.prefixes


# --- what the engine gets -------------------------------------------------------------------------------------------


def test_an_unmarked_body_passes_byte_for_byte() -> None:
    raw = json.dumps(unmarked(), indent=3).encode()
    front = Front()
    exchange = front.ask(raw)
    assert exchange.app_body == raw
    assert exchange.body == openai_answer()
    assert not [name for name in exchange.headers if name.startswith("x-kvpin")]
    assert front.engine.rendered == 0
    assert front.client.asked == []


def test_a_body_that_only_speaks_of_markers_passes_byte_for_byte() -> None:
    tools = [{"parameters": {"kvpin": 1}}]
    body = {"messages": [{"role": "user", "content": "what is cache_control?"}], "tools": tools}
    raw = json.dumps(body, indent=3).encode()
    assert Front().ask(raw).app_body == raw


def test_a_marked_body_gets_a_signed_side_field_and_loses_its_markers() -> None:
    exchange = Front().ask(chat(user="é", kv_transfer_params={"other": 1}))
    sent = exchange.app_json
    assert sent.pop("kv_transfer_params").keys() == {"other", "kvpin"}
    expected = chat(user="é")
    del expected["messages"][0]["content"][0]["cache_control"]
    assert sent == expected
    (prefix,) = prefixes(exchange)
    assert (prefix.end_token % 16, prefix.ttl_ms, prefix.label) == (0, 300_000, "")
    assert dict(exchange.app_scope["headers"])[b"content-length"] == str(len(exchange.app_body)).encode()


def test_a_null_marker_is_stripped_and_means_nothing() -> None:
    body = unmarked() | {"cache_control": None}
    exchange = Front().ask(body)
    assert exchange.app_json == unmarked()
    assert "x-kvpin-status" not in exchange.headers


def test_the_label_header_wins_over_the_setting() -> None:
    front = Front(label="default")
    assert prefixes(front.ask(chat()))[0].label == "default"
    assert prefixes(front.ask(chat(), headers=[(b"x-kvpin-label", b"team-a")]))[0].label == "team-a"


@pytest.mark.parametrize("spelled", ["kvpin", "kvp\\u0069n"])
def test_a_clients_side_field_is_dropped(spelled: str) -> None:
    forged = sign(SideField([MarkedPrefix("00" * 16, 64, 1000)]), b"x" * 32)
    body = unmarked() | {"kv_transfer_params": {"KVPIN": forged, "other": 1}}
    front = Front()
    exchange = front.ask(json.dumps(body).replace("KVPIN", spelled).encode())
    assert exchange.app_json["kv_transfer_params"] == {"other": 1}
    assert front.counters["side_fields_dropped"] == 1


def test_a_clients_side_field_is_replaced_in_a_marked_request() -> None:
    genuine = sign(SideField([MarkedPrefix("00" * 16, 64, 10**9)]), KEY)
    (prefix,) = prefixes(Front().ask(chat(kv_transfer_params={"kvpin": genuine})))
    assert prefix.ttl_ms == 300_000


def test_other_routes_and_methods_pass() -> None:
    raw = json.dumps(chat()).encode()
    assert Front().ask(raw, path="/v1/completions").app_body == raw
    assert Front().ask(raw, scope={"method": "GET"}).app_body == raw
    assert Front().ask(raw, headers=[(b"content-encoding", b"gzip")]).app_body == raw
    assert Front().ask(raw, scope={"path": "/api/v1/chat/completions", "root_path": "/api"}).app_body != raw


def test_before_the_engine_is_there_everything_passes() -> None:
    front = Front()
    front.service = None
    raw = json.dumps(chat()).encode()
    assert front.ask(raw).app_body == raw


def in_pieces(raw: bytes, size: int = 60) -> list[dict[str, Any]]:
    starts = range(0, len(raw), size)
    return [{"type": "http.request", "body": raw[i : i + size], "more_body": i + size < len(raw)} for i in starts]


def test_a_body_in_pieces() -> None:
    raw = json.dumps(chat()).encode()
    assert prefixes(Front().ask(raw, messages=in_pieces(raw)))


def test_a_body_over_the_limit_passes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpin.http.middleware.BODY_BYTES_MAX", 100)
    raw = json.dumps(chat()).encode()
    front = Front()
    exchange = front.ask(raw, messages=in_pieces(raw))
    assert exchange.app_body == raw
    assert exchange.headers["x-kvpin-status"] == "none; reason=too_large"
    assert front.counters["requests_too_large"] == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"cache_control",
        b'{"cache_control": ',
        b'"cache_control"',
        b'["cache_control"]',
        b'{"messages": [{"cache_control": 1}, "x"], "\xff": 1}',
        b"[" * 100_000 + b'"cache_control"' + b"]" * 100_000,
        b'{"cache_control": {"type": "ephemeral"}, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe cache_control",
    ],
    ids=repr,
)
def test_malformed_bodies_reach_the_engine_as_they_are(raw: bytes) -> None:
    exchange = Front().ask(raw)
    assert exchange.app_body == raw
    assert exchange.status == 200


ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(MARK)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["cache_control", "content", "text", "type", "role", "kvpin", "function", "tool_calls"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=10,
)


@given(
    body=st.dictionaries(
        st.sampled_from(["messages", "tools", "system", "cache_control", "kv_transfer_params", "cache_salt"]), ODD
    ),
    path=st.sampled_from(["/v1/chat/completions", "/v1/messages"]),
)
def test_no_body_is_too_odd_to_pass(body: dict[str, Any], path: str) -> None:
    front = Front()
    exchange = front.ask(json.dumps(body).encode(), path=path)
    assert exchange.status == 200
    assert exchange.app_body
    assert "cache_control" not in exchange.app_json


# --- trouble --------------------------------------------------------------------------------------------------------


def test_what_the_engine_cannot_render_goes_on_unmarked() -> None:
    front = Front()
    front.engine.fails = RenderError("no user query")
    exchange = front.ask(chat())
    assert exchange.headers["x-kvpin-status"] == "none; reason=unrenderable"
    assert exchange.side_field is None
    assert "cache_control" not in exchange.app_body.decode()


def test_a_fault_of_ours_is_counted_and_the_request_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    front.engine.fails = ZeroDivisionError("bug")
    exchange = front.ask(chat())
    assert (exchange.status, exchange.body) != (500, b"")
    assert exchange.headers["x-kvpin-status"] == "none; reason=error"
    assert front.counters["faults"] == 1
    assert "event=fault where=locate" in caplog.text
    assert SYSTEM not in caplog.text


def test_an_engine_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpin.http.service.LOCATE_S_MAX", 0.01)
    front = Front()

    async def render(*arguments: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(front.engine, "render", render)
    assert front.ask(chat()).headers["x-kvpin-status"] == "none; reason=timeout"


def test_without_a_connector_markers_are_stripped_only() -> None:
    front = Front()
    front.engine.protects = False
    exchange = front.ask(chat())
    assert exchange.side_field is None
    assert exchange.headers["x-kvpin-status"] == "none; reason=no_connector"
    assert "cache_control" not in exchange.app_body.decode()


def test_a_master_that_is_gone_is_not_zero() -> None:
    exchange = Front(gone).ask(chat())
    assert exchange.headers["x-kvpin-status"] == "unknown; reason=unavailable"
    assert "x-kvpin-protected-tokens" not in exchange.headers
    assert exchange.body == openai_answer()


def test_a_silent_master_is_not_waited_for_longer_than_the_deadline() -> None:
    front = Front(lambda body: None, report_wait_ms=10)
    assert front.ask(chat()).headers["x-kvpin-status"] == "unknown; reason=unavailable"
    assert front.counters["reports_missing"] == 1


# --- what the client gets -------------------------------------------------------------------------------------------


def test_all_protected() -> None:
    exchange = reports(Front())
    end = prefixes(exchange)[0].end_token
    assert exchange.headers["x-kvpin-status"] == "ok"
    assert exchange.headers["x-kvpin-protected-tokens"] == str(end)
    assert exchange.headers["x-kvpin-prefixes"] == f"{prefixes(exchange)[0].id};tokens={end};ttl=300"
    assert exchange.json["usage"]["prompt_tokens_details"] == {
        "cache_write_tokens": end,
        "cache_creation_input_tokens": end,
    }
    assert exchange.headers["content-length"] == str(len(exchange.body))
    assert exchange.json["choices"] == json.loads(openai_answer())["choices"]


@pytest.mark.parametrize(
    ("covered", "refusal", "status"),
    [
        (0.5, Grant.CAPACITY_EXCEEDED, "partial; reason=capacity"),
        (0.0, Grant.CAPACITY_EXCEEDED, "none; reason=capacity"),
        (0.5, Grant.GAP, "partial; reason=gap"),
        (0.5, Grant.NONE, "pending"),
    ],
)
def test_partly_protected(covered: float, refusal: Grant, status: str) -> None:
    exchange = reports(Front(), covered, refusal)
    assert exchange.headers["x-kvpin-status"] == status
    details = exchange.json["usage"]["prompt_tokens_details"]
    assert (details is None) is (status == "pending")


def test_a_breakpoint_that_cannot_be_proven_is_named() -> None:
    body = chat()
    body["messages"][1]["content"] = [{"type": "image_url", "image_url": {"url": "x"}, "cache_control": MARK}]
    exchange = Front().ask(body)
    assert exchange.headers["x-kvpin-notes"] == "messages.1.content.0: not_text"


def test_notes_survive_any_text() -> None:
    body = chat()
    body["messages"][1]["cache_control"] = {"type": "ephemeral", "ttl": "é\r\nx: y"}
    notes = Front().ask(body).headers["x-kvpin-notes"]
    assert notes.isascii()
    assert notes.isprintable()


def test_a_report_that_completes_late_is_waited_for() -> None:
    front = Front()
    (prefix,) = prefixes(front.ask(chat()))
    done = MarkReport(bytes.fromhex(prefix.id), prefix.end_token, prefix.end_token, prefix.end_token, 0)
    front.client.asked.clear()

    original = front.client.answer

    def late(body: Any) -> Any:
        if len(front.client.asked) >= 3:
            front.reports = [done]
        return original(body)

    front.client.answer = late
    assert front.ask(chat()).headers["x-kvpin-status"] == "ok"
    assert len(front.client.asked) == 3


def test_a_master_that_falls_silent_does_not_void_what_it_has_said() -> None:
    front = Front(report_wait_ms=20)
    front.reports = []
    original = front.client.answer
    front.client.answer = lambda body: original(body) if len(front.client.asked) == 1 else None
    assert front.ask(chat()).headers["x-kvpin-status"] == "pending"
    assert len(front.client.asked) == 2


def test_an_error_answer_is_left_alone() -> None:
    error = b'{"error": {"message": "no"}, "usage": {"prompt_tokens": 1}}'
    exchange = Front().ask(chat(), app=lambda exchange: App(exchange, [error], status=404))
    assert exchange.status == 404
    assert exchange.body == error


def test_an_answer_of_another_type_is_left_alone() -> None:
    exchange = Front().ask(chat(), app=lambda e: App(e, [b"a", b"b"], headers=[(b"content-type", b"text/plain")]))
    assert exchange.body == b"ab"


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"usage": null}', b'{"usage": 3}', b'{"usage": {}}'])
def test_a_malformed_answer_is_left_alone(answer: bytes) -> None:
    exchange = Front().ask(chat(), app=lambda exchange: App(exchange, [answer]))
    assert exchange.body == answer


def test_a_json_answer_over_the_limit_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpin.http.answer.REPLY_BYTES_MAX", 20)
    chunks = [b'{"usage": {"prompt_tokens": 1}, ', b'"a": "' + b"x" * 100, b'"}']
    exchange = Front().ask(chat(), app=lambda exchange: App(exchange, chunks))
    assert exchange.body == b"".join(chunks)


def test_a_disconnect_reaches_the_application() -> None:
    exchange = Front().ask(chat(), app=lambda exchange: App(exchange, [], listens=True))
    assert exchange.app_disconnected
    assert exchange.sent == []


def test_a_client_that_leaves_within_its_body() -> None:
    front = Front()
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    assert front.ask(b"{", messages=messages).app_disconnected
    assert "requests_too_large" not in front.counters


# --- streams --------------------------------------------------------------------------------------------------------


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


STREAM = [
    event(choices=[{"delta": {"content": 'the "usage": of \\u2028 words\n\n'}}], usage=None),
    event(choices=[{"delta": {"content": "b"}}], usage={"prompt_tokens": 100}),
    event(choices=[], usage={"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 32}}),
    b"data: [DONE]\n\n",
]


def stream(front: Front, chunks: list[bytes], path: str = "/v1/chat/completions") -> Exchange:
    return front.ask(chat(stream=True), path, app=lambda exchange: App(exchange, chunks, headers=SSE))


def protected(front: Front) -> int:
    (prefix,) = prefixes(front.ask(chat()))
    front.reports = [MarkReport(bytes.fromhex(prefix.id), prefix.end_token, prefix.end_token, prefix.end_token, 0)]
    return prefix.end_token


@pytest.mark.parametrize("cut", [1, 7, 50, 10_000])
def test_a_streams_last_usage_is_completed_however_it_is_cut(cut: int) -> None:
    front = Front()
    end = protected(front)
    whole = b"".join(STREAM)
    chunks = STREAM if cut == 10_000 else [whole[i : i + cut] for i in range(0, len(whole), cut)]
    exchange = stream(front, chunks)
    events = exchange.body.split(b"\n\n")
    assert events[0] + b"\n\n" == STREAM[0]
    assert events[1] + b"\n\n" == STREAM[1]
    assert events[3:] == [b"data: [DONE]", b""]
    assert json.loads(events[2][6:])["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 32,
        "cache_write_tokens": end,
        "cache_creation_input_tokens": end,
    }
    assert exchange.headers["x-kvpin-status"] == "ok"


def test_events_go_out_as_they_come() -> None:
    front = Front()
    protected(front)
    exchange = stream(front, STREAM)
    assert [message.get("body") for message in exchange.sent[1:3]] == STREAM[:2]


def test_a_stream_is_not_held_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpin.http.answer.EVENT_BYTES_MAX", 100)
    chunks = [b"data: " + b"x" * 60] * 5 + [b"\n\n", STREAM[2]]
    front = Front()
    protected(front)
    exchange = stream(front, chunks)
    assert exchange.body == b"".join(chunks)
    assert len(exchange.sent[2]["body"]) + len(exchange.sent[1]["body"]) > 100


def test_the_report_is_asked_again_before_the_last_usage() -> None:
    front = Front()
    stream(front, STREAM)  # nothing known at the start
    end = protected(front)
    known, front.reports = front.reports, None
    original = front.client.answer
    seen: list[int] = []

    def later(body: Any) -> Any:
        seen.append(1)
        if len(seen) > 8:  # after the headers' patience
            front.reports = known
        return original(body)

    front.client.answer = later
    exchange = stream(front, STREAM)
    assert exchange.headers["x-kvpin-status"] == "pending"
    assert f'"cache_write_tokens":{end}'.encode() in exchange.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@given(chunks=st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([*STREAM, b'{"usage":', b"\n", b"data:"]))))
def test_any_stream_passes(path: str, chunks: list[bytes]) -> None:
    front = Front(gone)
    exchange = stream(front, chunks, path)
    if path == "/v1/chat/completions":
        assert exchange.body == b"".join(chunks)
    else:
        assert exchange.body.count(b"\n\n") == b"".join(chunks).count(b"\n\n")


# --- strict mode ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "dialect"), [("/v1/chat/completions", "openai"), ("/v1/messages", "anthropic")])
def test_strict_mode_answers_in_the_engines_own_form(path: str, dialect: str) -> None:
    front = Front(strict=True)
    exchange = front.ask(chat(cache_control={"type": "permanent"}), path)
    assert exchange.status == 400
    assert exchange.json["dialect"] == dialect
    assert "must be" in exchange.json["message"]
    assert exchange.app_body == b""
    assert dict(exchange.sent[0]["headers"])[JSON[0][0]] == JSON[0][1]


def test_strict_mode_lets_good_markers_pass() -> None:
    assert prefixes(Front(strict=True).ask(chat()))
