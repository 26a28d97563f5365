"""Whatever arrives at a live master's socket: an answer, a counter, and no harm to anybody else."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpin.limits import BATCH_KEYS_MAX, FRAME_BYTES_MAX, KEY_BYTES_MAX, OBJECT_BYTES_MAX
from kvpin.protocol import (
    Clear,
    Done,
    ErrorCode,
    Exists,
    Failure,
    GetReplicas,
    ListPrefixes,
    Mark,
    Ping,
    Protect,
    PutItem,
    PutStart,
    Renew,
    Request,
    RequestBody,
    Stats,
    StatsReply,
    decode_response,
    encode,
)
from tests.support.master import MasterProcess, wait_until
from tests.support.raw import ANSWER_MS, RawClient

pack = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def live() -> Iterator[MasterProcess]:
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder:
        master = MasterProcess(Path(folder))
        master.start()
        yield master
        master.close()


@pytest.fixture(scope="module")
def client(live: MasterProcess) -> Iterator[RawClient]:
    with RawClient(live.address) as client:
        client.hello()
        yield client


def counter(client: RawClient, name: str) -> int:
    return client.ask(Stats(), StatsReply).values[name]


MALFORMED = {
    "empty": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(1000),
    "cut short": encode(Request(5, 0, Exists([b"key"])))[:-2],
    "too long": encode(Request(5, 0, Ping())) + b"x",
    "not an array": pack({"request_id": 5}),
    "no fields": pack([]),
    "no body": pack([5, 0]),
    "no tag": pack([5, 0, []]),
    "unknown tag": pack([5, 0, ["reboot"]]),
    "a reply's tag": pack([5, 0, ["done"]]),
    "tag of another type": pack([5, 0, [7]]),
    "text for a number": pack(["5", 0, ["ping"]]),
    "number for text": pack([5, 0, ["hello", 1, 2, 3]]),
    "text for bytes": pack([5, 0, ["exists", [{}]]]),
    "nil for a list": pack([5, 0, ["exists", None]]),
    "float for a number": pack([5, 0, ["release", [1.5]]]),
    "unknown mode": pack([5, 0, ["expire", [b"x" * 16], "explode"]]),
    "text that is no UTF-8": b"\x93\x05\x00\x94\xa5hello\x01\xa2\xff\xfe\x01",
    "length beyond the frame": b"\xdd\xff\xff\xff\xff\x01",
    "extension type": b"\xc7\x08\x05\x00\x00\x00\x00\x00\x00\x00\x00",
    "deeply nested": b"\x91" * 100_000 + b"\x00",
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_get_a_failure(client: RawClient, frame: bytes) -> None:
    before = counter(client, "server_frames_malformed")
    client.socket.send(frame)
    body = client.receive().body
    assert isinstance(body, Failure)
    assert body.code is ErrorCode.BAD_REQUEST
    assert "protocol" in body.message
    assert counter(client, "server_frames_malformed") == before + 1


def test_the_answer_to_a_malformed_request_carries_its_id(client: RawClient) -> None:
    client.socket.send(pack([4711, 0, ["reboot"]]))
    assert client.receive().request_id == 4711


@pytest.mark.parametrize("frames", [[b"", encode(Request(1, 0, Ping()))], [b"x"] * 100])
def test_messages_of_several_frames_are_refused(client: RawClient, frames: list[bytes]) -> None:
    client.socket.send_multipart(frames)
    body = client.receive().body
    assert isinstance(body, Failure)
    assert f"{len(frames)} frames" in body.message
    assert client.ask(Ping(), Done)


WRONG: dict[str, RequestBody] = {
    "too many keys": Exists([b"k"] * (BATCH_KEYS_MAX + 1)),
    "a key too long": Exists([b"k" * (KEY_BYTES_MAX + 1)]),
    "an empty key": Exists([b""]),
    "a negative size": PutStart([PutItem(b"k", -1)]),
    "an object too large": PutStart([PutItem(b"k", OBJECT_BYTES_MAX + 1)]),
    "a negative lease": GetReplicas([b"k"], -1),
    "a prefix id too short": Protect([b"k"], [16], [Mark(b"short", 16, 1000)]),
    "lists of unequal length": Protect([b"k"], [], [Mark(bytes(16), 16, 1000)]),
    "a negative ttl": Renew(bytes(16), -1),
    "a negative limit": ListPrefixes(limit=-1),
    "a label too long": PutStart([PutItem(b"k", 1)], [Mark(bytes(16), 16, 1000, "x" * 10_000)]),
    "numbers beyond 63 bits": PutStart([PutItem(b"k", 1, 2**64 - 1)]),
    "a key prefix too long": Clear(b"k" * (KEY_BYTES_MAX + 1)),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_well_formed_nonsense_gets_a_failure_that_says_what_is_wrong(client: RawClient, body: RequestBody) -> None:
    failure = client.ask(body, Failure)
    assert failure.code is ErrorCode.BAD_REQUEST
    assert len(failure.message) > 10


def test_an_oversized_frame_ends_the_connection_of_its_sender_only(live: MasterProcess, client: RawClient) -> None:
    with RawClient(live.address) as sender:
        sender.hello()
        sender.socket.send(bytes(FRAME_BYTES_MAX + 1))
        assert client.ask(Ping(), Done)
        sender.hello()  # ZeroMQ connects again by itself


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 500, b"\xff" * 9])
def test_strangers_who_speak_no_zeromq(live: MasterProcess, client: RawClient, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(live.address.removeprefix("ipc://"))
        try:
            stranger.sendall(noise)
        except (BrokenPipeError, ConnectionResetError):
            assert noise, "hung up on before anything was said"
        assert client.ask(Ping(), Done)
    assert client.ask(Ping(), Done)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(client: RawClient, frame: bytes) -> None:
    client.socket.send(frame)
    body = client.receive().body
    assert isinstance(body, Failure)
    assert body.code is not ErrorCode.INTERNAL


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.sampled_from([b"k", b"", bytes(16), "expire", "delete", 1, 4096, 60_000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TAGS = sorted(
    {"hello", "ping", "put_start", "put_end", "put_revoke", "get", "exists", "release", "protect", "expire", "renew"}
    | {"remove", "clear", "evict", "prefixes", "report", "stats", "story", "check"}
)


@settings(max_examples=400, deadline=None)
@given(tag=st.sampled_from(TAGS), fields=st.lists(VALUES, max_size=6), released=VALUES)
def test_known_tags_with_random_fields(client: RawClient, tag: str, fields: list[object], released: object) -> None:
    """Some are valid and have an effect. None is a fault in the master: its invariants are checked at the end."""
    client.socket.send(pack([2**40, client.epoch, [tag, *fields], released]))
    body = client.receive().body
    assert not (isinstance(body, Failure) and body.code is ErrorCode.INTERNAL)
    assert counter(client, "server_internal_errors") == 0


def test_a_sender_who_never_reads_hurts_only_himself(live: MasterProcess, client: RawClient) -> None:
    """Its replies are dropped when its queue is full; the master neither waits for it nor keeps them."""
    with RawClient(live.address, receive_queue=1) as flooder:
        flooder.hello()
        before = counter(client, "server_replies_dropped")
        frame = encode(Request(1, flooder.epoch, Exists([b"k"] * 1000)))
        for _ in range(2000):  # replies of 2 MB, much more than the socket's buffer takes
            flooder.socket.send(frame)
        wait_until(lambda: counter(client, "server_replies_dropped") > before, "replies were dropped")
        assert "event=reply_dropped" in live.log


def test_malformed_frames_are_logged_now_and_then(live: MasterProcess, client: RawClient) -> None:
    wait_until(lambda: "event=malformed_frame" in live.log, "a log line")
    lines = live.log.count("event=malformed_frame")
    for _ in range(500):
        client.socket.send(b"noise")
    answers = [decode_response(client.socket.recv()) for _ in range(500) if client.socket.poll(ANSWER_MS)]
    assert len(answers) == 500
    assert live.log.count("event=malformed_frame") <= lines + 1 + 500 // 100
