"""What happened, for `kvpin story KEY`: a bounded log of events, each with all keys it concerned.

One event for a whole batch, and the log is searched when somebody asks: telling a story may take milliseconds,
recording it must not. Reads are not recorded; they would push out what one wants to know.
"""

from collections import deque
from collections.abc import Sequence

from kvpin.limits import STORY_KEYS_MAX, STORY_LINES_MAX
from kvpin.protocol import StoryLine


class Stories:
    __slots__ = ("_events", "_keys")

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, Sequence[bytes]]] = deque()  # (when, what, keys), the oldest first
        self._keys = 0  # of all events

    def __len__(self) -> int:
        return self._keys

    def record(self, now_ms: int, event: str, keys: Sequence[bytes]) -> None:
        """`keys` is kept as it is: don't change it afterwards."""
        if not keys:
            return
        self._events.append((now_ms, event, keys))
        self._keys += len(keys)
        while self._keys > STORY_KEYS_MAX:
            self._keys -= len(self._events.popleft()[2])

    def of(self, key: bytes, now_ms: int) -> list[StoryLine]:
        """The last STORY_LINES_MAX events of a key, the oldest first."""
        lines: list[StoryLine] = []
        for when_ms, event, keys in reversed(self._events):
            if key in keys:
                lines.append(StoryLine(now_ms - when_ms, event))
                if len(lines) == STORY_LINES_MAX:
                    break
        return lines[::-1]
