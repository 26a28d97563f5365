"""Is a process dead for certain? A pid alone can't tell: it is used again, and means another one in a container."""

import hashlib
import os
from pathlib import Path

import msgspec

_STATE, _START_TIME = 0, 19  # fields 3 and 22 of /proc/<pid>/stat, counted after the command's closing parenthesis


class Process(msgspec.Struct, frozen=True):
    """A process as it was when it said Hello. `known` False: nothing can be said about it, ever."""

    pid: int
    start_ticks: int
    known: bool

    def is_dead(self) -> bool:
        """True only if no thread of it can touch memory any more."""
        if not self.known:
            return False
        fields = _stat_fields(self.pid)
        if fields is None or int(fields[_START_TIME]) != self.start_ticks:
            return True
        return fields[_STATE] in ("Z", "X") and _threads(self.pid) <= 1  # unreaped; the leader may go before others


UNKNOWN = Process(0, 0, False)


def pid_namespace() -> int:
    """A number for this process's pid namespace on this host: pids can be compared only within one. 0: unknown.

    The boot id is in it, because the first namespace of every host has the same inode.
    """
    try:
        inode = os.stat("/proc/self/ns/pid").st_ino
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(f"{boot_id} {inode}".encode()).digest()[:7], "big") + 1


def identify(pid: int, namespace: int) -> Process:
    """The process `pid` of `namespace`, to be asked later whether it is dead."""
    if pid <= 0 or namespace == 0 or namespace != pid_namespace():
        return UNKNOWN
    fields = _stat_fields(pid)
    return Process(pid, int(fields[_START_TIME]) if fields else -1, True)


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
