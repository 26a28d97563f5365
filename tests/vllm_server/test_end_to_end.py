"""The demo's flow as a test: protect, flood, restart the engine, ask again, evict."""

from pathlib import Path

import pytest

from examples.demo import Demo, Plan

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_marked_prefix_survives_a_flood_and_a_fresh_engine(run_dir: Path, tmp_path: Path) -> None:
    plan = Plan(pool_size="16MiB", marked_words=600, flood_words=400, turnovers=5)
    findings = Demo(plan, run_dir, tmp_path).run()
    assert findings.broken_promises() == []
    assert findings.headers["x-kvpin-status"] == "ok"
    assert findings.usage["prompt_tokens_details"]["cache_write_tokens"] == findings.protected_tokens
