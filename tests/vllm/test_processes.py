"""Engines in processes of their own share one pool; so do the ranks of one engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK_TOKENS, Prompt, engine, outputs, tokens

from tests.support.master import MasterProcess

pytestmark = pytest.mark.timeout(180)


def in_a_process(
    model: Path, prompts: list[Prompt], rounds: int = 1, environment: dict[str, str] | None = None, **overrides: Any
) -> tuple[list[list[tuple[list[int], int]]], str]:
    """For each round the output and the cached tokens of each prompt; and vLLM's metrics page."""
    case = {"model": str(model), "prompts": [each.ids for each in prompts], "rounds": rounds, "overrides": overrides}
    script = str(Path(__file__).with_name("engine.py"))
    done = subprocess.run(
        [sys.executable, script, json.dumps(case)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(results[0].removeprefix("RESULT "))
    return [[(ids, cached) for ids, cached in each] for each in result["rounds"]], result["metrics"]


def full_blocks(prompts: list[Prompt]) -> list[int]:
    return [len(prompt.ids) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]


def test_two_engines_share_blocks_both_ways(model: Path, master: MasterProcess) -> None:
    ours = [Prompt(tokens(f"ours {index}", 70 + 50 * index), marks=(64,)) for index in range(4)]
    theirs = [Prompt(tokens(f"theirs {index}", 75 + 50 * index)) for index in range(4)]
    with engine(model) as here:
        assert here.manager.client.wait_ready(5000)
        expected = outputs(here.ask(*ours))
        (there,), _ = in_a_process(model, ours + theirs)
        assert [ids for ids, _ in there[:4]] == expected
        assert [cached for _, cached in there] == [*full_blocks(ours), 0, 0, 0, 0]
        answers = here.ask(*theirs)
    assert outputs(answers) == [ids for ids, _ in there[4:]]
    assert [answer.cached_tokens for answer in answers] == full_blocks(theirs)


def test_tensor_parallel_ranks_each_keep_their_slice(model: Path, master: MasterProcess) -> None:
    prompts = [Prompt(tokens(f"parallel {index}", 70 + 50 * index)) for index in range(4)]
    (cold, loaded), metrics = in_a_process(
        model,
        prompts,
        rounds=2,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert [cached for _, cached in cold] == [0] * 4
    assert [cached for _, cached in loaded] == full_blocks(prompts)
    assert [ids for ids, _ in loaded] == [ids for ids, _ in cold]
    # Counted in the engine's process, shown in the server's.
    assert 'vllm:kvpin_lookup_blocks_total{engine="0"' in metrics
