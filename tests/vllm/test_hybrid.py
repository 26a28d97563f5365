"""A model with full and sliding-window attention: two groups of KV blocks, and block ids that mean two things."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from engine import BLOCK_TOKENS, Prompt, engine, outputs, tokens

from kvpin.vllm_connector import metrics
from tests.support.master import MasterProcess


@pytest.fixture(scope="module")
def hybrid_model(make_model: Callable[..., Path]) -> Path:
    folder = make_model("--arch", "llama")
    config = json.loads((folder / "config.json").read_text())
    config["sliding_window"] = 2 * BLOCK_TOKENS
    config["layer_types"] = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_outputs_are_equal_when_loaded_and_when_the_load_fails(
    hybrid_model: Path, master: MasterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(tokens(f"hybrid {index}", 70 + 40 * index), marks=(64,)) for index in range(6)]
    with engine(hybrid_model, kvpin=False) as plain:
        expected = outputs(plain.ask(*prompts))
    with engine(hybrid_model) as hybrid:
        assert hybrid.manager.client.wait_ready(5000)
        assert len(hybrid.scheduler.kv_cache_config.kv_cache_groups) == 2
        assert outputs(hybrid.ask(*prompts)) == expected
        hybrid.forget_l1()
        loaded = hybrid.ask(*prompts)
        assert outputs(loaded) == expected
        assert [answer.cached_tokens for answer in loaded] == [
            len(each.ids) // BLOCK_TOKENS * BLOCK_TOKENS for each in prompts
        ]
        hybrid.forget_l1()
        with monkeypatch.context() as patched:
            patched.setattr(hybrid.worker, "_clock", lambda: float("inf"))
            assert outputs(hybrid.ask(*prompts)) == expected
        assert hybrid.count(metrics.TRANSFER_FAILURES, "load", "expired") == len(prompts)
