"""The shared memory that holds all objects: one file in /dev/shm, mapped by the master and by every engine process.

Layout: a header page (magic, format, epoch, size), then the data area; offsets in kvpin count from the start of the
data area. Created by hand rather than with `multiprocessing.shared_memory`, whose resource tracker unlinks a segment
when any process that attached it exits (cpython #82300). Memory is allocated and touched at creation: a full /dev/shm
is then an error at start, where a sparse file would kill some engine with SIGBUS much later.

The creator holds a lock on the file for as long as it lives. A file that nobody holds is a crash's leftover, whatever
process ids or clocks say, and `remove_stale` unlinks it.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvpin.errors import SegmentError
from kvpin.limits import PAGE_BYTES, PREFAULT_SLICE_BYTES

SHM_DIR = "/dev/shm"
HEADER_BYTES = PAGE_BYTES

_MAGIC = b"KVPINSEG"
_FORMAT = 1
_HEADER = struct.Struct("<8sIxxxxQQ")  # magic, format, epoch, size of the data area in bytes
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it yet
_HOW_TO_GET_ROOM = (
    "choose a smaller pool (--pool-size), or enlarge the file system: Docker gives a container 64 MB unless it is "
    "started with `--shm-size=8g` (or `--ipc=host`), Kubernetes needs an emptyDir volume with `medium: Memory` mounted "
    "there"
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all

logger = logging.getLogger(__name__)


def segment_path(directory: str | Path, pool: str, epoch: int) -> str:
    """Where a master of this user keeps the segment of one epoch."""
    return f"{directory}/{_prefix(pool)}{epoch:x}"


def free_bytes(directory: str | Path) -> int:
    """What the file system of `directory` has left. Raises SegmentError if there is no such directory."""
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise SegmentError(f"segment_dir {directory}: {error.strerror}; give a directory on a tmpfs") from error
    return room.f_bavail * room.f_frsize


def remove_stale(directory: str | Path, pool: str) -> list[str]:
    """Unlink this user's segments of `pool` whose master is gone; their paths.

    Processes that have such a segment mapped keep their memory until they unmap it. A running master's segment is
    locked and stays. Raises SegmentError if the directory can't be read.
    """
    name_of_ours = re.compile(re.escape(_prefix(pool)) + "[0-9a-f]+")
    try:
        names = sorted(name for name in os.listdir(directory) if name_of_ours.fullmatch(name))
    except OSError as error:
        raise SegmentError(f"segment_dir {directory}: {error.strerror}; give a directory on a tmpfs") from error
    return [path for name in names if _unlink_if_unlocked(path := f"{directory}/{name}")]


class Segment:
    """A mapped segment. Make one with `create` or `attach`.

    `data`: the data area, writable. `address`: where it is mapped in this process. Sizes and offsets in bytes.
    """

    def __init__(self, path: str, epoch: int, memory: mmap.mmap, lock_handle: int | None) -> None:
        self.path = path
        self.epoch = epoch
        self.size_bytes = len(memory) - HEADER_BYTES
        self.address = _address(memory) + HEADER_BYTES
        self.data = memoryview(memory)[HEADER_BYTES:]
        self._memory: mmap.mmap | None = memory
        self._lock_handle = lock_handle  # of the creator: open as long as the segment is in use

    @classmethod
    def create(cls, path: str, size_bytes: int, epoch: int, *, progress: Progress | None = None) -> "Segment":
        """Make, lock, allocate and touch a segment with a data area of `size_bytes` (whole pages).

        Mode 0600. Raises SegmentError if there is no room, the path exists, or its directory doesn't.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise SegmentError(f"segment size {size_bytes}: give a positive multiple of {PAGE_BYTES} bytes")
        _check_room(path, HEADER_BYTES + size_bytes)
        handle = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _lock_new(handle, path)
            memory = _allocate(handle, path, HEADER_BYTES + size_bytes, progress)
            # Last, so that nobody attaches a segment that isn't whole.
            memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT, epoch, size_bytes)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(handle)
            raise
        return cls(path, epoch, memory, handle)

    @classmethod
    def attach(cls, path: str, epoch: int) -> "Segment":
        """Map the segment of that epoch. Raises SegmentError if it's gone, foreign, or not what was asked for."""
        handle = _open(path, os.O_RDWR)
        try:
            size_bytes = _check_header(handle, path, epoch)
            memory = mmap.mmap(handle, HEADER_BYTES + size_bytes, mmap.MAP_SHARED)
        except (OSError, OverflowError) as error:
            raise SegmentError(f"can't map {path}: {error}") from error
        finally:
            os.close(handle)  # the mapping has a handle of its own
        return cls(path, epoch, memory, None)

    def view(self, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` of the data area. Raises SegmentError if they don't lie in it."""
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise SegmentError(f"{size} bytes from {offset} don't lie in the {self.size_bytes} bytes of {self.path}")
        if self._memory is None:
            raise SegmentError(f"{self.path} is closed")
        return self.data[offset : offset + size]

    def close(self) -> None:
        """Unmap, and unlock if this process made it. Safe to call twice.

        Never fails for views that are still in use: the memory then stays mapped until the last of them is gone.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):
                self.data.release()
                memory.close()
        handle, self._lock_handle = self._lock_handle, None
        if handle is not None:
            # Explicitly: a mapping that outlives this holds a duplicate of the handle, and the lock with it.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def unlink(self) -> None:
        """Remove the name; mappings live on. No error if it's gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _prefix(pool: str) -> str:
    return f"kvpin-{os.geteuid()}-{pool}-"


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # the temporary's export ends with it


def _check_room(path: str, wanted_bytes: int) -> None:
    directory = os.path.dirname(path)
    free = free_bytes(directory)
    if wanted_bytes > free:
        _no_room(directory, wanted_bytes, free)


def _no_room(directory: str, wanted_bytes: int, free: int) -> NoReturn:
    raise SegmentError(
        f"{directory} has {free} bytes free ({free / 2**20:.0f} MiB), the segment needs {wanted_bytes} "
        f"({wanted_bytes / 2**20:.0f} MiB): {_HOW_TO_GET_ROOM}"
    )


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise SegmentError(f"there is no segment {path}: its master has stopped or was started anew") from error
    except FileExistsError as error:
        raise SegmentError(f"{path} exists already") from error
    except OSError as error:
        raise SegmentError(f"can't open {path}: {error.strerror}") from error


def _lock_new(handle: int, path: str) -> None:
    """Lock a file just made. Between the two, another master's `remove_stale` may have found it unlocked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        if os.fstat(handle).st_nlink:
            return
    raise SegmentError(f"{path} was taken for a leftover by another master that started just now: start again")


def _allocate(handle: int, path: str, size_bytes: int, progress: Progress | None) -> mmap.mmap:
    """Allocate and touch the whole file, slice by slice so that progress is seen, and map it."""
    try:
        os.ftruncate(handle, size_bytes)
        memory = mmap.mmap(handle, size_bytes, mmap.MAP_SHARED)
        for start in range(0, size_bytes, PREFAULT_SLICE_BYTES):
            length = min(PREFAULT_SLICE_BYTES, size_bytes - start)
            os.posix_fallocate(handle, start, length)
            _touch(memory, start, length)
            if progress is not None:
                progress(start + length, size_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            directory = os.path.dirname(path)
            _no_room(directory, size_bytes, free_bytes(directory))
        raise SegmentError(f"can't allocate {size_bytes} bytes for {path}: {error.strerror}") from error
    return memory


def _touch(memory: mmap.mmap, start: int, length: int) -> None:
    """Have the pages mapped now, rather than one fault at a time under the first objects."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel
            raise
        memory[start : start + length : PAGE_BYTES] = bytes(-(-length // PAGE_BYTES))


def _check_header(handle: int, path: str, epoch: int) -> int:
    """The size of the data area."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise SegmentError(f"{path} is no regular file")
    if status.st_uid != os.geteuid():
        raise SegmentError(
            f"{path} belongs to user {status.st_uid}, this process to {os.geteuid()}: run master and engine as one user"
        )
    header = os.pread(handle, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise SegmentError(f"{path} is no kvpin segment, or its master is still making it")
    _, format_version, its_epoch, size_bytes = _HEADER.unpack(header)
    if format_version != _FORMAT:
        raise SegmentError(f"{path} has format {format_version}, this kvpin reads {_FORMAT}: install one version")
    if its_epoch != epoch:
        raise SegmentError(f"{path} is of epoch {its_epoch}, not {epoch}: the master was started anew")
    if status.st_size != HEADER_BYTES + size_bytes:
        raise SegmentError(f"{path} has {status.st_size} bytes where its header says {HEADER_BYTES + size_bytes}")
    return int(size_bytes)


def _unlink_if_unlocked(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or not ours to judge
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(handle)
    logger.warning("event=stale_segment_removed path=%s bytes=%d", path, status.st_size)
    return True
