"""ASGI middleware: takes cache markers out of requests, tells the engine what they mean, and completes the answer.

It belongs behind the engine's authentication. Requests that carry nothing of interest pass as they are, and so does
every request that kvpin has trouble with: the cache may never fail one.
"""

import json
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpin.http.answer import Answer
from kvpin.http.places import Dialect
from kvpin.http.service import UNTOUCHED, Prepared, Refusal, Service
from kvpin.limits import BODY_BYTES_MAX, LABEL_BYTES_MAX

ROUTES = {"/v1/chat/completions": Dialect.OPENAI, "/v1/messages": Dialect.ANTHROPIC}
LABEL_HEADER = b"x-kvpin-label"
TOO_LARGE = [(b"x-kvpin-status", b"none; reason=too_large")]


class Holder(Protocol):
    """The service is made after the middleware, when the engine is there."""

    service: Service | None


class CacheControlMiddleware:
    def __init__(self, app: ASGIApp, holder: Holder) -> None:
        self.app = app
        self._holder = holder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = _dialect_of(scope)
        service = self._holder.service
        if dialect is None or service is None:
            await self.app(scope, receive, send)
            return
        taken, body = await _read_body(receive)
        if body is None:
            if taken[-1]["type"] == "http.request":
                service.counters.add("requests_too_large")
                send = _with_headers(send, TOO_LARGE)
            await self.app(scope, _Replay(taken, receive), send)
            return
        prepared = await service.prepare(dialect, body, _label_of(scope))
        if isinstance(prepared, Refusal):
            await _answer_json(send, 400, service.engine.error(dialect, 400, prepared.text))
            return
        if prepared is UNTOUCHED:
            await self.app(scope, _Replay(taken, receive), send)
            return
        await self._pass_on(service, dialect, prepared, taken, scope, receive, send)

    async def _pass_on(
        self,
        service: Service,
        dialect: Dialect,
        prepared: Prepared,
        taken: list[Message],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if prepared.body is not None:
            taken = [{"type": "http.request", "body": prepared.body, "more_body": False}]
            scope = {**scope, "headers": _resized(scope, len(prepared.body))}
        answer = send if prepared.outcome is None else Answer(service, dialect, prepared, send).send
        await self.app(scope, _Replay(taken, receive), answer)


class _Replay:
    """An ASGI `receive` that gives messages already taken again, and then what comes: a disconnect must get through."""

    def __init__(self, taken: list[Message], receive: Receive) -> None:
        self._taken = taken[::-1]
        self._receive = receive

    async def __call__(self) -> Message:
        return self._taken.pop() if self._taken else await self._receive()


async def _read_body(receive: Receive) -> tuple[list[Message], bytes | None]:
    """The messages of the body, and the body; None if it's over the limit or the client has left."""
    taken: list[Message] = []
    size = 0
    while True:
        message = await receive()
        taken.append(message)
        if message["type"] != "http.request":
            return taken, None
        size += len(message.get("body", b""))
        if size > BODY_BYTES_MAX:
            return taken, None
        if not message.get("more_body", False):
            return taken, b"".join(message.get("body", b"") for message in taken)


def _dialect_of(scope: Scope) -> Dialect | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    dialect = ROUTES.get(scope["path"].removeprefix(scope.get("root_path", "")))
    if dialect is not None and any(name == b"content-encoding" for name, _ in scope["headers"]):
        return None  # no engine takes that; if one does, it's not ours to unpack
    return dialect


def _label_of(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == LABEL_HEADER:
            return bytes(value)[:LABEL_BYTES_MAX].decode("utf-8", errors="ignore")
    return ""


def _resized(scope: Scope, size: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(size).encode())]


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *headers]}
        await send(message)

    return sending


async def _answer_json(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
