"""Processes of their own that put objects: `python -m tests.client.writers ROLE ADDRESS ...`, a JSON line as output."""

import json
import os
import signal
import subprocess
import sys

from kvpin.client import Client
from kvpin.config import ClientConfig
from kvpin.protocol import PutItem, PutStart

SIZE_BYTES = 20_000


def spawn(*arguments: str) -> "subprocess.Popen[str]":
    """Run a role of this module."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def race(address: str, fill: str, keys: str) -> None:
    """Put the same keys as somebody else, with bytes of one's own, when told to go."""
    with Client(config=ClientConfig(address=address, embedded=False, call_timeout_ms=20_000)) as client:
        say("ready" if client.wait_ready(20_000) else "no master")
        sys.stdin.readline()
        outcomes = [client.put(str(index), fill.encode() * SIZE_BYTES).result for index in range(int(keys))]
    say(json.dumps(outcomes))


def die(address: str) -> None:
    """Be killed between put_start and put_end."""
    client = Client(config=ClientConfig(address=address, embedded=False, call_timeout_ms=20_000))
    client.call(PutStart([PutItem(b"half done", SIZE_BYTES)]))
    os.kill(os.getpid(), signal.SIGKILL)


def embedded() -> None:
    """Use this host's master, starting it if need be; keep it until told to go."""
    with Client(config=ClientConfig(pool_size="16MiB", retry_ms=20, call_timeout_ms=20_000)) as client:
        say("ready" if client.wait_ready(30_000) else "no master")
        say(json.dumps({"pid": client.stats()["server_pid"], **client.counters}))
        sys.stdin.readline()


if __name__ == "__main__":
    {"race": race, "die": die, "embedded": embedded}[sys.argv[1]](*sys.argv[2:])
