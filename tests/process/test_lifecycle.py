"""Starting, ending and failing to start: files left, exit codes, and what the error says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvpin.protocol import Done, Ping
from tests.support.master import MasterProcess, wait_until
from tests.support.raw import RawClient

MakeMaster = Callable[..., MasterProcess]


def segments(pool: str = "default") -> list[str]:
    """Of this user's masters of the pool, in the default place."""
    return sorted(str(path) for path in Path("/dev/shm").glob(f"kvpin-{os.getuid()}-{pool}-*"))


@pytest.fixture
def pool() -> str:
    """A name that no other test uses at this time: segments lie in one folder for all."""
    return f"t{os.getpid()}_{time.monotonic_ns()}"


def refused(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A master that can't start."""
    return subprocess.run(
        [sys.executable, "-m", "kvpin.master", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_leaves_no_files(make_master: MakeMaster, pool: str, number: signal.Signals) -> None:
    master = make_master(pool=pool)
    assert len(segments(pool)) == 1
    os.kill(master.pid, number)
    assert master.wait() == 0
    assert segments(pool) == []
    assert not Path(master.address.removeprefix("ipc://")).exists()
    assert "event=stopped" in master.log


def test_a_signal_that_the_parent_ignores_is_ignored(make_master: MakeMaster) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        master = make_master()
    finally:
        signal.signal(signal.SIGHUP, previous)
    os.kill(master.pid, signal.SIGHUP)
    with RawClient(master.address) as client:
        client.hello()
        assert client.ask(Ping(), Done)


def test_a_signal_while_the_pool_is_made(run_dir: Path, pool: str) -> None:
    master = MasterProcess(run_dir, pool=pool, pool_size="2GiB")
    master.spawn()
    wait_until(lambda: bool(segments(pool)), "the segment is begun")
    assert master.terminate() == 0
    assert segments(pool) == []


def test_it_leaves_when_nobody_needs_it(make_master: MakeMaster, pool: str) -> None:
    master = make_master(pool=pool, exit_when_idle_s=1)
    with RawClient(master.address) as client:
        client.hello()
        for _ in range(20):
            assert client.ask(Ping(), Done)
            time.sleep(0.1)  # twice the idle time in all: only the session keeps it
    assert master.wait() == 0
    assert "event=idle_exit" in master.log
    assert segments(pool) == []


def test_a_crash_is_cleaned_up_by_the_next_start(make_master: MakeMaster, pool: str) -> None:
    first = make_master(pool=pool)
    with RawClient(first.address) as client:
        old = client.hello()
    first.kill()
    assert segments(pool) == [old.segment.path]
    assert Path(first.address.removeprefix("ipc://")).is_socket()
    second = make_master(pool=pool)
    with RawClient(second.address) as client:
        new = client.hello()
    assert new.epoch > old.epoch
    assert segments(pool) == [new.segment.path]
    assert f"event=stale_segment_removed path={old.segment.path}" in second.log


def test_a_client_sees_the_new_epoch(make_master: MakeMaster, pool: str) -> None:
    first = make_master(pool=pool)
    with RawClient(first.address) as client:
        old_epoch = client.hello().epoch
        first.kill()
        make_master(pool=pool)
        assert client.hello().epoch > old_epoch


# --- does not start -------------------------------------------------------------------------------------------------


def test_a_second_master_names_the_first_and_leaves_it_alone(master: MasterProcess) -> None:
    second = refused("--pool-size", "16MiB")
    assert second.returncode == 3
    assert f"pid {master.pid}" in second.stderr
    with RawClient(master.address) as client:
        client.hello()


def test_two_masters_of_two_pools(make_master: MakeMaster, pool: str) -> None:
    one, other = make_master(pool=f"{pool}a"), make_master(pool=f"{pool}b")
    with RawClient(one.address) as first, RawClient(other.address) as second:
        assert first.hello().segment.path != second.hello().segment.path


def test_another_masters_address_is_left_to_it(master: MasterProcess) -> None:
    second = refused("--pool", "other", "--pool-size", "16MiB", "--listen", master.address)
    assert (second.returncode, "listens" in second.stderr) == (3, True)
    with RawClient(master.address) as client:
        client.hello()


def test_a_file_in_the_sockets_place_is_not_removed(run_dir: Path) -> None:
    precious = run_dir / "notes.txt"
    precious.write_text("precious")
    refusal = refused("--pool-size", "16MiB", "--listen", f"ipc://{precious}")
    assert refusal.returncode == 2
    assert "no socket" in refusal.stderr
    assert precious.read_text() == "precious"


def test_a_pool_larger_than_the_memory_says_how_to_get_more(run_dir: Path) -> None:
    refusal = refused("--pool-size", "1000TiB")
    assert refusal.returncode == 1
    for hint in ("--pool-size", "--shm-size", "free"):
        assert hint in refusal.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--segment-dir", "/absent/dir"], ["segment_dir", "/absent/dir"]),
        (["--pool-size", "lots"], ["pool_size", "lots"]),
        (["--pool-size", "1MiB"], ["pool_size", "at least"]),
        (["--guaranteed-limit", "95%"], ["guaranteed_limit", "starve"]),
        (["--high-watermark", "0.5"], ["watermark"]),
        (["--cache-quotas", "kv=much"], ["cache_quotas", "much"]),
        (["--pool", "../up"], ["--pool", "../up"]),
        (["--listen", "tcp://0.0.0.0:5555"], ["--listen", "127.0.0.1"]),
        (["--listen", "udp://x"], ["--listen", "ipc://"]),
        (["--listen", "ipc:///absent/dir/sock"], ["/absent/dir"]),
        (["--listen", "ipc://@abstract"], ["abstract"]),
        (["--listen", "ipc:///tmp/" + "x" * 200], ["107"]),
        (["--log-format", "xml"], ["--log-format", "xml"]),
        (["--exit-when-idle-s", "-1"], ["exit_when_idle_s"]),
        (["--put-timeout-ms", "soon"], ["--put-timeout-ms", "integer"]),
        (["--config", "/absent.toml"], ["/absent.toml"]),
        (["--colour", "blue"], ["--colour"]),
    ],
)
def test_wrong_options_are_named(run_dir: Path, arguments: list[str], words: list[str]) -> None:
    refusal = refused("--pool-size", "16MiB", *arguments)
    assert refusal.returncode == 2
    assert "Traceback" not in refusal.stderr
    for word in words:
        assert word in refusal.stderr


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("pool_sice = '1GiB'", ["pool_sice", "pool_size"]),
        ("pool_size = [", ["TOML"]),
        ("put_timeout_ms = 'soon'", ["put_timeout_ms", "soon"]),
        ("high_watermark = 2.0", ["watermark"]),
    ],
)
def test_wrong_settings_in_a_file_are_named(run_dir: Path, toml: str, words: list[str]) -> None:
    path = run_dir / "kvpin.toml"
    path.write_text(toml)
    refusal = refused("--config", str(path))
    assert refusal.returncode == 2
    for word in words:
        assert word in refusal.stderr


