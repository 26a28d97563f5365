"""Clients that die, fall silent, or hang: when their ranges are free again, and never too early."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvpin.limits import PAGE_BYTES
from kvpin.protocol import (
    Bye,
    Check,
    Checked,
    Done,
    Failure,
    Ping,
    PutItem,
    PutStart,
    PutStarted,
    Request,
    Stats,
    StatsReply,
    encode,
)
from tests.support.master import MasterProcess, wait_until
from tests.support.raw import RawClient

MakeMaster = Callable[..., MasterProcess]

WRITER = """
import sys
from kvpin.protocol import Bye, Done, PutItem, PutStart, PutStarted
from tests.support.raw import RawClient
address, namespace, farewell = sys.argv[1], int(sys.argv[2]), sys.argv[3]
client = RawClient(address, b"writer")
client.hello(**({} if namespace < 0 else {"pid_namespace": namespace}))
client.ask(PutStart([PutItem(b"k", 4096)]), PutStarted)
if farewell == "bye":
    client.ask(Bye(), Done)
print("granted", flush=True)
sys.stdin.read()
"""

BUSY_WRITER = """
import itertools, random, sys
from kvpin.protocol import *
from tests.support.raw import RawClient
client = RawClient(sys.argv[1])
client.hello()
rng = random.Random(int(sys.argv[2]))
for n in itertools.count():
    keys = [b"%d" % number for number in rng.sample(range(500), 20)]
    items = [PutItem(key, rng.randrange(1, 300_000), 16 * (i + 1)) for i, key in enumerate(keys)]
    mark = Mark(bytes([rng.randrange(8)]) * 16, 16 * 20, rng.randrange(1, 2000))
    started = client.ask(PutStart(items, [mark] if rng.random() < 0.3 else []), PutStarted)
    mine = [item.key for item, status in zip(items, started.statuses) if status is PutStatus.WRITE]
    client.ask(GetReplicas(keys, 500), Replicas)
    if mine and rng.random() < 0.8:
        client.ask(PutEnd(mine), Ended)
    if n == 5:
        print("busy", flush=True)
"""


@pytest.fixture
def start_writer() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a process that has a range granted and never ends its put."""
    processes: list[subprocess.Popen[str]] = []

    def start(master: MasterProcess, namespace: int = -1, farewell: str = "none") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, master.address, str(namespace), farewell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "granted\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def stats(client: RawClient) -> dict[str, int]:
    return client.ask(Stats(), StatsReply).values


@pytest.mark.parametrize("reaped", [True, False])
def test_the_range_of_a_killed_writer_is_free_at_once(
    master: MasterProcess, start_writer: Callable[..., "subprocess.Popen[str]"], reaped: bool
) -> None:
    with RawClient(master.address) as client:
        client.hello()
        writer = start_writer(master)
        assert stats(client)["writes"] == 1
        writer.kill()
        if reaped:
            writer.wait()
        wait_until(lambda: stats(client)["writes"] == 0, "the put is void")
        values = stats(client)
        assert (values["quarantined_bytes"], values["free_bytes"]) == (0, values["pool_bytes"])
        assert (values["server_clients_dead"], values["server_sessions"]) == (1, 1)


