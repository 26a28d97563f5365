"""The promise, seen: a marked prefix survives a flood and a restart of the engine, what isn't marked does not.

    make demo

A master with a small pool and the real `vllm serve` on CPU. A marked request is asked once; unmarked ones then turn the
pool over several times; a fresh vLLM process gets the prefix back from kvpin, with the same output as a vLLM without
kvpin; then the protection is ended by the request's own messages. Every number is read from answers or from the master.
Writes build/demo.json; the exit code is 0 only if every promise was kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.chat import Chat, Message, conversation
from examples.servers import BLOCK_TOKENS, Failed, Vllm, start_master

console = Console()


@dataclass(frozen=True)
class Plan:
    """How big a demo. `turnovers`: how often the flood fills the whole pool (a pool-full of it is left at the end)."""

    pool_size: str = "24MiB"
    marked_words: int = 1300  # about 1,750 tokens
    flood_words: int = 500
    turnovers: float = 8.0
    flood_max: int = 1000
    ttl: str = "1h"


@dataclass
class Findings:
    """What build/demo.json holds. Times in milliseconds from sending a request to its first token."""

    outputs_equal: bool = False
    protected_tokens: int = 0
    marked_full_block_tokens: int = 0
    hit_tokens_after_flood: int = 0
    flood_prompts: int = 0
    pool_turnovers: float = 0.0
    unprotected_survivors: int = 0
    guaranteed_lost: int = 0
    evicted_blocks: int = 0
    evict_ended_protection: bool = False
    hit_tokens_after_evict: int = 0
    ttft_without_kvpin_ms: float = 0.0
    ttft_with_kvpin_ms: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def broken_promises(self) -> list[str]:
        """In words; empty when all were kept."""
        kept = {
            "the output equals that of vLLM without kvpin": self.outputs_equal,
            "all full blocks of the marked prefix are protected": 0
            < self.marked_full_block_tokens
            == self.protected_tokens,
            "the fresh engine reads at least the protected tokens": self.hit_tokens_after_flood
            >= self.protected_tokens,
            "no protected block is lost": self.guaranteed_lost == 0,
            "the flood turned the pool over three times": self.pool_turnovers >= 3,
            "most of the flood is gone": self.unprotected_survivors * 4 <= self.flood_prompts,
            "evict by messages ends the protection": self.evict_ended_protection and self.evicted_blocks > 0,
            "what was evicted is read no more": self.hit_tokens_after_evict < BLOCK_TOKENS,
        }
        return [promise for promise, held in kept.items() if not held]


class Demo:
    """One run. `home`: a short path for sockets; `build`: for the model, logs and the result."""

    def __init__(self, plan: Plan, home: Path, build: Path) -> None:
        self.plan = plan
        self.home = home
        self.build = build
        self.model = build / "tiny-model"
        self.marked = conversation("handbook", plan.marked_words, ttl=plan.ttl)
        self.findings = Findings(
            versions={name: import_module(name).__version__ for name in ("kvpin", "vllm", "torch", "zmq")}
        )

    def run(self) -> Findings:
        """All of it, in order. Raises Failed if a process or a request does."""
        self._make_model()
        reference = self._without_kvpin()
        with start_master(self.home, self.plan.pool_size, self.build / "master.log"):
            with self._engine("vllm-first", kvpin=True) as chat:
                self._protect(chat)
                flood = self._flood(chat)
            with self._engine("vllm-fresh", kvpin=True) as chat:
                self._ask_again(chat, reference)
                self._count_survivors(chat, flood)
                self._evict(chat)
        return self.findings

    def _make_model(self) -> None:
        script = Path(__file__).with_name("make_model.py")
        subprocess.run([sys.executable, str(script), str(self.model)], check=True, capture_output=True)

    def _without_kvpin(self) -> str:
        """The same request to a vLLM that knows nothing of kvpin, its own cache empty: what it says, and when."""
        with self._engine("vllm-without", kvpin=False) as chat:
            answer = chat.ask(self.marked)
        self.findings.ttft_without_kvpin_ms = round(answer.first_token_ms, 1)
        return answer.text

    def _protect(self, chat: Chat) -> None:
        answer = chat.ask(self.marked)
        self.findings.headers = answer.headers
        self.findings.usage = answer.usage
        self.findings.marked_full_block_tokens = chat.full_block_tokens(self.marked)
        self.findings.protected_tokens = max((prefix["covered_tokens"] for prefix in chat.prefixes()), default=0)

    def _flood(self, chat: Chat) -> list[list[Message]]:
        """Unmarked prompts until the pool was filled often enough; its bytes are the master's own count."""
        flood: list[list[Message]] = []
        before = chat.master_stats()
        goal_bytes = self.plan.turnovers * before["pool_bytes"]
        with _progress() as progress:
            task = progress.add_task("flood of unmarked prompts", total=goal_bytes)
            while len(flood) < self.plan.flood_max:
                prompt = conversation(f"flood {len(flood)}", self.plan.flood_words)
                chat.ask(prompt, answer_tokens=1)
                flood.append(prompt)
                now = chat.master_stats()
                written_bytes = (
                    now["evicted_bytes"] - before["evicted_bytes"] + now["object_bytes"] - before["object_bytes"]
                )
                progress.update(task, completed=min(written_bytes, goal_bytes))
                if written_bytes >= goal_bytes:
                    break
        self.findings.flood_prompts = len(flood)
        self.findings.pool_turnovers = round(written_bytes / before["pool_bytes"], 2)
        return flood

    def _ask_again(self, chat: Chat, reference: str) -> None:
        answer = chat.ask(self.marked)
        findings = self.findings
        findings.outputs_equal = answer.text == reference
        findings.hit_tokens_after_flood = answer.cached_tokens
        findings.ttft_with_kvpin_ms = round(answer.first_token_ms, 1)
        findings.guaranteed_lost = max(0, findings.protected_tokens - answer.cached_tokens) // BLOCK_TOKENS

    def _count_survivors(self, chat: Chat, flood: list[list[Message]]) -> None:
        """Newest first: asking writes, and what it evicts are then those that were asked already or would go next."""
        with _progress() as progress:
            for prompt in progress.track(flood[::-1], description="who of the flood is left?"):
                answer = chat.ask(prompt, answer_tokens=1)
                self.findings.unprotected_survivors += answer.cached_tokens * 2 > answer.prompt_tokens

    def _evict(self, chat: Chat) -> None:
        counts = chat.evict(self.marked, mode="delete")
        self.findings.evicted_blocks = counts["memory_blocks"]
        self.findings.evict_ended_protection = not chat.prefixes() and chat.master_stats()["guaranteed_bytes"] == 0
        chat.reset_engine_cache()
        unmarked = json.loads(json.dumps(self.marked))
        del unmarked[0]["content"][0]["cache_control"]
        self.findings.hit_tokens_after_evict = chat.ask(unmarked).cached_tokens

    @contextmanager
    def _engine(self, name: str, *, kvpin: bool) -> Iterator[Chat]:
        """A fresh vLLM process, warmed up by one short prompt."""
        with Vllm(self.model, self.home, self.build / f"{name}.log", kvpin=kvpin) as server:
            with console.status(f"starting {name} (about half a minute)"):
                server.wait_ready()
            with closing(Chat(server.url)) as chat:
                chat.ask([{"role": "user", "content": "Hello?"}])
                yield chat


