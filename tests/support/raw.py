"""A client of nothing but a DEALER: what reaches the master is exactly what a test sends."""

import os
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from kvpin.processes import pid_namespace
from kvpin.protocol import (
    PROTOCOL_VERSION,
    Hello,
    ReplyBody,
    Request,
    RequestBody,
    Response,
    Welcome,
    decode_response,
    encode,
)

ANSWER_MS = 10_000  # generous: how long a loaded machine may take

Reply = TypeVar("Reply", bound=msgspec.Struct)


class RawClient:
    def __init__(self, address: str, identity: bytes | None = None, receive_queue: int = 1000) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(address)
        self.epoch = 0
        self._next_id = 0

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hello(self, **fields: object) -> Welcome:
        """Say Hello as this process, and use the epoch from then on."""
        welcome = self.ask(own_hello(**fields), Welcome)
        self.epoch = welcome.epoch
        return welcome

    def ask(self, body: RequestBody, reply: type[Reply], *, request_id: int | None = None) -> Reply:
        """One request, whose answer must be a `reply`."""
        answer = self.request(body, request_id=request_id)
        assert isinstance(answer, reply), answer
        return answer

    def request(self, body: RequestBody, *, request_id: int | None = None) -> ReplyBody:
        if request_id is None:
            self._next_id += 1
            request_id = self._next_id
        self.socket.send(encode(Request(request_id, self.epoch, body)))
        response = self.receive()
        assert response.request_id == request_id
        return response.body

    def receive(self, timeout_ms: int = ANSWER_MS) -> Response:
        assert self.socket.poll(timeout_ms), "no answer"
        return decode_response(self.socket.recv())


def own_hello(**fields: object) -> Hello:
    """A Hello of this process, which writes itself; `fields` change it."""
    own = {"name": "raw", "pid": os.getpid(), "writer_pid": os.getpid(), "pid_namespace": pid_namespace()}
    return Hello(**{"protocol": PROTOCOL_VERSION, **own, **fields})  # type: ignore[arg-type]
