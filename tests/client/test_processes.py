"""Several client processes and one master: they share, they race, they die, they fork."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable

from kvpin.client import Client, PutResult
from kvpin.config import ClientConfig
from tests.client.writers import SIZE_BYTES, spawn
from tests.support.master import MasterProcess, wait_until

RACES = 300


def test_of_two_writers_one_stores_and_the_bytes_are_whole(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    writers = [spawn("race", master.address, fill, str(RACES)) for fill in "AB"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    client = make_client(address=master.address, call_timeout_ms=20_000)
    outputs = [writer.communicate(timeout=60)[0] for writer in writers]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert len(first) == len(second) == RACES
    for index, results in enumerate(zip(first, second, strict=True)):
        assert sorted(results).count(PutResult.STORED) == 1, results
        assert {*results} <= {PutResult.STORED, PutResult.EXISTS, PutResult.BUSY}
        fill = b"AB"[results.index(PutResult.STORED) :][:1]
        assert client.get(str(index)) == fill * SIZE_BYTES


def test_a_writer_that_is_killed_leaves_nothing_behind(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=master.address, call_timeout_ms=20_000)
    free_bytes = client.stats()["free_bytes"]
    writer = spawn("die", master.address)
    assert writer.wait(30) == -signal.SIGKILL
    writer.communicate()
    wait_until(lambda: client.stats()["free_bytes"] == free_bytes, "its range is free")
    assert client.get("half done") is None
    assert client.put("half done", b"whole").result is PutResult.STORED


def test_a_forked_child_has_a_connection_of_its_own(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    client = make_client(address=master.address, call_timeout_ms=20_000)
    client.put("key", b"data")
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:  # nothing may escape from here into pytest
        try:
            seen = client.get("key"), client.put("from the child", b"1").result, client.counters["sessions"]
            os.write(write_fd, repr(seen).encode())
            client.close()
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        assert answer.read().decode() == repr((b"data", PutResult.STORED, 2))
    os.waitpid(child, 0)
    assert client.get("from the child") == b"1"  # the parent's works on
    assert client.counters["sessions"] == 1


def test_a_fork_may_come_while_other_threads_hold_the_clients_locks(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=master.address, call_timeout_ms=20_000)
    client.put("key", b"data")
    finalizer = client._finalizer  # called at the child's exit too, if it's alive there
    read_fd, write_fd = os.pipe()
    with client._lock, client._counters._lock, client._live().mapping._lock:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(20)
                finalizer()
                os.write(write_fd, client.get("key") or b"missed")
            finally:
                os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        assert answer.read() == b"data"
    assert os.waitpid(child, 0)[1] == 0
    assert client.get("key") == b"data"


def test_a_hung_process_does_not_keep_others_waiting(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    client = make_client(address=master.address, call_timeout_ms=20_000)
    writer = spawn("race", master.address, "A", "1")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.send_signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert client.put("key", b"data").result is PutResult.STORED
        assert time.monotonic() - started_s < 5
    finally:
        writer.send_signal(signal.SIGCONT)
        writer.communicate("go\n", timeout=30)


def test_clients_that_come_and_go_leave_nothing_open(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    def come_and_go() -> None:
        with Client(config=ClientConfig(address=master.address, call_timeout_ms=20_000)) as client:
            client.put("key", b"data")
            assert client.get("key") == b"data"

    come_and_go()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        come_and_go()
    gc.collect()
    wait_until(lambda: threading.active_count() <= before[1], "all threads have ended")
    assert len(os.listdir("/proc/self/fd")) <= before[0]
