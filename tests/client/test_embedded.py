"""With no address, a client starts this host's master: one, whoever comes first, for as long as somebody needs it."""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpin import embedded
from kvpin.client import Client
from kvpin.config import ClientConfig, pool_address
from kvpin.counters import Counters
from kvpin.embedded import is_listening
from kvpin.errors import Unavailable
from tests.client.writers import spawn
from tests.support.master import MasterProcess, wait_until

SMALL = {"embedded": True, "pool_size": "16MiB", "retry_ms": 20, "call_timeout_ms": 10_000}


@pytest.fixture(autouse=True)
def short_lived(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Masters leave soon after the test, and the test waits for it: they use its run directory."""
    monkeypatch.setenv("KVPIN_EXIT_WHEN_IDLE_S", "0.3")
    yield
    wait_until(lambda: all(child.poll() is not None for child in embedded._children), "started masters have ended")
    wait_until(lambda: not is_listening(pool_address()), "nobody listens any more")


def test_a_master_is_started_and_leaves_after_its_last_client(make_client: Callable[..., Client]) -> None:
    client = make_client(**SMALL)
    assert client.wait_ready(30_000)
    client.put("key", b"data")
    assert client.get("key") == b"data"
    assert client.stats()["pool_bytes"] == 16 << 20
    pid = client.stats()["server_pid"]
    assert os.getsid(pid) == pid  # signals to the engine's terminal don't reach it
    segment = client.segment
    assert segment is not None
    client.close()
    wait_until(lambda: not is_listening(pool_address()), "the master has left")
    wait_until(lambda: not Path(segment.path).exists(), "its memory is given back")


def test_eight_processes_at_once_start_one_master() -> None:
    clients = [spawn("embedded") for _ in range(8)]
    reports = []
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        reports.append(json.loads(client.stdout.readline()))
    for client in clients:
        client.communicate("go\n", timeout=30)
    assert len({report["pid"] for report in reports}) == 1
    assert sum(report.get("masters_started", 0) for report in reports) >= 1
    assert all(report.get("masters_failed", 0) == 0 for report in reports)


def test_a_master_that_is_there_is_used(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    client = make_client(**SMALL)
    assert client.wait_ready(10_000)
    assert client.stats()["server_pid"] == master.pid
    assert "masters_started" not in client.counters
    client.close()
    master.close()


def test_the_child_inherits_no_descriptors(make_client: Callable[..., Client], run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as ours:
        ours.set_inheritable(True)
        inode = os.fstat(ours.fileno()).st_ino
        client = make_client(**SMALL)
        assert client.wait_ready(30_000)
        pid = client.stats()["server_pid"]
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert f"socket:[{inode}]" not in links
        assert links[:3].count(str(run_dir / "default.log")) == 2
        assert (run_dir / "default.log").stat().st_mode & 0o777 == 0o600


def test_a_killed_master_is_replaced(make_client: Callable[..., Client]) -> None:
    client = make_client(**SMALL)
    assert client.wait_ready(30_000)
    epoch = client.epoch
    os.kill(client.stats()["server_pid"], 9)
    wait_until(lambda: client.epoch not in (0, epoch), "there's another master")
    assert client.put("key", b"data").readable
    assert client.counters["masters_started"] == 2


def test_a_master_of_somebody_else_is_theirs_to_restart(
    master: MasterProcess, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(**SMALL)
    assert client.wait_ready(10_000)
    tends = []
    tend = embedded.EmbeddedMaster.tend
    monkeypatch.setattr(embedded.EmbeddedMaster, "tend", lambda self, now_s: (tends.append(now_s), tend(self, now_s)))
    master.kill()
    wait_until(lambda: len(tends) >= 3, "the client has looked for a master")
    assert "masters_started" not in client.counters
    master.start()
    wait_until(lambda: client.ready, "the restarted master is found")
    assert client.stats()["server_pid"] == master.pid
    client.close()


def test_a_master_that_nobody_restarts_is_replaced(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    monkeypatch.setattr(embedded.EmbeddedMaster, "_start", lambda self, now_s: started.append(now_s))
    tended = embedded.EmbeddedMaster(ClientConfig(), pool_address(), Counters())
    tended.lost(100.0)
    tended.tend(100.0 + embedded.EMBEDDED_TAKEOVER_S - 1)
    assert started == []
    tended.tend(100.0 + embedded.EMBEDDED_TAKEOVER_S)
    assert started == [100.0 + embedded.EMBEDDED_TAKEOVER_S]


def test_a_master_that_cannot_start_is_explained_and_not_tried_in_a_loop(
    make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvpin"):
        client = make_client(**{**SMALL, "pool_size": "900TB", "connect_timeout_ms": 100})
        with pytest.raises(Unavailable, match="no connection to a master"):
            client.stats()
        wait_until(lambda: client.counters.get("masters_failed", 0) >= 1, "the failure is noticed")
    (failure,) = [record for record in caplog.records if "event=master_failed" in record.getMessage()][:1]
    assert "ended with code" in failure.getMessage()
    assert "--pool-size" in failure.getMessage()
    assert client.counters["masters_started"] <= 2
    assert not client.ready


def test_with_an_address_none_is_started(make_client: Callable[..., Client], run_dir: Path) -> None:
    for settings in ({"address": f"ipc://{run_dir}/default.sock"}, {"embedded": False}):
        client = make_client(**{**SMALL, **settings, "connect_timeout_ms": 100})
        with pytest.raises(Unavailable):
            client.stats()
        assert "masters_started" not in client.counters
    assert not (run_dir / "default.log").exists()
