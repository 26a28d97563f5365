"""The owner loop in a thread of this process, so that faults can be put into it."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from kvpin.errors import ConfigError
from kvpin.log import Throttle
from kvpin.master import server, sessions
from kvpin.master.core.config import CoreConfig
from kvpin.master.listener import Listener
from kvpin.master.lock import PoolLock
from kvpin.master.server import Server
from kvpin.protocol import (
    Done,
    ErrorCode,
    Failure,
    Ping,
    PutItem,
    PutStart,
    PutStarted,
    SegmentInfo,
    Stats,
    StatsReply,
)
from tests.support.master import wait_until
from tests.support.raw import RawClient, own_hello

EPOCH = 77
POOL_BYTES = 16 << 20


class Running:
    """A server without a segment: no test here maps one."""

    def __init__(self, address: str, session_timeout_ms: int = 15_000) -> None:
        self._listener = Listener(address, 15_000)
        core = CoreConfig(pool_bytes=POOL_BYTES, guaranteed_limit_bytes=0, put_timeout_ms=200)
        segment = SegmentInfo("/dev/shm/none", POOL_BYTES, EPOCH)
        self.address = address
        wake_fd, self._signal_fd = os.pipe()
        self._fds = (wake_fd, self._signal_fd)
        self.server = Server(
            self._listener.socket, segment, core, session_timeout_ms=session_timeout_ms, wake_fd=wake_fd
        )
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def close(self) -> None:
        self.server.stop()
        os.write(self._signal_fd, b"x")  # as the interpreter does when a signal comes
        self._thread.join(10)
        assert not self._thread.is_alive()
        for fd in self._fds:
            os.close(fd)
        self._listener.__exit__(None, None, None)


@pytest.fixture
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder:
        running = Running(f"ipc://{folder}/s")
        yield running
        running.close()


def fail(*arguments: object) -> NoReturn:
    raise RuntimeError("put in by the test")


def test_a_fault_in_the_core_is_an_internal_failure_and_the_loop_goes_on(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(running.address) as client:
        client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(running.server.state, "handle", fail)
            for _ in range(10):
                assert client.ask(Ping(), Failure).code is ErrorCode.INTERNAL
        assert client.ask(Ping(), Done)
        assert client.ask(Stats(), StatsReply).values["server_internal_errors"] == 10
    (record,) = [record for record in caplog.records if "event=internal_error request=Ping" in record.getMessage()]
    assert record.exc_info


def test_a_reply_that_cannot_be_sent_is_an_internal_failure(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with RawClient(running.address) as client:
        client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(running.server.state, "handle", lambda *arguments: object())
            assert client.ask(Ping(), Failure).code is ErrorCode.INTERNAL
        assert client.ask(Ping(), Done)


def test_a_fault_in_a_tick_does_not_end_the_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with RawClient(running.address) as client:
        client.hello()
        monkeypatch.setattr(running.server.state, "tick", fail)
        wait_until(lambda: bool(client.ask(Stats(), StatsReply).values["server_internal_errors"]), "a tick failed")
        assert client.ask(Ping(), Done)


def test_a_fault_in_housekeeping_does_not_end_the_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server.state, "client_left", fail)
    with RawClient(running.address) as silent, RawClient(running.address) as client:
        silent.hello()
        client.hello()
        wait_until(
            lambda: bool(client.ask(Stats(), StatsReply).values["server_internal_errors"]), "the silent one left"
        )
        assert client.ask(Ping(), Done)


def test_the_loop_wakes_for_the_cores_deadlines_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HOUSEKEEPING_MS", 3_600_000)
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder:
        running = Running(f"ipc://{folder}/s", session_timeout_ms=4 * 3_600_000)
        with RawClient(running.address) as client:
            client.hello()
            client.ask(PutStart([PutItem(b"k", 4096)]), PutStarted)
            counters = running.server.state.tables.counters
            wait_until(lambda: counters["puts_timed_out"] == 1, "the put timed out")
        running.close()


def test_more_clients_than_allowed_are_told_so(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "CLIENTS_MAX", 2)
    with RawClient(running.address) as one, RawClient(running.address) as two, RawClient(running.address) as three:
        one.hello()
        two.hello()
        assert three.ask(own_hello(), Failure).code is ErrorCode.OVERLOADED
        two.hello()  # who is in may say it again
        assert two.ask(Stats(), StatsReply).values["server_clients_refused"] == 1


def test_an_address_that_cannot_be_bound_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"tcp://nowhere\.invalid:1"):
        Listener("tcp://nowhere.invalid:1", 1000)


def test_epochs_ascend_even_if_the_clock_was_set_back(tmp_path: Path) -> None:
    future = 2**50
    (tmp_path / "p.lock").write_text(f"0 {future}\n")
    lock = PoolLock(tmp_path, "p")
    assert lock.epoch == future + 1
    lock.release()
    again = PoolLock(tmp_path, "p")
    assert again.epoch == future + 2
    again.release()


@pytest.mark.parametrize("content", ["", "x y", "-1 -1", "1", "9" * 200, f"1 {2**80}"])
def test_a_lock_file_with_other_content_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.lock").write_text(content)
    lock = PoolLock(tmp_path, "p")
    assert 2**40 < lock.epoch < 2**53
    lock.release()


def test_what_the_master_slept_through_is_nobodys_silence() -> None:
    table = sessions.Sessions(timeout_ms=1000, quarantine_ms=1000, now_ms=0)
    session = table.join(b"id", own_hello(), now_ms=0)
    table.excuse(5000)
    assert table.silent(5999) == []
    assert table.silent(6000) == [session]
    table.leave(session, 6000, writer_dead=True)
    table.excuse(5000)
    assert table.idle_ms(11_001) == 1


def test_a_throttle_lets_one_pass_in_a_period_and_counts_the_rest() -> None:
    now_s = 0.0
    throttle = Throttle(5.0, lambda: now_s)
    assert [throttle.admit("a") for _ in range(3)] == [0, None, None]
    assert throttle.admit("b") == 0
    now_s = 5.0
    assert throttle.admit("a") == 2
