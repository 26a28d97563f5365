"""The embedded default: with no address configured and nobody there, a client starts this host's master itself.

The master is a child in a session of its own that outlives its parent and leaves some time after its last client. Many
clients may start one at once: the pool's lock decides between them, and the losers' children just end.
"""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import kvpin
from kvpin.config import ClientConfig, run_dir
from kvpin.counters import Counters
from kvpin.errors import KvpinError
from kvpin.limits import (
    EMBEDDED_IDLE_S,
    EMBEDDED_LOG_BYTES_MAX,
    EMBEDDED_RETRY_S_MAX,
    EMBEDDED_RETRY_S_MIN,
    EMBEDDED_START_S,
    EMBEDDED_TAKEOVER_S,
    LOG_TAIL_BYTES,
)

BUSY_EXIT_CODE = 3  # of `kvpin master`: the pool has a master already

logger = logging.getLogger(__name__)

_children: list["subprocess.Popen[bytes]"] = []  # masters outlive the clients that started them; here they are reaped


class EmbeddedMaster:
    """Sees to it that a master runs at `address`, an ipc address on this host. It never waits; one thread uses it."""

    def __init__(self, config: ClientConfig, address: str, counters: Counters) -> None:
        self._config = config
        self._address = address
        self._counters = counters
        self._child: subprocess.Popen[bytes] | None = None
        self._log_path = Path()
        self._log_start = 0  # where this child's output begins
        self._late_s = 0.0  # when to say that the child takes long
        self._retry_s = EMBEDDED_RETRY_S_MIN
        self._next_try_s = 0.0

    def tend(self, now_s: float) -> None:
        """Call it now and then while there's no connection."""
        if is_listening(self._address):
            self._retry_s = EMBEDDED_RETRY_S_MIN
            return
        if self._child is not None:
            self._look_after(self._child, now_s)
        elif now_s >= self._next_try_s:
            self._next_try_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, EMBEDDED_RETRY_S_MAX)
            try:
                self._start(now_s)
            except (OSError, KvpinError) as error:
                self._failed(f"can't start it: {error}")

    def lost(self, now_s: float) -> None:
        """The session has ended. A master that somebody else started gets time to be started anew by them: one of ours
        would take its place, with another pool.
        """
        if self._child is None:
            self._next_try_s = max(self._next_try_s, now_s + EMBEDDED_TAKEOVER_S)

    def _start(self, now_s: float) -> None:
        directory = run_dir().absolute()
        self._log_path = directory / f"{self._config.pool}.log"
        with open(self._log_path, "ab", opener=_private) as log:
            if log.tell() > EMBEDDED_LOG_BYTES_MAX:
                log.truncate(0)
            self._log_start = log.seek(0, os.SEEK_END)
            self._child = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                close_fds=True,  # neither sockets nor device files of the engine
                start_new_session=True,  # nor its terminal and signals
                cwd=directory,
                env=_environment(directory),
            )
        self._late_s = now_s + EMBEDDED_START_S
        _children[:] = [child for child in _children if child.poll() is None] + [self._child]
        self._counters.add("masters_started")
        logger.info("event=master_started pid=%d address=%s log=%s", self._child.pid, self._address, self._log_path)

    def _command(self) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "kvpin.master", "--pool", config.pool, "--listen", self._address]
        if "KVPIN_EXIT_WHEN_IDLE_S" not in os.environ:
            command += ["--exit-when-idle-s", str(EMBEDDED_IDLE_S)]
        if config.pool_size is not None:
            command += ["--pool-size", config.pool_size]
        if config.guaranteed_limit is not None:
            command += ["--guaranteed-limit", config.guaranteed_limit]
        return command

    def _look_after(self, child: "subprocess.Popen[bytes]", now_s: float) -> None:
        code = child.poll()
        if code is None:
            if now_s >= self._late_s:
                self._late_s = now_s + EMBEDDED_START_S
                self._failed(f"pid {child.pid} runs, but doesn't listen after {EMBEDDED_START_S} s")
            return
        self._child = None
        if code == BUSY_EXIT_CODE:
            logger.debug("event=master_busy pid=%d", child.pid)  # somebody else's is about to listen
        elif code != 0:
            self._failed(f"pid {child.pid} ended with code {code}")

    def _failed(self, what: str) -> None:
        self._counters.add("masters_failed")
        logger.warning(
            "event=master_failed address=%s reason=%r log=%s retry_s=%d last_lines:\n%s",
            self._address, what, self._log_path, self._retry_s, self._log_tail(),
        )  # fmt: skip

    def _log_tail(self) -> str:
        try:
            with open(self._log_path, "rb") as log:
                size_bytes = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size_bytes - LOG_TAIL_BYTES))
                return log.read(LOG_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return str(error)


def is_listening(address: str) -> bool:
    """Does somebody accept connections at this ipc address? A socket file alone proves nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("ipc://"))
        except BlockingIOError:  # its backlog is full: it's there, but busy
            return True
        except OSError:
            return False
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _environment(directory: Path) -> dict[str, str]:
    """The child runs elsewhere, so what is relative to this process's directory is made absolute."""
    environment = dict(os.environ)
    environment["KVPIN_RUN_DIR"] = str(directory)
    if config_path := environment.get("KVPIN_CONFIG"):
        environment["KVPIN_CONFIG"] = os.path.abspath(config_path)
    package = str(Path(kvpin.__file__).parents[1])  # found by the child however this process found it
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    return environment
