"""The response to a marked request on its way out: headers that tell what was granted, and a completed usage.

The response's start is held until its first bytes: by then the engine has seen the prompt. A JSON answer is held whole
(to a limit); of a stream only the events that carry usage are touched.
"""

import json
from typing import Any

from starlette.types import Message, Send

from kvpin.http.outcome import Outcome
from kvpin.http.places import Dialect
from kvpin.http.service import Prepared, Service
from kvpin.http.usage import complete_answer
from kvpin.limits import EVENT_BYTES_MAX, REPLY_BYTES_MAX, REPORT_WAIT_STREAM_MS

_EVENT_END = b"\n\n"
_USAGE = b'"usage":'


class Answer:
    """An ASGI `send` for one response."""

    def __init__(self, service: Service, dialect: Dialect, prepared: Prepared, send: Send) -> None:
        self._service = service
        self._dialect = dialect
        self._prepared = prepared
        self._send = send
        self._start: Message | None = None  # held
        self._streaming = False
        self._opaque = False  # pass what comes
        self._held = bytearray()  # of a JSON answer, or an event's beginning

    async def send(self, message: Message) -> None:
        """Take a message of the application and pass on what's due."""
        if message["type"] == "http.response.start":
            self._start = message
            self._streaming = _content_type(message).startswith("text/event-stream")
            self._opaque = message["status"] != 200 or not (
                self._streaming or _content_type(message).startswith("application/json")
            )
        elif message["type"] != "http.response.body" or self._opaque:
            await self._begin(None)
            await self._send(message)
        elif self._streaming:
            await self._stream(message)
        else:
            await self._whole(message)

    async def _whole(self, message: Message) -> None:
        """A JSON answer: complete it when all of it is there."""
        self._held += message.get("body", b"")
        more = bool(message.get("more_body", False))
        if len(self._held) > REPLY_BYTES_MAX:
            await self._begin(None)
            self._opaque = True
        elif more:
            return
        else:
            outcome = await self._service.report(self._prepared, self._service.config.report_wait_ms)
            self._held = bytearray(self._completed(bytes(self._held), outcome))
            await self._begin(outcome, len(self._held))
        await self._send({"type": "http.response.body", "body": bytes(self._held), "more_body": more})
        self._held.clear()

    async def _stream(self, message: Message) -> None:
        if self._start is not None:
            await self._begin(await self._service.report(self._prepared, REPORT_WAIT_STREAM_MS))
        chunk = message.get("body", b"")
        if self._held or _USAGE in chunk or not chunk.endswith(_EVENT_END):
            chunk = await self._events(chunk, last=not message.get("more_body", False))
        await self._send({**message, "body": chunk})

    async def _events(self, chunk: bytes, *, last: bool) -> bytes:
        """All whole events that there are now, those with usage completed."""
        self._held += chunk
        end = self._held.rfind(_EVENT_END)
        end = len(self._held) if last else end + len(_EVENT_END) if end >= 0 else 0
        ready = bytes(self._held[:end])
        del self._held[:end]
        if len(self._held) > EVENT_BYTES_MAX:
            ready += bytes(self._held)
            self._held.clear()
            self._opaque = True
        if _USAGE not in ready:
            return ready
        outcome = await self._service.report(self._prepared, self._service.config.report_wait_ms)
        return _EVENT_END.join(self._completed_event(event, outcome) for event in ready.split(_EVENT_END))

    def _completed_event(self, event: bytes, outcome: Outcome) -> bytes:
        if _USAGE not in event:
            return event
        lines = event.split(b"\n")
        for index, line in enumerate(lines):
            if line.startswith(b"data:") and _USAGE in line:
                data = line[5:].strip()
                lines[index] = line.replace(data, self._completed(data, outcome))
        return b"\n".join(lines)

    def _completed(self, text: bytes, outcome: Outcome) -> bytes:
        """The JSON with a completed usage; as it was if it can't be."""
        try:
            answer = json.loads(text)
            if not isinstance(answer, dict) or self._is_interim(answer):
                return text
            if not complete_answer(self._dialect, answer, outcome.written):
                return text
            return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return text  # no JSON, or not Unicode: the engine's own affair
        except Exception:
            self._service.fault("usage")
            return text

    def _is_interim(self, answer: dict[str, Any]) -> bool:
        """A stream's event with usage so far, which tells nothing about caches yet."""
        return self._streaming and self._dialect is Dialect.OPENAI and bool(answer.get("choices"))

    async def _begin(self, outcome: Outcome | None, body_bytes: int | None = None) -> None:
        """Let the response's start go, with our headers (`outcome` None: those that need no report)."""
        start, self._start = self._start, None
        if start is None:
            return
        headers = list(start.get("headers", []))
        if body_bytes is not None:
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
            headers.append((b"content-length", str(body_bytes).encode()))
        outcome = outcome or (self._prepared.outcome if start["status"] == 200 else None)
        await self._send({**start, "headers": headers + (outcome.headers() if outcome else [])})


def _content_type(start: Message) -> str:
    for name, value in start.get("headers", []):
        if name.lower() == b"content-type":
            return bytes(value).decode("latin-1").lower()
    return ""