def test_a_pid_of_another_namespace_proves_nothing(
    make_master: MakeMaster, start_writer: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """In a container a pid means another process: only silence ends the session, and the range waits."""
    master = make_master(session_timeout_ms=600)
    with RawClient(master.address) as client:
        writer = start_writer(master, namespace=1)
        client.hello()
        writer.kill()
        writer.wait()
        wait_until(lambda: stats(client)["server_clients_silent"] == 1, "the session timed out")
        values = stats(client)
        assert (values["writes"], values["quarantined_bytes"], values["server_clients_dead"]) == (0, PAGE_BYTES, 0)


@pytest.mark.parametrize("farewell", ["bye", "none"])
def test_a_departed_writers_range_is_free_when_it_dies(
    make_master: MakeMaster, start_writer: Callable[..., "subprocess.Popen[str]"], farewell: str
) -> None:
    master = make_master(session_timeout_ms=600)
    with RawClient(master.address) as client:
        writer = start_writer(master, farewell=farewell)
        client.hello()
        wait_until(lambda: stats(client)["quarantined_bytes"] == PAGE_BYTES, "it left, alive")
        assert stats(client)["server_departed"] == 1
        writer.kill()
        writer.wait()
        wait_until(lambda: stats(client)["quarantined_bytes"] == 0, "its range is free")
        values = stats(client)
        assert (values["server_writers_found_dead"], values["server_departed"]) == (1, 0)


def test_one_process_dead_frees_nothing_of_another_under_the_same_routing_id(
    master: MasterProcess, start_writer: Callable[..., "subprocess.Popen[str]"]
) -> None:
    with RawClient(master.address) as client:
        client.hello()
        first = start_writer(master, farewell="bye")
        with RawClient(master.address, b"writer") as second:  # this process, under the id of the first
            second.hello()
            second.ask(PutStart([PutItem(b"k", PAGE_BYTES)]), PutStarted)
            first.kill()
            first.wait()
            wait_until(lambda: stats(client)["server_writers_found_dead"] == 1, "the first is known dead")
            values = stats(client)
            assert (values["writes"], values["quarantined_bytes"]) == (1, 0)


def test_writers_killed_under_load_leave_nothing_behind(make_master: MakeMaster) -> None:
    """The pool is full and turns over all the time; the fixture checks the invariants once more at the end."""
    master = make_master(pool_size="16MiB")
    with RawClient(master.address) as client:
        client.hello()
        for seed in range(6):
            pair = [
                subprocess.Popen(
                    [sys.executable, "-c", BUSY_WRITER, master.address, str(10 * seed + i)], stdout=subprocess.PIPE
                )
                for i in range(2)
            ]
            for process in pair:
                assert process.stdout is not None
                assert process.stdout.readline() == b"busy\n"
            for process in pair:
                process.kill()
                process.communicate()
            assert client.ask(Check(), Checked).violations == []
        wait_until(lambda: stats(client)["server_sessions"] == 1, "all are known dead")
        values = stats(client)
        assert (values["writes"], values["quarantined_bytes"], values["leases"]) == (0, 0, 0)
        assert values["evicted_objects"] > 0, "the pool never was full: make the writers busier"


def test_silence_ends_a_session_and_talk_keeps_one(make_master: MakeMaster) -> None:
    master = make_master(session_timeout_ms=1000)
    with RawClient(master.address) as silent, RawClient(master.address) as client:
        heartbeat_ms = client.hello().heartbeat_ms
        assert heartbeat_ms < 1000 / 2
        silent.hello(name="silent")
        silent.ask(PutStart([PutItem(b"k", PAGE_BYTES)]), PutStarted)
        wait_until(lambda: stats(client)["server_sessions"] == 1, "the silent one is gone")
        values = stats(client)
        assert (values["writes"], values["quarantined_bytes"]) == (0, PAGE_BYTES), "its process lives"
        assert silent.ask(Ping(), Failure)
        silent.hello()
        assert silent.ask(Ping(), Done)
        for _ in range(10):  # any noise is a sign of life
            silent.socket.send(b"noise")
            silent.receive()
            assert not silent.socket.poll(150)
            stats(client)
        assert stats(client)["server_sessions"] == 2


def test_quarantine_ends_by_itself(make_master: MakeMaster) -> None:
    master = make_master(quarantine_ms=300)
    with RawClient(master.address) as client:
        client.hello()
        client.ask(PutStart([PutItem(b"k", PAGE_BYTES)]), PutStarted)
        client.ask(Bye(), Done)
        client.hello()
        assert stats(client)["quarantined_bytes"] in (0, PAGE_BYTES)
        wait_until(lambda: stats(client)["quarantine_released"] == 1, "the release time has passed")
        assert stats(client)["quarantined_bytes"] == 0


def test_a_frozen_master_answers_when_it_goes_on_and_keeps_its_clients(make_master: MakeMaster) -> None:
    master = make_master(session_timeout_ms=1000)
    with RawClient(master.address) as client, RawClient(master.address) as quiet:
        client.hello()
        quiet.hello()
        quiet.ask(PutStart([PutItem(b"k", PAGE_BYTES)]), PutStarted)
        master.stop()
        client.socket.send(encode(Request(99, client.epoch, Ping())))
        assert not client.socket.poll(2000), "frozen for twice the session timeout"
        master.cont()
        assert client.receive().request_id == 99
        values = stats(client)
        assert (values["server_clients_silent"], values["writes"]) == (0, 1)
