"""vLLM's API server in a process of its own, and an HTTP client for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

BLOCK_TOKENS = 32
API_KEY = "sk-test"
READY_S = 180.0  # generous: most of it is imports
CONNECTOR = {"kv_connector": "KVPinConnector", "kv_connector_module_path": "kvpin.vllm_connector", "kv_role": "kv_both"}
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "KVPIN_EMBEDDED": "false",  # the tests start, kill and restart the master
    "KVPIN_HTTP_REPORT_WAIT_MS": "5000",  # patience, on busy machines: deadlines are not what is tested here
    "KVPIN_LOOKUP_DEADLINE_MS": "5000",
    "KVPIN_PUT_DEADLINE_MS": "5000",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvpin",
}
FLAGS = (
    "--served-model-name=tiny --dtype=float32 --enforce-eager --max-model-len=2048 --max-num-seqs=8 --host=127.0.0.1 "
    f"--enable-prompt-tokens-details --block-size={BLOCK_TOKENS} --enable-auto-tool-choice --tool-call-parser=hermes"
).split()


class Server:
    """Ready when entered; ended, with its whole process group, when left."""

    def __init__(self, model: Path, run_dir: Path, options: Sequence[str], environment: dict[str, str]) -> None:
        self.port = _free_port()
        self.log_path = run_dir / f"vllm-{self.port}.log"
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={self.port}",
            f"--kv-transfer-config={json.dumps(CONNECTOR)}", f"--api-key={API_KEY}", *FLAGS, *options,
        ]  # fmt: skip
        self._environment = {**os.environ, **ENVIRONMENT, "KVPIN_RUN_DIR": str(run_dir), **environment}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60, headers={"authorization": f"Bearer {API_KEY}"}
        )

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + READY_S
        while not self._healthy():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-8000:]

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def chat(self, messages: list[dict[str, Any]], **extra: Any) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": messages, **extra}
        return self.post("/v1/chat/completions", body)

    def messages(self, **body: Any) -> httpx.Response:
        return self.post("/v1/messages", {"model": "tiny", "max_tokens": 6, "temperature": 0, **body})

    def prefixes(self) -> dict[str, dict[str, Any]]:
        """The live prefixes by id."""
        answer = self.http.get("/v1/cache/prefixes")
        assert answer.status_code == 200, answer.text
        return {prefix["id"]: prefix for prefix in answer.json()["prefixes"]}

    def evict(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/cache/evict", body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def _healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    lines = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
