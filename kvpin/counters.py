"""Counters by name, added to from any thread."""

import threading
from collections import defaultdict


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:  # reading, adding and writing back isn't one step for the interpreter
            self._values[name] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