def test_a_wrong_variable_is_named(run_dir: Path) -> None:
    refusal = refused(env={"KVPIN_PUT_TIMEOUT_MS": "soon"})
    assert (refusal.returncode, "$KVPIN_PUT_TIMEOUT_MS" in refusal.stderr) == (2, True)


def test_a_run_directory_that_others_may_enter_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    refusal = refused("--pool-size", "16MiB")
    run_dir.chmod(0o700)
    assert (refusal.returncode, f"chmod 700 {run_dir}" in refusal.stderr) == (2, True)


def test_a_run_directory_that_is_a_file_is_refused(run_dir: Path) -> None:
    path = run_dir / "file"
    path.touch()
    refusal = refused("--pool-size", "16MiB", env={"KVPIN_RUN_DIR": str(path)})
    assert (refusal.returncode, str(path) in refusal.stderr) == (2, True)


# --- sources of settings, seen from outside -------------------------------------------------------------------------


def test_the_command_line_beats_the_environment_beats_the_file(
    make_master: MakeMaster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir / "kvpin.toml"
    path.write_text("put_timeout_ms = 1001\nlease_ms_max = 1002\nttl_ms_max = 1003")
    monkeypatch.setenv("KVPIN_LEASE_MS_MAX", "2002")
    monkeypatch.setenv("KVPIN_TTL_MS_MAX", "2003")
    master = make_master(config=path, ttl_ms_max=3003)
    with RawClient(master.address) as client:
        welcome = client.hello()
    assert (welcome.put_timeout_ms, welcome.lease_ms_max, welcome.ttl_ms_max) == (1001, 2002, 3003)


def test_tcp_on_loopback_with_a_port_of_the_systems_choice(make_master: MakeMaster) -> None:
    master = make_master(listen="tcp://127.0.0.1:*")
    master.address = master.log.partition(" address=")[2].split()[0]
    assert master.address.startswith("tcp://127.0.0.1:")
    with RawClient(master.address) as client:
        client.hello()


def test_json_log_lines(make_master: MakeMaster) -> None:
    master = make_master(log_format="json")
    lines = [msgspec.json.decode(line) for line in master.log.splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    assert any(line["message"].startswith("event=ready ") for line in lines)
