"""The master dies, hangs, or was never there: calls fail within their deadline, then at once, and it's found again."""

import time
from collections.abc import Callable

import pytest

from kvpin.client import Client, PutResult
from kvpin.errors import CallTimeout, ConfigError, KvpinError, ProtocolError, Unavailable
from kvpin.protocol import Stats
from tests.support.master import MasterProcess, wait_until

FAST_S = 0.001


def seconds_each(call: Callable[[], object], error: type[KvpinError], times: int = 200) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        with pytest.raises(error):
            call()
    return (time.perf_counter() - started_s) / times


def test_a_killed_master_fails_calls_at_once_and_its_successor_is_found(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=master.address, retry_ms=50)
    client.put("key", b"data")
    epoch, segment = client.epoch, client.segment
    master.kill()
    wait_until(lambda: not client.ready, "the client knows", timeout_s=5)
    assert seconds_each(lambda: client.get("key"), Unavailable) < FAST_S
    assert (client.epoch, client.segment) == (0, None)

    master.start()
    assert client.wait_ready(10_000)
    assert client.epoch > epoch
    assert client.segment != segment
    assert client.get("key") is None
    assert client.put("key", b"new data").result is PutResult.STORED
    assert client.get("key") == b"new data"
    assert client.counters["sessions"] == 2


def test_a_call_under_way_fails_when_the_master_is_killed(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=master.address)
    assert client.wait_ready(10_000)
    master.stop()
    call = client.submit(Stats())
    master.kill()
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="broke"):
        call.wait(20_000)
    assert time.monotonic() - started_s < 5


def test_a_stopped_master_costs_one_deadline(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    client = make_client(address=master.address, call_timeout_ms=200, retry_ms=50)
    client.put("key", b"data")
    master.stop()
    started_s = time.monotonic()
    with pytest.raises(CallTimeout, match="within 200 ms"):
        client.get("key")
    assert time.monotonic() - started_s < 2
    assert seconds_each(lambda: client.get("key"), Unavailable) < FAST_S
    assert seconds_each(lambda: client.submit(Stats()).poll(), Unavailable) < FAST_S

    master.cont()
    assert client.wait_ready(10_000)
    assert client.get("key") == b"data"
    wait_until(lambda: client.stats()["leases"] == 0, "the late answer's lease is released")
    assert client.counters["breaker_opens"] == 1


def test_a_put_under_way_when_the_master_hangs_is_taken_back(
    master: MasterProcess, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=master.address, call_timeout_ms=100, retry_ms=50)
    assert client.wait_ready(10_000)
    master.stop()
    with pytest.raises(CallTimeout):
        client.put("key", b"data", guaranteed_ttl_ms=60_000)
    master.cont()
    assert client.wait_ready(10_000)
    wait_until(lambda: client.stats()["puts_revoked"] == 1, "the late put_start is revoked")
    assert client.put("key", b"data").result is PutResult.STORED


def test_threads_do_not_pile_up_behind_a_hung_master(master: MasterProcess, make_client: Callable[..., Client]) -> None:
    client = make_client(address=master.address)
    assert client.wait_ready(10_000)
    master.stop()
    with pytest.raises(CallTimeout):
        client.submit(Stats()).wait(10)
    for _ in range(20_000):
        client.submit(Stats())
    connection = client._live().connection
    assert len(connection.work) + connection.in_flight <= 1
    master.cont()
    assert client.wait_ready(10_000)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nowhere",
        "http://x",
        "ipc://",
        "udp://127.0.0.1:1",
        "ipc:///" + "x" * 120,
        "tcp://127.0.0.1",
        "ipc://relative",
    ],
)
def test_an_address_that_is_none_says_so(make_client: Callable[..., Client], address: str) -> None:
    with pytest.raises(ConfigError, match=r"^address = .* give "):
        make_client(address=address)


def test_an_address_that_only_zeromq_finds_wrong_says_so(make_client: Callable[..., Client]) -> None:
    client = make_client(address="tcp://no such host:1", connect_timeout_ms=10_000)
    with pytest.raises(ConfigError, match=r"address = .* ZeroMQ can't connect"):
        client.stats()


def test_another_master_version_is_a_clear_error(
    master: MasterProcess, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpin.base_client.PROTOCOL_VERSION", 99)
    client = make_client(address=master.address, connect_timeout_ms=10_000)
    with pytest.raises(ProtocolError, match="refused this client: you speak protocol 99"):
        client.stats()


def test_a_name_that_is_too_long(make_client: Callable[..., Client]) -> None:
    with pytest.raises(ConfigError, match="shorten it"):
        make_client(name="n" * 101, address="ipc:///tmp/none.sock")
