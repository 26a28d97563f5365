"""An ASGI application in the engine's place, a master that answers from a script, and one request at a time."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from kvpin.calls import PendingCall
from kvpin.config import ClientConfig
from kvpin.errors import KvpinError, Unavailable
from kvpin.http.middleware import CacheControlMiddleware
from kvpin.http.service import Service
from kvpin.http.settings import HttpConfig
from kvpin.protocol import MarkReport, ReplyBody, Report, Reported, RequestBody
from tests.http.fake_engine import FakeEngine

KEY = b"k" * 32
JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
MARK = {"type": "ephemeral"}
SYSTEM = "Answer questions about parcels, briefly and with the handbook's section. " * 3


class NoLine:
    def give_up(self, call: PendingCall) -> None:
        pass

    def timed_out(self, what: str) -> None:
        pass


class ScriptedClient:
    """`answer` says what a request gets: a reply, an error, or None for silence."""

    def __init__(self, answer: Callable[[RequestBody], ReplyBody | KvpinError | None]) -> None:
        self.answer = answer
        self.asked: list[RequestBody] = []
        self.config = ClientConfig()

    def submit(self, body: RequestBody) -> PendingCall:
        self.asked.append(body)
        call = PendingCall(body, NoLine(), time.monotonic(), None)
        outcome = self.answer(body)
        if outcome is not None:
            call.settle(outcome)
        return call


def gone(body: RequestBody) -> KvpinError:
    return Unavailable("no master")


@dataclass
class Exchange:
    """What the application saw, and what the client got."""

    app_body: bytes = b""
    app_scope: Scope = field(default_factory=dict)
    app_disconnected: bool = False
    sent: list[Message] = field(default_factory=list)

    @property
    def app_json(self) -> Any:
        return json.loads(self.app_body)

    @property
    def side_field(self) -> Any:
        return (self.app_json.get("kv_transfer_params") or {}).get("kvpin")

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent if message["type"] == "http.response.body")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def openai_answer(**usage: Any) -> bytes:
    whole = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105, "prompt_tokens_details": None, **usage}
    return json.dumps({"choices": [{"message": {"content": 'say "usage": {}'}}], "usage": whole}).encode()


class App:
    """Reads the request and answers with `chunks`. `listens`: waits for a disconnect instead of answering."""

    def __init__(
        self,
        exchange: Exchange,
        chunks: Iterable[bytes],
        status: int = 200,
        headers: list[tuple[bytes, bytes]] = JSON,
        listens: bool = False,
    ) -> None:
        self.exchange = exchange
        self.chunks = list(chunks)
        self.status = status
        self.headers = headers
        self.listens = listens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.exchange.app_scope = scope
        while True:
            message = await receive()
            if message["type"] != "http.request":
                self.exchange.app_disconnected = True
                return
            self.exchange.app_body += message["body"]
            if not message.get("more_body"):
                break
        if self.listens:
            self.exchange.app_disconnected = (await receive())["type"] == "http.disconnect"
            return
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Front:
    """The middleware under test, with its engine and master."""

    def __init__(self, answer: Callable[[RequestBody], Any] | None = None, **config: Any) -> None:
        self.engine = FakeEngine()
        self.client = ScriptedClient(answer or self.all_opened)
        self.service: Service | None = Service(HttpConfig(**config), self.engine, self.client, KEY)  # type: ignore[arg-type]
        self.reports: list[MarkReport] | None = None

    def all_opened(self, body: RequestBody) -> ReplyBody:
        """As if every prefix of the last request had been protected anew, or as `reports` say."""
        assert isinstance(body, Report)
        if self.reports is None:
            return Reported(False, [])
        return Reported(True, self.reports)

    @property
    def counters(self) -> dict[str, int]:
        assert self.service is not None
        return self.service.counters.snapshot()

    def ask(
        self,
        body: Any,
        path: str = "/v1/chat/completions",
        app: Callable[[Exchange], App] | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
        messages: list[Message] | None = None,
        scope: dict[str, Any] | None = None,
    ) -> Exchange:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming = messages or [{"type": "http.request", "body": raw, "more_body": False}]
        incoming = [*incoming, {"type": "http.disconnect"}][::-1]
        exchange = Exchange()

        async def receive() -> Message:
            return incoming.pop()

        async def send(message: Message) -> None:
            exchange.sent.append(message)

        application = app(exchange) if app else App(exchange, [openai_answer()])
        sized = [(b"content-length", str(len(raw)).encode()), *JSON, *headers]
        whole: Scope = {"type": "http", "method": "POST", "path": path, "headers": sized, **(scope or {})}
        asyncio.run(CacheControlMiddleware(application, self)(whole, receive, send))
        return exchange


def chat(**extra: Any) -> dict[str, Any]:
    """A chat whose system text is marked."""
    system = {"type": "text", "text": SYSTEM, "cache_control": MARK}
    messages = [{"role": "system", "content": [system]}, {"role": "user", "content": "Order 12?"}]
    return {"model": "m", "messages": messages, **extra}


def unmarked() -> dict[str, Any]:
    return json.loads(json.dumps(chat()).replace('"cache_control": {"type": "ephemeral"}', '"x": 1'))  # type: ignore[no-any-return]
