"""Fixtures of the client's tests: a scripted master, and clients that are closed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpin.client import Client
from kvpin.config import ClientConfig
from tests.client.scripted import ANSWER_MS, ScriptedMaster


@pytest.fixture
def make_client(run_dir: Path) -> Iterator[Callable[..., Client]]:
    """Clients by settings; none of them starts a master of its own unless it is told to."""
    clients: list[Client] = []

    def make(name: str = "test", writer: bool = True, **settings: object) -> Client:
        config = ClientConfig(**{"embedded": False, **settings})  # type: ignore[arg-type]
        client = Client(config=config, name=name, writer=writer)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def scripted(run_dir: Path) -> Iterator[ScriptedMaster]:
    with ScriptedMaster(f"ipc://{run_dir}/scripted.sock") as master:
        yield master


@pytest.fixture
def welcomed(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> Client:
    """A client of the scripted master, in session."""
    client = make_client(address=scripted.address, retry_ms=20)
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)
    return client
