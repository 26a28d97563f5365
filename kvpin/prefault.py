"""Enter shared memory in this process's page table, in the background, before it is used.

The master has made the pages, but each process meets each page once: a copy into 4 MiB that it hasn't touched yet takes
some nine times as long as the next one.
"""

import contextlib
import ctypes
import logging
import os
import threading

from kvpin.limits import PAGE_BYTES, PREFAULT_BACKGROUND_BYTES

_MADV_POPULATE_WRITE = 23  # Linux 5.14; it changes no byte
_LOWEST_PRIORITY = 19

logger = logging.getLogger(__name__)

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap.madvise it runs without the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefault:
    """Works through `memory`, which it keeps alive, from its start on, until it's done or told to stop."""

    def __init__(self, memory: memoryview) -> None:
        self._stop = threading.Event()
        threading.Thread(target=self._run, args=(memory,), name="kvpin-prefault", daemon=True).start()

    def stop(self) -> None:
        """Give the memory up soon; doesn't wait."""
        self._stop.set()

    def _run(self, memory: memoryview) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread only
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        end = address + memory.nbytes
        address -= address % PAGE_BYTES
        while address < end and not self._stop.is_set():
            length = min(PREFAULT_BACKGROUND_BYTES, end - address)
            if _madvise(address, length, _MADV_POPULATE_WRITE) != 0:
                logger.debug(
                    "event=prefault_ended errno=%d", ctypes.get_errno()
                )  # an older kernel: pages come one by one
                return
            address += length
