"""Copies between buffers: with the GIL held when short, without it when long."""

import ctypes
from typing import TYPE_CHECKING

from kvpin.limits import GIL_KEPT_BYTES_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer


def flat(buffer: "Buffer", what: str) -> memoryview:
    """The buffer's bytes. Raises ValueError if they don't lie in one piece."""
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise ValueError(f"{what}: {error}; give contiguous bytes (for numpy: array.view(numpy.uint8))") from error


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `target`; both are flat, and `target` is writable and long enough.

    Other threads run during a long copy. A short one is over before the GIL could change hands.
    """
    size_bytes = source.nbytes
    origin = _movable(source) if size_bytes > GIL_KEPT_BYTES_MAX else None
    if origin is None:
        target[:size_bytes] = source
    else:
        ctypes.memmove(_address(target), origin, size_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _movable(source: memoryview) -> int | bytes | None:
    """What memmove takes for the source; None: read-only memory that ctypes finds no address of."""
    if not source.readonly:
        return _address(source)
    whole = source.obj
    return whole if isinstance(whole, bytes) and len(whole) == source.nbytes else None
