"""A master whose every answer a test decides: a ROUTER that the test itself reads and writes."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import zmq

from kvpin.protocol import (
    PROTOCOL_VERSION,
    Done,
    Hello,
    Ping,
    ReplyBody,
    Request,
    RequestBody,
    Response,
    SegmentInfo,
    Welcome,
    decode_request,
    encode,
)

ANSWER_MS = 10_000  # generous: how long a loaded machine may take

Body = TypeVar("Body", bound=RequestBody)


class ScriptedMaster:
    """Pings are answered on the way, and kept in `pings`, unless `deaf`."""

    def __init__(self, address: str, epoch: int = 7) -> None:
        self.address = address
        self.epoch = epoch
        self.deaf = False
        self.pings: list[Request] = []
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.LINGER, 0), (zmq.ROUTER_HANDOVER, 1), (zmq.ROUTER_MANDATORY, 1)):
            self._router.setsockopt(option, value)
        self._router.bind(address)
        self._peer = b""

    def __enter__(self) -> "ScriptedMaster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_ms: int = ANSWER_MS) -> Request | None:
        """The next request that is no Ping; None if there's none by then."""
        deadline_s = time.monotonic() + timeout_ms / 1000
        while self._router.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            self._peer, frame = self._router.recv_multipart()
            request = decode_request(frame)
            if not isinstance(request.body, Ping):
                return request
            self.pings.append(request)
            if not self.deaf:
                self.answer(request, Done())
        return None

    def serve_until(self, condition: Callable[[], bool]) -> None:
        """Answer Pings, or hear them if deaf, until the condition holds; no other request may come."""
        deadline_s = time.monotonic() + ANSWER_MS / 1000
        while not condition():
            assert time.monotonic() < deadline_s
            assert self.receive(timeout_ms=5) is None

    def expect(self, body: type[Body]) -> tuple[Request, Body]:
        request = self.receive()
        assert request is not None, f"no {body.__name__}"
        assert isinstance(request.body, body), request
        return request, request.body

    def answer(self, request: Request, body: ReplyBody, epoch: int | None = None) -> None:
        self.send(encode(Response(request.request_id, self.epoch if epoch is None else epoch, body)))

    def send(self, frame: bytes) -> None:
        self._router.send_multipart((self._peer, frame))

    def welcome(self, **fields: object) -> Request:
        """Wait for a Hello and answer it."""
        request, _ = self.expect(Hello)
        self.answer(request, self.welcome_body(**fields))
        return request

    def welcome_body(self, **fields: object) -> Welcome:
        own = {
            "epoch": self.epoch,
            "segment": SegmentInfo(f"/dev/shm/none-{self.epoch}", 1 << 20, self.epoch),
            "put_timeout_ms": 30_000,
            "lease_ms_max": 60_000,
            "ttl_ms_max": 60_000,
            "heartbeat_ms": 60_000,
            "protocol": PROTOCOL_VERSION,
        }
        return Welcome(**{**own, **fields})  # type: ignore[arg-type]
