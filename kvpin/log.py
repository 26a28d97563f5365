"""Logging of kvpin's own processes: one line an event, `key=value` or JSON, on stderr.

Libraries and engine adapters only ask for loggers named `kvpin.*`; who configures them is the process's business.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from kvpin.limits import LOG_PERIOD_S


class KvFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z level=info logger=kvpin.master event=ready ...`."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record)} level={record.levelname.lower()} logger={record.name}"
        line = f"{head} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def configure(level: str, log_format: Literal["kv", "json"]) -> None:
    """Send the `kvpin` loggers of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else KvFormatter())
    logger = logging.getLogger("kvpin")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class Throttle:
    """Lets one event of a name pass in `period_s`, and says how many it held back before."""

    def __init__(self, period_s: float = LOG_PERIOD_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # name -> when one passed, how many were held back since

    def admit(self, name: str) -> int | None:
        """None: hold it back. Otherwise the number held back since the last that passed. `name`s must be few."""
        now_s = self._clock()
        passed_s, held = self._seen.get(name, (float("-inf"), 0))
        if now_s - passed_s < self._period_s:
            self._seen[name] = (passed_s, held + 1)
            return None
        self._seen[name] = (now_s, 0)
        return held
