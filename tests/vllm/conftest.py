"""Tests against the real vLLM, on CPU. Elsewhere than in vLLM's environment there is nothing to collect.

vLLM and torch warn about their own future; in this folder only warnings that kvpin causes are errors.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.master import MasterProcess

HERE = Path(__file__).parent

# Read when vllm or torch are imported, and inherited by engine processes.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.kv_offload.cpu.spec  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("error:::kvpin.*"), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model with fixed random weights in a folder of its own."""

    def make(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        script = HERE.parents[1] / "examples" / "make_model.py"
        subprocess.run([sys.executable, str(script), str(folder), *options], check=True, capture_output=True)
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="session", autouse=True)
def kvpin_run_dir() -> Iterator[Path]:
    """Sockets and keys of these tests. Not below pytest's own folder: a socket's path must be short.

    No engine starts a master of its own: it would take the place of one that a test has killed.
    """
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPIN_RUN_DIR", folder)
        patch.setenv("KVPIN_EMBEDDED", "false")
        yield Path(folder)


@pytest.fixture(scope="module")
def master(kvpin_run_dir: Path) -> Iterator[MasterProcess]:
    process = MasterProcess(kvpin_run_dir, guaranteed_limit="2MiB")
    process.start()
    yield process
    process.close()
