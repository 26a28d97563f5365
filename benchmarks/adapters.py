"""The measured systems behind one small interface, so that the same loop measures all of them.

Each is used by two processes, neither of which owns the memory that the objects lie in. Keys are numbers: object `n` of
the size in use.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from cases import slots

Buffer = npt.NDArray[np.uint8]


class Adapter(Protocol):
    """`keys` turns numbers into what the other methods take; that is not timed."""

    def buffers(self, size_bytes: int) -> list[Buffer]: ...
    def keys(self, numbers: Sequence[int]) -> Any: ...
    def put(self, keys: Any, buffers: list[Buffer]) -> None: ...
    def get(self, keys: Any, buffers: list[Buffer]) -> None: ...
    def exists(self, keys: Any) -> None: ...
    def lookup(self, keys: Any) -> None: ...
    def remove(self, keys: Any) -> None: ...


def plain_buffers(size_bytes: int) -> list[Buffer]:
    return list(np.ones((slots(size_bytes), size_bytes), dtype=np.uint8))


class Kvpin:
    def __init__(self, options: dict[str, Any]) -> None:
        from kvpin import Client
        from kvpin.config import ClientConfig
        from kvpin.protocol import GetReplicas

        self._client = Client(config=ClientConfig(address=options["address"], call_timeout_ms=20_000))
        self._ask: Callable[[Any], Any] = lambda keys: self._client.call(GetReplicas(keys, lease_ms=500))
        if not self._client.wait_ready(20_000):
            raise RuntimeError(f"no master at {options['address']}")

    buffers = staticmethod(plain_buffers)

    def keys(self, numbers: Sequence[int]) -> list[bytes]:
        return [b"%076d" % number for number in numbers]

    def put(self, keys: list[bytes], buffers: list[Buffer]) -> None:
        outcomes = self._client.put_from(keys, buffers)
        check(all(outcome.readable for outcome in outcomes), "put")

    def get(self, keys: list[bytes], buffers: list[Buffer]) -> None:
        check(None not in self._client.get_into(keys, buffers), "get")

    def exists(self, keys: list[bytes]) -> None:
        check(all(self._client.exists(keys)), "exists")

    def lookup(self, keys: list[bytes]) -> None:
        replicas = self._ask(keys)
        check(min(replicas.offsets) >= 0, "lookup")
        self._client.release(replicas.lease_id)

    def remove(self, keys: list[bytes]) -> None:
        self._client.remove(keys, force=True)


class Mooncake:
    """Batches by its batch calls, single objects by its single ones; it has a lookup of where replicas lie, too."""

    def __init__(self, options: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", options["segment_bytes"], 512 << 20, "tcp", "", options["address"]
        )
        check(code == 0, f"setup: {code}")
        self._buffers: list[Buffer] = []

    def buffers(self, size_bytes: int) -> list[Buffer]:
        if self._buffers:
            self._store.unregister_buffer(self._buffers[0].ctypes.data)
        self._buffers = plain_buffers(size_bytes)
        whole_bytes = len(self._buffers) * size_bytes
        check(self._store.register_buffer(self._buffers[0].ctypes.data, whole_bytes) == 0, "register_buffer")
        return self._buffers

    def keys(self, numbers: Sequence[int]) -> list[str]:
        return [f"{number:076d}" for number in numbers]

    def put(self, keys: list[str], buffers: list[Buffer]) -> None:
        if len(keys) == 1:
            check(self._store.put_from(keys[0], buffers[0].ctypes.data, buffers[0].nbytes) == 0, "put_from")
        else:
            pointers, sizes = _pointers(buffers)
            check(not any(self._store.batch_put_from(keys, pointers, sizes)), "batch_put_from")

    def get(self, keys: list[str], buffers: list[Buffer]) -> None:
        if len(keys) == 1:
            check(self._store.get_into(keys[0], buffers[0].ctypes.data, buffers[0].nbytes) > 0, "get_into")
        else:
            pointers, sizes = _pointers(buffers)
            check(min(self._store.batch_get_into(keys, pointers, sizes)) > 0, "batch_get_into")

    def exists(self, keys: list[str]) -> None:
        check(min(self._store.batch_is_exist(keys)) == 1, "batch_is_exist")

    def lookup(self, keys: list[str]) -> None:
        check(len(self._store.batch_get_replica_desc(keys)) == len(keys), "batch_get_replica_desc")

    def remove(self, keys: list[str]) -> None:
        self._store.remove_all(True)


class Memcpy:
    """No store at all: numpy copies into and out of a file in /dev/shm at places that both processes know."""

    def __init__(self, options: dict[str, Any]) -> None:
        with open(options["path"], "r+b") as file:
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
        self._memory[:: mmap.PAGESIZE] = 0  # else the first copy to each page would measure page faults

    buffers = staticmethod(plain_buffers)

    def keys(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    def put(self, keys: Sequence[int], buffers: list[Buffer]) -> None:
        for number, buffer in zip(keys, buffers, strict=True):
            np.copyto(self._place(number, buffer.nbytes), buffer)

    def get(self, keys: Sequence[int], buffers: list[Buffer]) -> None:
        for number, buffer in zip(keys, buffers, strict=True):
            np.copyto(buffer, self._place(number, buffer.nbytes))

    def exists(self, keys: Sequence[int]) -> None:
        raise NotImplementedError

    lookup = exists

    def remove(self, keys: Sequence[int]) -> None:
        pass

    def _place(self, number: int, size_bytes: int) -> Buffer:
        start = number % (self._memory.nbytes // size_bytes) * size_bytes
        return self._memory[start : start + size_bytes]


ADAPTERS: dict[str, Callable[[dict[str, Any]], Adapter]] = {"kvpin": Kvpin, "mooncake": Mooncake, "memcpy": Memcpy}


def check(good: bool, what: str) -> None:
    if not good:
        raise RuntimeError(f"{what} failed")


def _pointers(buffers: list[Buffer]) -> tuple[list[int], list[int]]:
    return [buffer.ctypes.data for buffer in buffers], [buffer.nbytes for buffer in buffers]
