"""An in-process vLLM engine, requests in tokens, and a look inside."""

import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from kvpin.config import ClientConfig, run_dir
from kvpin.http.sidefield import MarkedPrefix, SideField, load_key, sign
from kvpin.keys import prefix_id
from kvpin.vllm_connector.connector import KVPinConnector
from kvpin.vllm_connector.manager import KVPinManager
from kvpin.vllm_connector.worker import CpuWorker

BLOCK_TOKENS = 32
OUTPUT_TOKENS = 12
# What a busy machine takes must not decide what a test sees; those about outages use the defaults.
PATIENT = {"lookup_deadline_ms": 5000, "put_deadline_ms": 5000}
DEFAULT_DEADLINES = {name: getattr(ClientConfig(), name) for name in PATIENT}
KV_TRANSFER = {
    "kv_connector": "KVPinConnector",
    "kv_connector_module_path": "kvpin.vllm_connector",
    "kv_role": "kv_both",
}


def tokens(seed: object, count: int) -> list[int]:
    """`count` token ids that depend on nothing but the seed."""
    generator = random.Random(str(seed))
    return [generator.randrange(3, 300) for _ in range(count)]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where marked breakpoints end."""

    ids: list[int]
    marks: tuple[int, ...] = ()
    ttl_ms: int = 60_000
    report: bytes = b""
    output_tokens: int = OUTPUT_TOKENS

    def marked_id(self, end_token: int) -> bytes:
        return prefix_id("test", self.ids[:end_token])

    def sampling(self) -> SamplingParams:
        extra: dict[str, Any] | None = None
        if self.marks:
            prefixes = [MarkedPrefix(self.marked_id(end).hex(), end, self.ttl_ms, "test") for end in self.marks]
            signed = sign(SideField(prefixes, self.report.hex()), load_key(run_dir()))
            extra = {"kv_transfer_params": {"kvpin": signed}}
        return SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True, extra_args=extra)


@dataclass
class Answered:
    ids: list[int]
    cached_tokens: int


@dataclass
class Engine:
    llm: LLM
    steps_s: list[float] = field(default_factory=list)

    @property
    def scheduler(self) -> Scheduler:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> KVPinConnector:
        return self.scheduler.connector

    @property
    def manager(self) -> KVPinManager:
        return self.connector.manager

    @property
    def worker(self) -> CpuWorker:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def ask(self, *prompts: Prompt) -> list[Answered]:
        inputs = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        outputs = self.llm.generate(inputs, [prompt.sampling() for prompt in prompts], use_tqdm=False)
        self.settle()
        return [Answered(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]

    def start(self, name: str, prompt: Prompt) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt.ids}, prompt.sampling())

    def step(self) -> list[Any]:
        started_s = time.monotonic()
        outputs = self.llm.llm_engine.step()
        self.steps_s.append(time.monotonic() - started_s)
        return outputs

    def run(self, *, steps_max: int = 5000) -> dict[str, list[int]]:
        """Step until nothing is left; the finished requests' outputs."""
        finished = {}
        while self.llm.llm_engine.has_unfinished_requests():
            steps_max -= 1
            assert steps_max > 0, "the engine does not finish its requests"
            for output in self.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        self.settle()
        return finished

    def settle(self) -> None:
        """Step until stores that were under way when the last request finished have ended."""
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(2000):
            if not core.scheduler.has_requests():
                return
            core.step_fn()
            time.sleep(0.001)
        raise AssertionError("transfers do not end")

    def forget_l1(self) -> None:
        assert self.llm.reset_prefix_cache()

    def count(self, name: str, *labels: str) -> int:
        return self.manager.counters.totals[name, labels]


@contextmanager
def engine(
    model: Path, *, kvpin: bool = True, extra: dict[str, Any] | None = None, **overrides: Any
) -> Iterator[Engine]:
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        **overrides,
    }
    if kvpin:
        arguments["kv_transfer_config"] = {**KV_TRANSFER, "kv_connector_extra_config": {**PATIENT, **(extra or {})}}
    llm = LLM(str(model), **arguments)
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def outputs(answers: Sequence[Answered]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def main(arguments: str) -> None:
    """In a process of its own: ask the prompts in rounds, each with an empty L1, and print what came as JSON."""
    import prometheus_client

    case = json.loads(arguments)
    prompts = [Prompt(ids) for ids in case["prompts"]]
    with engine(Path(case["model"]), **case["overrides"]) as process:
        rounds = []
        for _ in range(case["rounds"]):
            inputs = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
            answered = process.llm.generate(inputs, [prompt.sampling() for prompt in prompts], use_tqdm=False)
            rounds.append([[list(each.outputs[0].token_ids), each.num_cached_tokens] for each in answered])
            process.llm.reset_prefix_cache()
        metrics = prometheus_client.generate_latest().decode()
    sys.stdout.write("\nRESULT " + json.dumps({"rounds": rounds, "metrics": metrics}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