def show(findings: Findings) -> None:
    """The table."""
    table = Table(title="A marked prefix, a flood, a fresh engine")
    table.add_column("what")
    table.add_column("measured", justify="right")
    tokens = f"{findings.protected_tokens} of {findings.marked_full_block_tokens}"
    speed = findings.ttft_without_kvpin_ms / findings.ttft_with_kvpin_ms if findings.ttft_with_kvpin_ms else 0.0
    for what, measured in (
        ("tokens protected (full blocks of the marked prefix)", tokens),
        ("flood of unmarked prompts", f"{findings.flood_prompts}"),
        ("times that the flood filled the pool", f"{findings.pool_turnovers:.1f}"),
        ("unmarked prompts that survived", f"{findings.unprotected_survivors}"),
        ("protected blocks lost", f"{findings.guaranteed_lost}"),
        ("tokens that the fresh engine read from kvpin", f"{findings.hit_tokens_after_flood}"),
        ("output equals that of vLLM without kvpin", "yes" if findings.outputs_equal else "NO"),
        ("first token without kvpin", f"{findings.ttft_without_kvpin_ms:.0f} ms"),
        ("first token with kvpin", f"{findings.ttft_with_kvpin_ms:.0f} ms ({speed:.1f}x as fast)"),
        ("blocks ended by POST /v1/cache/evict", f"{findings.evicted_blocks}"),
        ("tokens read after that", f"{findings.hit_tokens_after_evict}"),
    ):
        table.add_row(what, measured)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where the model, logs and demo.json go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpin-") as home:
        try:
            findings = Demo(Plan(), Path(home), arguments.build.absolute()).run()
        except Failed as error:
            console.print(f"[red]the demo failed:[/red] {error}", markup=True, highlight=False)
            return 1
    show(findings)
    broken = findings.broken_promises()
    result = {**asdict(findings), "broken_promises": broken}
    path = arguments.build / "demo.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for promise in broken:
        console.print(f"[red]not kept:[/red] {promise}")
    console.print(f"{'all promises kept' if not broken else 'some promises were broken'}; details in {path}")
    return 1 if broken else 0


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )


if __name__ == "__main__":
    sys.exit(main())
