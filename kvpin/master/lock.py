"""One master a pool: a lock file, held with flock as long as the process lives, however it ends.

The file stays when the master leaves (removing it would race with the next one). It holds the owner's pid, 0 when
there is none, and the last epoch, so that epochs ascend even if the wall clock was set back.
"""

import fcntl
import os
import time
from pathlib import Path

from kvpin.errors import ConfigError, MasterBusy


class PoolLock:
    """Raises MasterBusy, naming the owner, if another master holds the pool."""

    def __init__(self, run_dir: Path, pool: str) -> None:
        path = run_dir / f"{pool}.lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"lock file {path}: {error.strerror}; set KVPIN_RUN_DIR to a directory of yours"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner, _ = self._read()
            os.close(self._fd)
            raise MasterBusy(
                f"pool {pool!r} has a master already, pid {owner or 'unknown'} (lock {path}): use that one, stop it, "
                "or choose another --pool"
            ) from None
        _, last_epoch = self._read()
        self.epoch = max(time.time_ns() // 10**6, last_epoch + 1)
        self._write(os.getpid())

    def release(self) -> None:
        self._write(0)
        os.close(self._fd)

    def _read(self) -> tuple[int, int]:
        """The owner's pid and the last epoch; zeros if the file is new or not ours to understand."""
        words = os.pread(self._fd, 100, 0).split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return 0, 0
        return int(words[0]), min(int(words[1]), (1 << 53) - 2)

    def _write(self, pid: int) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d %d\n" % (pid, self.epoch), 0)
