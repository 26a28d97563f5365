"""A real master, spoken to in raw frames: what it grants, and what it answers to strangers."""

import os
import subprocess
import sys

import pytest

from kvpin.limits import PAGE_BYTES
from kvpin.protocol import (
    PROTOCOL_VERSION,
    Bye,
    Done,
    Ended,
    EndStatus,
    ErrorCode,
    Exists,
    Failure,
    GetReplicas,
    Grant,
    Mark,
    Ping,
    PutEnd,
    PutItem,
    PutStart,
    PutStarted,
    PutStatus,
    Replicas,
    Stats,
    StatsReply,
)
from kvpin.segment import Segment
from tests.support.master import POOL_BYTES, MasterProcess
from tests.support.raw import RawClient, own_hello

WRITER = """
import sys
from kvpin.segment import Segment
path, epoch, offset, size = sys.argv[1], *map(int, sys.argv[2:])
segment = Segment.attach(path, epoch)
view = segment.view(offset, size)
view[:] = bytes(i * 7 % 251 for i in range(size))
view.release()
segment.close()
"""


@pytest.fixture
def client(master: MasterProcess):
    with RawClient(master.address) as client:
        client.hello()
        yield client


def put(client: RawClient, key: bytes, size_bytes: int = PAGE_BYTES) -> int:
    """A complete object; returns its offset."""
    started = client.ask(PutStart([PutItem(key, size_bytes)]), PutStarted)
    assert started.statuses == [PutStatus.WRITE]
    assert client.ask(PutEnd([key]), Ended).statuses == [EndStatus.OK]
    return started.offsets[0]


def stats(client: RawClient) -> dict[str, int]:
    return client.ask(Stats(), StatsReply).values


def test_hello_tells_what_a_client_needs(master: MasterProcess) -> None:
    with RawClient(master.address) as client:
        welcome = client.hello()
        assert welcome.protocol == PROTOCOL_VERSION
        assert welcome.segment.epoch == welcome.epoch
        assert welcome.segment.size_bytes == POOL_BYTES
        assert os.stat(welcome.segment.path).st_mode & 0o777 == 0o600
        assert f"epoch={welcome.epoch} " in master.log
        assert f"address={master.address} " in master.log


def test_what_another_process_writes_is_what_a_reader_finds(client: RawClient) -> None:
    welcome = client.hello()
    size_bytes = 3 * PAGE_BYTES + 17
    started = client.ask(PutStart([PutItem(b"k", size_bytes)]), PutStarted)
    assert client.ask(GetReplicas([b"k"], 1000), Replicas).lease_id == 0, "invisible before put_end"
    words = [welcome.segment.path, str(welcome.epoch), str(started.offsets[0]), str(size_bytes)]
    subprocess.run([sys.executable, "-c", WRITER, *words], check=True)
    assert client.ask(PutEnd([b"k"]), Ended).statuses == [EndStatus.OK]
    found = client.ask(GetReplicas([b"k", b"absent"], 1000), Replicas)
    assert (found.offsets[1], found.sizes) == (-1, [size_bytes, 0])
    segment = Segment.attach(welcome.segment.path, welcome.epoch)
    assert bytes(segment.view(found.offsets[0], size_bytes)) == bytes(i * 7 % 251 for i in range(size_bytes))
    segment.close()


def test_a_repeated_request_has_one_effect(client: RawClient) -> None:
    body = PutStart([PutItem(b"k", PAGE_BYTES)], [Mark(bytes(16), 0, 60_000)])
    first = client.ask(body, PutStarted, request_id=7)
    assert first.grants == [Grant.OPENED]
    assert client.ask(body, PutStarted, request_id=7) == first
    assert stats(client)["requests_repeated"] == 1


@pytest.mark.parametrize("said_hello", [True, False])
def test_another_epoch_is_told_to_say_hello(master: MasterProcess, said_hello: bool) -> None:
    with RawClient(master.address) as client:
        epoch = client.hello().epoch if said_hello else 0
        client.epoch = epoch + 1
        failure = client.ask(Exists([b"k"]), Failure)
        assert failure.code is ErrorCode.EPOCH_CHANGED
        assert "say Hello" in failure.message


def test_the_right_epoch_without_hello_is_not_enough(client: RawClient, master: MasterProcess) -> None:
    with RawClient(master.address) as other:
        other.epoch = client.epoch
        assert other.ask(Ping(), Failure).code is ErrorCode.EPOCH_CHANGED


def test_another_protocol_version_is_refused_with_both_numbers(master: MasterProcess) -> None:
    with RawClient(master.address) as client:
        failure = client.ask(own_hello(protocol=99), Failure)
        assert failure.code is ErrorCode.VERSION
        assert "99" in failure.message
        assert str(PROTOCOL_VERSION) in failure.message


@pytest.mark.parametrize("field", ["name", "tenant"])
def test_a_long_name_is_refused(master: MasterProcess, field: str) -> None:
    with RawClient(master.address) as client:
        failure = client.ask(own_hello(**{field: "x" * 101}), Failure)
        assert (failure.code, field in failure.message) == (ErrorCode.BAD_REQUEST, True)


def test_bye_voids_puts_and_ends_the_session(client: RawClient, master: MasterProcess) -> None:
    client.ask(PutStart([PutItem(b"k", PAGE_BYTES)]), PutStarted)
    client.ask(Bye(), Done)
    assert client.ask(Ping(), Failure).code is ErrorCode.EPOCH_CHANGED
    client.hello()
    values = stats(client)
    assert (values["writes"], values["quarantined_bytes"]) == (0, PAGE_BYTES), "this process might still be writing"


def test_stats_merge_the_servers_own_numbers(client: RawClient, master: MasterProcess) -> None:
    values = stats(client)
    assert values["pool_bytes"] == POOL_BYTES
    assert values["server_pid"] == master.pid
    assert values["server_sessions"] == values["clients"] == 1
    assert values["server_epoch"] == client.epoch
