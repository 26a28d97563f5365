"""Starts and ends what is measured: for each system its server, a writing process and a reading process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import Case

HERE = Path(__file__).parent
READY_S = 60.0
ANSWER_S = 300.0
MOONCAKE_PORT = 50151
MOONCAKE_METRICS_PORT = 9103


class System:
    """`writer` and `reader` take commands; see worker.py."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvpin-bench-")
        self.folder = Path(self._folder.name)
        self._log = (self.folder / "output.log").open("w")
        self.writer: subprocess.Popen[str] | None = None
        self.reader: subprocess.Popen[str] | None = None

    def supports(self, case: Case) -> bool:
        return True

    def round(self, case: Case, first: int) -> list[float]:
        """One round of a case on objects numbered from `first`: the seconds of each call."""
        if case.operation == "put":
            seconds = self.ask(self.writer, "put", case, first, case.calls)
        else:
            self.ask(self.writer, "put", case, first, 1)
            seconds = self.ask(self.reader, case.operation, case, first, case.calls)
        if case.moves_bytes:
            self.ask(self.reader, "verify", case, first, 1)
        for start in range(first, first + case.keys, case.batch):
            self.ask(self.writer, "remove", case, start, 1)
        return seconds

    def ask(
        self, process: "subprocess.Popen[str] | None", operation: str, case: Case, first: int, calls: int
    ) -> list[float]:
        assert process is not None
        assert process.stdin is not None
        command = {"operation": operation, "size_bytes": case.size_bytes, "first": first, "batch": case.batch}
        process.stdin.write(json.dumps({**command, "calls": calls}) + "\n")
        process.stdin.flush()
        answer = self._answer(process)
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {case.name}: {operation}: {answer['error']}\n{self.output()}")
        return list(answer["seconds"])

    def output(self) -> str:
        return (self.folder / "output.log").read_text()[-3000:]

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._log.close()
        self._folder.cleanup()

    def start(self, command: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._processes.append(process)
        return process

    def start_worker(self, python: list[str], options: dict[str, Any]) -> "subprocess.Popen[str]":
        process = self.start([*python, str(HERE / "worker.py"), self.name, json.dumps(options)])
        if not self._answer(process).get("ready"):
            raise RuntimeError(f"{self.name} can't be started:\n{self.output()}")
        return process

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of {self.name} ended:\n{self.output()}")
        return dict(json.loads(line))


class KvpinSystem(System):
    def __init__(self, pool_bytes: int) -> None:
        super().__init__("kvpin")
        address = f"ipc://{self.folder}/bench.sock"
        command = [sys.executable, "-m", "kvpin.master", "--pool", "bench", "--listen", address]
        root = str(HERE.parent)
        environment = {"KVPIN_RUN_DIR": str(self.folder), "PYTHONPATH": root}
        self.start([*command, "--pool-size", str(pool_bytes)], environment)
        os.environ["PYTHONPATH"] = root
        self.writer = self.start_worker([sys.executable], {"address": address})
        self.reader = self.start_worker([sys.executable], {"address": address})


class MemcpySystem(System):
    def __init__(self, pool_bytes: int) -> None:
        super().__init__("memcpy")
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kvpin-bench-", delete=False) as file:
            os.posix_fallocate(file.fileno(), 0, pool_bytes)
        try:
            self.writer = self.start_worker([sys.executable], {"path": file.name})
            self.reader = self.start_worker([sys.executable], {"path": file.name})
        finally:
            os.unlink(file.name)

    def supports(self, case: Case) -> bool:
        return case.moves_bytes


class MooncakeSystem(System):
    """All of it in a network namespace with nothing but lo: its clients listen on every interface."""

    def __init__(self, python: Path, pool_bytes: int) -> None:
        super().__init__("mooncake")
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        inside = f"ip link set lo up && exec {python.parent}/mooncake_master " + " ".join(
            [
                "--rpc_address=127.0.0.1",
                f"--rpc_port={MOONCAKE_PORT}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={MOONCAKE_METRICS_PORT}",
                "--default_kv_lease_ttl=10000",
                "--eviction_high_watermark_ratio=0.95",
            ]
        )
        master = self.start(["unshare", *user, "--net", "sh", "-c", inside + f" >{self.folder}/master.log 2>&1"])
        enter = ["nsenter", "--target", str(master.pid), "--net"]
        if user:
            enter += ["--user", "--preserve-credentials"]
        self._wait_for_port(enter)
        options = {"address": f"127.0.0.1:{MOONCAKE_PORT}", "segment_bytes": 0}
        command = [*enter, str(python)]
        self._owner = self.start_worker(command, {**options, "segment_bytes": pool_bytes})
        self.writer = self.start_worker(command, options)
        self.reader = self.start_worker(command, options)

    def _wait_for_port(self, enter: list[str]) -> None:
        probe = f"import socket; socket.create_connection(('127.0.0.1', {MOONCAKE_PORT}), 1).close()"
        deadline_s = time.monotonic() + READY_S
        while subprocess.run([*enter, sys.executable, "-c", probe], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"mooncake_master doesn't listen:\n{(self.folder / 'master.log').read_text()}")
            time.sleep(0.2)
