"""The segment of the current epoch, mapped once for all threads of a client."""

import threading
from collections.abc import Sequence

from kvpin.prefault import Prefault
from kvpin.protocol import SegmentInfo
from kvpin.segment import Segment


class Mapping:
    """A new epoch replaces the mapping. Views of the old one stay valid memory until their users drop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._prefault: Prefault | None = None

    def views(self, info: SegmentInfo, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """The bytes of some ranges; an empty one where the offset is negative.

        Raises SegmentError if the segment can't be mapped or a range lies outside it.
        """
        with self._lock:
            segment = self._attached(info)
            return [
                segment.view(offset, size) if offset >= 0 else memoryview(b"")
                for offset, size in zip(offsets, sizes, strict=True)
            ]

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _attached(self, info: SegmentInfo) -> Segment:
        if self._segment is None or (self._segment.path, self._segment.epoch) != (info.path, info.epoch):
            self._drop()
            self._segment = Segment.attach(info.path, info.epoch)
            self._prefault = Prefault(self._segment.view(0, self._segment.size_bytes))
        return self._segment

    def _drop(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
            self._prefault = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
