"""A real master in a process of its own, that can be stopped, continued, killed and started anew."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvpin.protocol import Check, Checked
from tests.support.raw import RawClient

READY_S = 30.0  # generous: how long a loaded machine may take
POOL_BYTES = 64 << 20


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
    """Poll another process's state, which tells nobody when it changes."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {what}"
        time.sleep(0.01)


class MasterProcess:
    """`options` are those of the command line: pool_size="16MiB" is --pool-size 16MiB."""

    def __init__(self, run_dir: Path, **options: object) -> None:
        self.run_dir = run_dir
        self.pool = str(options.get("pool", "default"))
        self.address = str(options.get("listen", f"ipc://{run_dir}/{self.pool}.sock"))
        self._arguments = [str(word) for pair in _words({"pool_size": POOL_BYTES, **options}) for word in pair]
        self._log_path = run_dir / f"{self.pool}.test.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that it and its predecessors wrote."""
        return self._log_path.read_text() if self._log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawn(self) -> None:
        """Start the process, and don't wait for it."""
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvpin.master", *self._arguments],
                env={**os.environ, "KVPIN_RUN_DIR": str(self.run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        before = self.log.count("event=ready")
        self.spawn()
        wait_until(lambda: self.log.count("event=ready") > before or self._ended(), "the master is ready")
        assert not self._ended(), self.log

    def stop(self) -> None:
        """Freeze it."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        self._signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = READY_S) -> int:
        """Its exit code, when it has ended."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def violations(self) -> list[str]:
        """The invariants that its live state breaks."""
        with RawClient(self.address) as client:
            client.hello(name="check", writer_pid=0)
            return client.ask(Check(), Checked).violations

    def close(self) -> None:
        """End it if it lives: its invariants must hold, and it must leave cleanly."""
        if self.process is None or self._ended():
            return
        self.cont()
        try:
            violations = self.violations()
        finally:
            code = self.terminate()
        assert violations == []
        assert code == 0, self.log

    def _ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)


def _words(options: dict[str, object]) -> list[tuple[object, ...]]:
    return [
        (f"--{name.replace('_', '-')}",) if value is True else (f"--{name.replace('_', '-')}", value)
        for name, value in options.items()
    ]
