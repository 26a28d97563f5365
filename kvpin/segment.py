"""The pool: one file of shared memory that the master makes and every engine process maps.

Not `multiprocessing.shared_memory`: its resource tracker unlinks a segment when any process that attached it exits
(cpython #82300). A named file in a tmpfs can be mapped again, is removed when its maker says so, and posix_fallocate
makes a lack of memory an error at the start instead of a SIGBUS later.

Layout: one header page `{magic, version, epoch, data bytes}`, then the data area. Offsets count from the data area.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpin.errors import SegmentError
from kvpin.limits import PAGE_BYTES, PREFAULT_SLICE_BYTES

MAGIC = b"kvpinseg"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sIIQQ")  # magic, format version, reserved, epoch, bytes of the data area
DATA_OFFSET = PAGE_BYTES
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it before Python 3.14

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

logger = logging.getLogger(__name__)


class Segment:
    """A mapping. `data` is the writable data area of `size_bytes`, which begins at `address` in this process."""

    def __init__(self, path: str, epoch: int, mapping: mmap.mmap, size_bytes: int, fd: int) -> None:
        self.path = path
        self.epoch = epoch
        self.size_bytes = size_bytes
        self._mapping = mapping
        self._fd = fd
        self.data = memoryview(mapping)[DATA_OFFSET : DATA_OFFSET + size_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    @classmethod
    def create(cls, path: str, size_bytes: int, epoch: int, *, progress: Progress | None = None) -> "Segment":
        """Make the file, with all its memory, for this user only, and lock it while it is open.

        Raises SegmentError: no room, no such directory, or the file is there already.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise SegmentError(f"{size_bytes} bytes: a segment is a positive multiple of {PAGE_BYTES}")
        _check_room(path, DATA_OFFSET + size_bytes)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SegmentError(f"can't make {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mapping = _allocate(fd, path, DATA_OFFSET + size_bytes, progress)
            mapping[: HEADER.size] = HEADER.pack(MAGIC, FORMAT_VERSION, 0, epoch, size_bytes)
            return cls(path, epoch, mapping, size_bytes, fd)
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, path: str, epoch: int) -> "Segment":
        """Map what a master made. Raises SegmentError if it isn't there, isn't ours, or is of another epoch."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"can't open {path}: {error.strerror}; is the master of epoch {epoch} gone?") from error
        try:
            size_bytes = _check_header(fd, path, epoch)
            mapping = mmap.mmap(fd, DATA_OFFSET + size_bytes)
        except OSError as error:
            raise SegmentError(f"can't map {path}: {error.strerror}") from error
        finally:
            os.close(fd)  # only the master needs its lock; a mapping outlives its descriptor
        return cls(path, epoch, mapping, size_bytes, -1)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes of one range. Raises SegmentError outside the data area. Release it before `close`."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise SegmentError(f"range {offset}+{size_bytes} lies outside the segment's {self.size_bytes} bytes")
        return self.data[offset : offset + size_bytes]

    def close(self) -> None:
        """Give up the mapping. While somebody still uses a view of it, the memory stays mapped until that is gone."""
        with contextlib.suppress(BufferError):
            self.data.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def unlink(self) -> None:
        """Remove the file; those who have it mapped keep the memory until they unmap it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def segment_path(directory: str, pool: str, epoch: int) -> str:
    return f"{_stem(directory, pool)}{epoch:x}"


def remove_stale(directory: str, pool: str) -> list[str]:
    """Unlink this user's segments of the pool that no living master holds: what a crash left. Returns their paths."""
    removed = []
    stem = Path(_stem(directory, pool))
    for path in sorted(stem.parent.glob(f"{stem.name}*")):
        with _opened(path) as fd:
            if fd is None or not _is_segment_of_ours(fd):
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink(missing_ok=True)
            removed.append(str(path))
            logger.warning("event=stale_segment_removed path=%s", path)
    return removed


def _stem(directory: str, pool: str) -> str:
    return os.path.join(directory, f"kvpin-{os.getuid()}-{pool}-")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _is_segment_of_ours(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _check_room(path: str, needed_bytes: int) -> None:
    directory = os.path.dirname(path)
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise SegmentError(f"segment directory {directory}: {error.strerror}") from error
    free_bytes = status.f_bavail * status.f_frsize
    if needed_bytes > free_bytes:
        raise SegmentError(
            f"the pool needs {needed_bytes} bytes, but {directory} has {free_bytes} free of "
            f"{status.f_blocks * status.f_frsize}. Make the pool smaller (--pool-size), or the file system larger: "
            "docker run --shm-size=16g (Docker's default is 64 MB); in Kubernetes an emptyDir with medium: Memory "
            "mounted at /dev/shm; elsewhere mount -o remount,size=16g /dev/shm"
        )


def _allocate(fd: int, path: str, total_bytes: int, progress: Progress | None) -> mmap.mmap:
    """Take all the memory now, slice by slice: the first touch of a fresh page costs as much as ten copies."""
    mapping: mmap.mmap | None = None
    try:
        for start in range(0, total_bytes, PREFAULT_SLICE_BYTES):
            os.posix_fallocate(fd, start, min(PREFAULT_SLICE_BYTES, total_bytes - start))
        mapping = mmap.mmap(fd, total_bytes)
        for start in range(0, total_bytes, PREFAULT_SLICE_BYTES):
            length = min(PREFAULT_SLICE_BYTES, total_bytes - start)
            with contextlib.suppress(OSError):  # an older kernel: pages are mapped at their first use instead
                mapping.madvise(_MADV_POPULATE_WRITE, start, length)
            if progress is not None:
                progress(start + length, total_bytes)
        return mapping
    except OSError as error:
        if mapping is not None:
            mapping.close()
        reason = "not enough memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else error.strerror
        raise SegmentError(f"can't get {total_bytes} bytes for {path}: {reason}; make the pool smaller") from error


def _check_header(fd: int, path: str, epoch: int) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0):
        raise SegmentError(f"{path} is not a file of uid {os.getuid()}: refusing to map somebody else's memory")
    raw = os.pread(fd, HEADER.size, 0)
    if len(raw) < HEADER.size:
        raise SegmentError(f"{path} is no segment: it has only {status.st_size} bytes")
    magic, version, _, its_epoch, size_bytes = HEADER.unpack(raw)
    if magic != MAGIC:
        raise SegmentError(f"{path} is no segment of kvpin")
    if version != FORMAT_VERSION:
        raise SegmentError(f"{path} has format {version}, this kvpin reads {FORMAT_VERSION}: run the same version")
    if its_epoch != epoch:
        raise SegmentError(f"{path} belongs to epoch {its_epoch}, not {epoch}")
    if status.st_size < DATA_OFFSET + size_bytes:
        raise SegmentError(f"{path} is cut short: {status.st_size} bytes for a data area of {size_bytes}")
    return int(size_bytes)
