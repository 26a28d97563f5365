"""A measuring process: reads commands, one JSON line each, and answers each with one.

`python worker.py SYSTEM OPTIONS`. A command names an operation, the objects, and how many calls; the answer has the
seconds that each call took. Bytes are checked by `verify`, which is not timed.
"""

import json
import sys
import time
from typing import Any

from adapters import ADAPTERS, Adapter, Buffer, check


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    sys.stdout.flush()
    answers = sys.stdout  # a system's own output must not get between the answers
    sys.stdout = sys.stderr
    worker = Worker(ADAPTERS[name](options))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"seconds": worker.run(**command)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._buffers: list[Buffer] = []

    def run(self, operation: str, size_bytes: int, first: int, batch: int, calls: int) -> list[float]:
        """`first`: the number of the first object. put goes on to new objects with each call; others repeat theirs."""
        if not self._buffers or self._buffers[0].nbytes != size_bytes:
            self._buffers = self._adapter.buffers(size_bytes)
        seconds: list[float] = []
        for call in range(calls):
            start = first + (call * batch if operation == "put" else 0)
            numbers = range(start, start + batch)
            keys = self._adapter.keys(numbers)
            buffers = [self._buffers[(call * batch + index) % len(self._buffers)] for index in range(batch)]
            if operation == "put":
                for number, buffer in zip(numbers, buffers, strict=True):
                    buffer[:8] = _stamp(number)
            seconds.append(self._once(operation, keys, buffers, numbers))
        return seconds

    def _once(self, operation: str, keys: Any, buffers: list[Buffer], numbers: range) -> float:
        adapter = self._adapter
        if operation == "verify":
            adapter.get(keys, buffers)
            for number, buffer in zip(numbers, buffers, strict=True):
                check(buffer[:8].tolist() == _stamp(number) and buffer[-1] == 1, f"object {number}")
            return 0.0
        started_s = time.perf_counter()
        match operation:
            case "put":
                adapter.put(keys, buffers)
            case "get":
                adapter.get(keys, buffers)
            case "exists":
                adapter.exists(keys)
            case "lookup":
                adapter.lookup(keys)
            case "remove":
                adapter.remove(keys)
            case _:
                raise ValueError(f"no operation {operation}")
        return time.perf_counter() - started_s


def _stamp(number: int) -> list[int]:
    return list(number.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
