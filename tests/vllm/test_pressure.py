"""A KV cache of 24 blocks: preemption, chunked prefill, and loads into blocks that were just freed."""

from pathlib import Path

from engine import Prompt, engine, outputs, tokens

from kvpin.vllm_connector import metrics
from tests.support.master import MasterProcess

TINY = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 128, "max_model_len": 512}


def prompts() -> list[Prompt]:
    shared = tokens("shared", 64)
    return [
        Prompt(shared + tokens(f"under pressure {index}", 40 + index), (64,) if index % 2 else (), output_tokens=160)
        for index in range(6)
    ]


def test_outputs_are_equal_through_preemptions_and_chunked_prefill(model: Path, master: MasterProcess) -> None:
    with engine(model, kvpin=False) as plain:
        expected = outputs(plain.ask(*prompts()))
    with engine(model, extra={"offload_prompt_only": False}, **TINY) as tiny:
        assert tiny.manager.client.wait_ready(5000)
        assert outputs(tiny.ask(*prompts())) == expected
        tiny.forget_l1()
        assert outputs(tiny.ask(*prompts())) == expected
        preemptions = next(each.value for each in tiny.llm.get_metrics() if each.name == "vllm:num_preemptions")
        assert preemptions > 0
        assert tiny.count(metrics.LOOKUP_BLOCKS, "hit") > 0
        assert tiny.manager._open == {}
