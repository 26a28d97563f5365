"""Random requests, aborts, resets and outages of the master on a tiny KV cache: every output must be right."""

import random
from collections.abc import Callable
from pathlib import Path

from engine import DEFAULT_DEADLINES, Engine, Prompt, engine, outputs, tokens

from kvpin.vllm_connector import metrics
from tests.support.master import MasterProcess

TINY = {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 128, "max_model_len": 512}
REQUESTS = 400
SEED = 20


def prompts() -> list[Prompt]:
    """Three systems, two documents each, two questions each; every other one is marked."""
    return [
        Prompt(
            tokens(f"system {system}", 64 + 32 * system)
            + tokens(f"document {system} {document}", 70 * document)
            + tokens(f"question {system} {document} {question}", 5 + 31 * question),
            marks=(64,) if question else (),
            ttl_ms=500,
            output_tokens=(4, 100)[document],
        )
        for system in range(3)
        for document in range(2)
        for question in range(2)
    ]


class Trouble:
    """Does one random thing before each step of the engine."""

    def __init__(self, engine: Engine, master: MasterProcess, expected: list[list[int]]) -> None:
        self._random = random.Random(SEED)
        self._engine = engine
        self._expected = expected
        self._started = 0
        self._running: dict[str, int] = {}
        self._mend: Callable[[], None] | None = None  # what brings the master back
        self._breaks = [(master.stop, master.cont), (master.kill, master.start)]
        self.finished = 0

    def run(self) -> None:
        while self._started < REQUESTS:
            self._disturb()
            self._step()
        self.mend()
        while self._running:
            self._step()

    def mend(self) -> None:
        if self._mend is not None:
            self._mend()
            self._mend = None

    def _disturb(self) -> None:
        chance = self._random.random()
        if chance < 0.3 and len(self._running) < 10:
            self._started += 1
            index = self._random.randrange(len(self._expected))
            self._running[str(self._started)] = index
            self._engine.start(str(self._started), prompts()[index])
        elif chance < 0.32 and self._running:
            aborted = self._random.choice(list(self._running))
            self._engine.llm.llm_engine.abort_request([aborted])
            del self._running[aborted]
        elif chance < 0.33:
            while self._running:
                self._step()
            self._engine.llm.reset_prefix_cache(reset_connector=self._random.random() < 0.2)
        elif chance < 0.338:
            if self._mend is not None:
                self.mend()
            else:
                break_it, self._mend = self._random.choice(self._breaks)
                break_it()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self._running:
                index = self._running.pop(output.request_id)
                assert list(output.outputs[0].token_ids) == self._expected[index]
                self.finished += 1


def test_whatever_happens_outputs_are_right_and_nothing_is_left(model: Path, master: MasterProcess) -> None:
    with engine(model, kvpin=False, max_model_len=512) as plain:
        expected = outputs(plain.ask(*prompts()))
    with engine(model, extra={**DEFAULT_DEADLINES, "offload_prompt_only": False}, **TINY) as tiny:
        assert tiny.manager.client.wait_ready(5000)
        trouble = Trouble(tiny, master, expected)
        try:
            trouble.run()
        finally:
            trouble.mend()
        assert tiny.manager.client.wait_ready(10_000)
        tiny.ask(Prompt(tokens("the last", 40)))
        assert trouble.finished > REQUESTS // 2
        assert tiny.count(metrics.LOOKUP_BLOCKS, "hit") > 0
        assert [name for name, _ in tiny.manager.counters.totals if name == metrics.FAULTS] == []
        assert tiny.manager._open == {}
        assert tiny.connector._orphans == {}
        assert len(tiny.manager._states) <= 1  # vLLM tells of a finished request in its next step
        assert max(tiny.steps_s) < 2.0
