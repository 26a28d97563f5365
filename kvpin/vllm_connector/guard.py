"""The one rule of the adapter, as a decorator: no exception of ours reaches the engine."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvpin.log import Throttle
from kvpin.vllm_connector import metrics

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Guarded(Protocol):
    counters: metrics.Counters
    fault_log: Throttle


def guarded(fallback: Callable[[], Any]) -> Callable[[F], F]:
    """Make a method answer `fallback()` instead of raising; count it, and log one line a minute for each method."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _note(self, method.__name__)
                return fallback()

        return cast(F, call)

    return decorate


def nothing() -> Any:
    """The fallback of entry points without a result."""


def _note(target: Guarded, entry: str) -> None:
    target.counters.add(metrics.FAULTS, entry)
    held = target.fault_log.admit(entry)
    if held is not None:
        logger.exception("event=connector_fault entry=%s effect=miss more_before=%d", entry, held)
