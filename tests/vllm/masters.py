"""A master in a process of its own, that can be stopped, continued, killed and started anew."""

import os
import signal
import subprocess
import sys
from pathlib import Path

POOL_BYTES = 64 << 20
GUARANTEED_LIMIT_BYTES = 2 << 20


class MasterProcess:
    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / "master.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpin.master"],
                env={
                    **os.environ,
                    "KVPIN_POOL_SIZE": str(POOL_BYTES),
                    "KVPIN_GUARANTEED_LIMIT": str(GUARANTEED_LIMIT_BYTES),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            assert self._wait() == 0, self._log.read_text()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _wait(self) -> int:
        assert self._process is not None
        return self._process.wait(10)
