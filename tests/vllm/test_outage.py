"""The master stops answering or dies under load: outputs stay right, no step waits beyond the deadlines."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import DEFAULT_DEADLINES, Engine, Prompt, engine, outputs, tokens

from kvpin.limits import STEP_STORE_WAITS
from kvpin.vllm_connector import metrics
from tests.support.master import MasterProcess

# What a busy machine may add to a wait of a few milliseconds: another process has the core.
SCHEDULING_NOISE_S = 0.2


@pytest.fixture(scope="module")
def e(model: Path, master: MasterProcess) -> Iterator[Engine]:
    with engine(model, extra=DEFAULT_DEADLINES) as running:
        assert running.manager.client.wait_ready(5000)
        yield running


@pytest.fixture
def waits_s(e: Engine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each call of the manager kept the scheduler."""
    waits: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            started_s = time.monotonic()
            try:
                return method(*args, **kwargs)
            finally:
                waits.append(time.monotonic() - started_s)

        return call

    for name in ("arrived", "refresh", "lookup", "prepare_load", "complete_load", "prepare_store", "complete_store"):
        monkeypatch.setattr(e.manager, name, timed(getattr(e.manager, name)))
    return waits


def under_load(e: Engine, name: str, break_it: Callable[[], None]) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs before, and of the same prompts while `break_it` happens between them."""
    prompts = [
        Prompt(tokens(f"{name} {index}", 90 + 30 * index), marks=(64,) if index % 2 else (), output_tokens=24)
        for index in range(8)
    ]
    before = outputs(e.ask(*prompts))
    e.forget_l1()
    for index in range(4):
        e.start(str(index), prompts[index])
    e.step()
    e.step()
    break_it()
    for index in range(4, 8):
        e.start(str(index), prompts[index])
    finished = e.run()
    return before, [finished[str(index)] for index in range(8)]


def recovered(e: Engine, name: str) -> bool:
    """Hits are back: something new is stored, and loaded again. On a busy machine a deadline may pass now and then."""
    for attempt in range(10):
        assert e.manager.client.wait_ready(10_000)
        prompt = Prompt(tokens(f"{name} {attempt}", 100))
        cold = outputs(e.ask(prompt))
        e.forget_l1()
        (answer,) = e.ask(prompt)
        assert [answer.ids] == cold
        if answer.cached_tokens == 96:
            return True
    return False


def bound_s(e: Engine) -> float:
    config = e.manager.config
    return (STEP_STORE_WAITS + 1) * config.put_deadline_ms / 1000 + SCHEDULING_NOISE_S


def test_a_master_that_hangs(
    e: Engine, master: MasterProcess, waits_s: list[float], record_property: Callable[[str, object], None]
) -> None:
    before, during = under_load(e, "hang", master.stop)
    try:
        assert during == before
        record_property("longest_wait_ms", max(waits_s) * 1000)
        assert max(waits_s) < bound_s(e)
        assert e.count(metrics.LOOKUPS, "timeout") + e.count(metrics.STORE_BLOCKS, "timeout") > 0
        # While the breaker is open nothing waits at all.
        waits_s.clear()
        e.ask(Prompt(tokens("hang, breaker open", 200)))
        assert sum(waits_s) < bound_s(e)
    finally:
        master.cont()
    assert recovered(e, "after the hang")


def test_a_master_that_is_killed_and_started_anew(e: Engine, master: MasterProcess, waits_s: list[float]) -> None:
    epoch = e.manager.client.epoch
    before, during = under_load(e, "kill", master.kill)
    assert during == before
    assert max(waits_s) < bound_s(e)
    master.start()
    assert recovered(e, "after the kill")
    assert e.manager.client.epoch != epoch
