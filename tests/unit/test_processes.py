"""Whether a process is dead: never said of one that may live, whatever happens to pids."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpin import processes
from kvpin.processes import UNKNOWN, Process, identify, pid_namespace


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_living_process_is_not_dead(child: "subprocess.Popen[bytes]") -> None:
    assert not identify(child.pid, pid_namespace()).is_dead()
    assert not identify(os.getpid(), pid_namespace()).is_dead()


def test_a_killed_process_is_dead_before_its_parent_reaps_it(child: "subprocess.Popen[bytes]") -> None:
    process = identify(child.pid, pid_namespace())
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert process.is_dead()
    child.wait()
    assert process.is_dead()


def test_a_pid_that_is_used_again_is_another_process() -> None:
    me = identify(os.getpid(), pid_namespace())
    assert Process(me.pid, me.start_ticks - 1, True).is_dead()


def test_a_process_that_was_gone_at_hello_is_dead(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    assert identify(child.pid, pid_namespace()).is_dead()


@pytest.mark.parametrize("namespace", [0, 1, os.stat("/proc/self/ns/pid").st_ino])
def test_nothing_is_said_of_other_namespaces(namespace: int) -> None:
    assert identify(2**22 + 1, namespace) is UNKNOWN
    assert not UNKNOWN.is_dead()


@pytest.mark.parametrize("pid", [0, -1])
def test_nothing_is_said_of_no_process(pid: int) -> None:
    assert identify(pid, pid_namespace()) is UNKNOWN


def test_the_namespace_is_one_number_for_all_processes_here_and_fits_the_wire() -> None:
    code = "from kvpin.processes import pid_namespace; print(pid_namespace())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) == pid_namespace()
    assert 0 < pid_namespace() < 2**63


def test_hosts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    here = pid_namespace()
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    assert pid_namespace() not in (0, here)


def test_without_proc_there_is_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(processes.os, "stat", absent)
    assert pid_namespace() == 0
