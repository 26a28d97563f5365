"""Fixtures of all tests: a run directory, and real masters in it."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.master import MasterProcess

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and children inherit that: whoever starts the
# tests so would see masters that don't heed these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty run directory, in force for this process too. Not below pytest's own: a socket's path must be short."""
    for name in [name for name in os.environ if name.startswith("KVPIN_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="kvpin-") as folder:
        monkeypatch.setenv("KVPIN_RUN_DIR", folder)
        yield Path(folder)


@pytest.fixture
def make_master(run_dir: Path) -> Iterator[Callable[..., MasterProcess]]:
    """Starts masters with options. At the end their invariants must hold, and they must leave cleanly."""
    masters: list[MasterProcess] = []

    def make(**options: object) -> MasterProcess:
        master = MasterProcess(run_dir, **options)
        masters.append(master)
        master.start()
        return master

    yield make
    for master in masters:
        master.close()


@pytest.fixture
def master(make_master: Callable[..., MasterProcess]) -> MasterProcess:
    """A master with a small pool."""
    return make_master()
