"""A master's life: lock, clean up, make the segment, listen, serve, leave no files behind."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from kvpin import config as configuration
from kvpin.config import Loaded, MasterConfig
from kvpin.errors import ConfigError
from kvpin.master.listener import Listener
from kvpin.master.lock import PoolLock
from kvpin.master.server import Server
from kvpin.master.sizing import core_config
from kvpin.protocol import SegmentInfo
from kvpin.segment import Progress, Segment, remove_stale, segment_path

logger = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 2.0


class Signals:
    """SIGTERM, SIGINT and SIGHUP: during the start they raise SystemExit(0), while a server runs they stop it.

    What the parent had ignored (nohup, a shell's background jobs) stays so.
    """

    def __init__(self) -> None:
        self.server: Server | None = None
        self.wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.server is None:
            raise SystemExit(0)
        self.server.stop()


def run(loaded: Loaded[MasterConfig]) -> None:
    """Serve until told to stop. Raises ConfigError, SegmentError or MasterBusy if it can't start."""
    config = loaded.config
    signals = Signals()
    run_dir = configuration.run_dir()
    address = config.listen or configuration.pool_address(config.pool)
    with contextlib.ExitStack() as stack:
        lock = PoolLock(run_dir, config.pool)
        stack.callback(lock.release)
        _check_segment_dir(loaded)
        remove_stale(config.segment_dir, config.pool)
        core = core_config(loaded)
        path = segment_path(config.segment_dir, config.pool, lock.epoch)
        with _progress() as progress:
            segment = Segment.create(path, core.pool_bytes, lock.epoch, progress=progress)
        stack.callback(segment.close)
        stack.callback(segment.unlink)
        listener = stack.enter_context(Listener(address, config.session_timeout_ms))
        server = Server(
            listener.socket,
            SegmentInfo(path, segment.size_bytes, lock.epoch),
            core,
            session_timeout_ms=config.session_timeout_ms,
            exit_when_idle_ms=int(config.exit_when_idle_s * 1000),
            wake_fd=signals.wake_fd,
        )
        signals.server = server
        logger.info(
            "event=ready address=%s epoch=%d pool_bytes=%d guaranteed_limit_bytes=%d segment=%s pid=%d",
            listener.address, lock.epoch, core.pool_bytes, core.guaranteed_limit_bytes, path, os.getpid(),
        )  # fmt: skip
        server.run()
        logger.info("event=stopped epoch=%d", lock.epoch)


def _check_segment_dir(loaded: Loaded[MasterConfig]) -> None:
    directory, name = loaded.config.segment_dir, loaded.named("segment_dir")
    if not Path(directory).is_dir():
        raise ConfigError(f"{name} = {directory!r}: no such directory; give a tmpfs such as /dev/shm")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} = {directory!r}: you may not write there; give a tmpfs such as /dev/shm")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Show how far the pool is: a bar on a terminal, else a log line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("making the pool"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("pool", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    logged_s = time.monotonic()

    def log(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s >= PROGRESS_PERIOD_S:
            logged_s = time.monotonic()
            logger.info("event=making_pool done_bytes=%d total_bytes=%d", done_bytes, total_bytes)

    yield log
