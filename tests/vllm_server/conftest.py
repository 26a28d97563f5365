"""Tests against the real `vllm serve` on CPU, with a real master. Elsewhere there is nothing to collect."""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.master import MasterProcess
from tests.vllm_server.server import Server

HERE = Path(__file__).parent
MAKE_MODEL = HERE.parents[1] / "examples" / "make_model.py"

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(MAKE_MODEL), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def server_run_dir() -> Iterator[Path]:
    """Not below pytest's own folder: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def master(server_run_dir: Path) -> Iterator[MasterProcess]:
    process = MasterProcess(server_run_dir)
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def make_server(model: Path, server_run_dir: Path, master: MasterProcess) -> Iterator[Callable[..., Server]]:
    """Starts servers with options and environment variables; they end with the module."""
    if not [each for each in entry_points(group="vllm.endpoint_plugins") if each.name == "kvpin"]:
        pytest.fail("kvpin's entry points are not installed here: run these tests by `make test-vllm`")
    with ExitStack() as stack:

        def make(*options: str, **environment: str) -> Server:
            return stack.enter_context(Server(model, server_run_dir, options, environment))

        yield make
