"""The benchmark runs, checks the bytes that it moves, and says clearly what it can't do."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench.py"


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_a_short_run(tmp_path: Path) -> None:
    output = tmp_path / "build" / "bench.json"
    done = bench("--rounds", "1", "--only", "1 x 64 KiB", "--only", "lookup 1 keys", "--output", str(output))
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert [case["case"] for case in report["cases"]] == ["put 1 x 64 KiB", "get 1 x 64 KiB", "lookup 1 keys"]
    put, _, lookup = report["cases"]
    assert set(put["systems"]) == {"kvpin", "memcpy"}
    assert set(lookup["systems"]) == {"kvpin"}
    assert 0 < put["systems"]["kvpin"]["p50_us"] <= put["systems"]["kvpin"]["p99_us"]
    assert "put 1 x 64 KiB" in done.stdout


def test_bad_options_say_what_to_do(tmp_path: Path) -> None:
    for words, text in (
        (["--only", "nothing"], "no case matches"),
        (["--rounds", "0"], "give 1 or more"),
        (["--mooncake", str(tmp_path / "python")], "make_mooncake_venv.sh"),
    ):
        done = bench(*words)
        assert done.returncode != 0
        assert text in done.stderr
