"""Measures kvpin between two processes, next to memcpy and, if it's there, Mooncake: `python benchmarks/bench.py`.

The systems take turns within each round, so that what else the machine does falls on all of them. Each case is warmed
up by a round that isn't counted.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import MIB, Case, all_cases
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from systems import KvpinSystem, MemcpySystem, MooncakeSystem, System

POOL_BYTES = 1 << 30


def main() -> None:
    arguments = parse(sys.argv[1:])
    cases = [case for case in all_cases() if any(word in case.name for word in arguments.only or [""])]
    if not cases:
        sys.exit(f"no case matches {arguments.only}; there are: {', '.join(case.name for case in all_cases())}")
    load_before = os.getloadavg()[0]
    systems: list[System] = []
    try:
        systems.append(KvpinSystem(POOL_BYTES))
        systems.append(MemcpySystem(POOL_BYTES))
        if arguments.mooncake:
            systems.append(MooncakeSystem(arguments.mooncake, POOL_BYTES))
        measured = measure(systems, cases, arguments.rounds)
    finally:
        for system in systems:
            system.close()
    report = {
        "machine": machine(),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "rounds": arguments.rounds,
        "pool_bytes": POOL_BYTES,
        "cases": [summary(case, measured[case]) for case in cases],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report["cases"])
    print(f"written to {arguments.output}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, of each case and system")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose name contains TEXT; may be repeated"
    )
    parser.add_argument("--mooncake", type=Path, metavar="PYTHON", help="python of benchmarks/make_mooncake_venv.sh")
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"))
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error("--rounds: give 1 or more")
    if arguments.mooncake and not os.access(arguments.mooncake, os.X_OK):
        parser.error(f"--mooncake {arguments.mooncake}: no such program; make it with benchmarks/make_mooncake_venv.sh")
    return arguments


def measure(systems: list[System], cases: list[Case], rounds: int) -> dict[Case, dict[str, list[float]]]:
    """For each case and system the seconds of all its calls."""
    measured: dict[Case, dict[str, list[float]]] = {case: {} for case in cases}
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    number = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases) * (rounds + 1))
        for case in cases:
            taking_part = [system for system in systems if system.supports(case)]
            for turn in range(rounds + 1):
                progress.update(task, description=case.name if turn else f"{case.name} (warm-up)")
                for system in rotated(taking_part, turn):
                    seconds = system.round(case, number)
                    if turn:
                        measured[case].setdefault(system.name, []).extend(seconds)
                number += case.keys
                progress.advance(task)
    return measured


def rotated(systems: list[System], turn: int) -> Iterable[System]:
    start = turn % len(systems)
    return systems[start:] + systems[:start]


def summary(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and tails in microseconds, rates at the median, and how much longer each takes than kvpin."""
    systems = {}
    for name, values in sorted(seconds.items()):
        ordered = sorted(values)
        p50_s = statistics.median(ordered)
        systems[name] = {
            "calls": len(ordered),
            "p50_us": round(p50_s * 1e6, 1),
            "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 1),
            "keys_per_s": round(case.batch / p50_s),
            **({"gb_per_s": round(case.batch * case.size_bytes / p50_s / 1e9, 2)} if case.moves_bytes else {}),
        }
    ours_us = systems["kvpin"]["p50_us"]
    ratios = {name: round(values["p50_us"] / ours_us, 2) for name, values in systems.items() if name != "kvpin"}
    return {"case": case.name, "systems": systems, "time_relative_to_kvpin": ratios}


def machine() -> dict[str, object]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_gib": round(memory_bytes / 1024 / MIB, 1),
        "python": platform.python_version(),
    }


def show(cases: list[dict[str, Any]]) -> None:
    names = sorted({name for case in cases for name in case["systems"]}, key=["kvpin", "memcpy", "mooncake"].index)
    shown = Table("case", title="p50 / p99 in us · rate at p50 · time relative to kvpin")
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        shown.add_row(case["case"], *(cell(case, name) for name in names))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(shown)


def cell(case: dict[str, Any], name: str) -> str:
    system = case["systems"].get(name)
    if system is None:
        return ""
    text = f"{system['p50_us']:.0f} / {system['p99_us']:.0f} · {rate(system)}"
    ratio = case["time_relative_to_kvpin"].get(name)
    return text if ratio is None else f"{text} · {ratio:.2f}x"


def rate(system: dict[str, Any]) -> str:
    return f"{system['gb_per_s']} GB/s" if "gb_per_s" in system else f"{system['keys_per_s'] / 1e3:.0f} k/s"


if __name__ == "__main__":
    main()
