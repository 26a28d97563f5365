"""Counters by name, added to from any thread."""

import threading
from collections import defaultdict


class Counters:
    def __init__(self) -> None:
        self._values: defaultdict[str, int] = defaultdict(int)
        self.renew_lock()

    def renew_lock(self) -> None:
        """For a forked child: a thread that it doesn't have may have held the lock."""
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:  # reading, adding and writing back isn't one step for the interpreter
            self._values[name] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
