"""The client's side of the conversation, message by message, against a master that the test plays."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpin.client import Client, PendingCall
from kvpin.errors import CallTimeout, EpochChanged, ProtocolError, Unavailable
from kvpin.protocol import (
    PROTOCOL_VERSION,
    Bye,
    Done,
    Ended,
    EndStatus,
    ErrorCode,
    Exists,
    Failure,
    Found,
    GetReplicas,
    Grant,
    Hello,
    Ping,
    PutEnd,
    PutItem,
    PutRevoke,
    PutStart,
    PutStarted,
    PutStatus,
    Replicas,
    Stats,
    StatsReply,
)
from tests.client.scripted import ANSWER_MS, ScriptedMaster
from tests.support.master import wait_until

PUT = PutStart([PutItem(b"a", 10), PutItem(b"b", 10)])
STARTED = PutStarted([PutStatus.WRITE, PutStatus.EXISTS], [0, -1], [Grant.NONE, Grant.NONE])
GET = GetReplicas([b"a"], 1000)


def hit(lease_id: int) -> Replicas:
    return Replicas([0], [10], lease_id, 1000, [])


def settled(call: PendingCall) -> None:
    wait_until(lambda: call.settled, "the call is settled")


def test_answers_may_come_in_any_order(scripted: ScriptedMaster, welcomed: Client) -> None:
    calls = [welcomed.submit(Exists([b"%d" % index])) for index in range(20)]
    requests = [scripted.expect(Exists) for _ in calls]
    for request, body in reversed(requests):
        scripted.answer(request, Found([int(body.keys[0]) % 2 == 0]))
    assert [call.wait(ANSWER_MS) for call in calls] == [Found([index % 2 == 0]) for index in range(20)]


def test_hello_says_who_writes(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    make_client(address=scripted.address, name="me", writer=False)
    request, hello = scripted.expect(Hello)
    assert (hello.protocol, hello.name, hello.writer_pid, request.epoch) == (PROTOCOL_VERSION, "me", 0, 0)


def test_a_poll_never_waits(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(Stats())
    assert call.poll() is None
    scripted.answer(scripted.expect(Stats)[0], StatsReply({"x": 1}))
    settled(call)
    assert call.poll() == StatsReply({"x": 1})
    assert call.wait(0) == StatsReply({"x": 1})


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.BAD_REQUEST, ProtocolError),
        (ErrorCode.OVERLOADED, Unavailable),
        (ErrorCode.INTERNAL, Unavailable),
    ],
)
def test_failures_are_exceptions(
    scripted: ScriptedMaster, welcomed: Client, code: ErrorCode, error: type[Exception]
) -> None:
    call = welcomed.submit(Stats())
    scripted.answer(scripted.expect(Stats)[0], Failure(code, "because"))
    with pytest.raises(error, match="because"):
        call.wait(ANSWER_MS)
    assert welcomed.ready
    assert welcomed.counters["failures"] == 1


# --- the breaker -----------------------------------------------------------------------------------------------------


def test_a_call_that_misses_its_deadline_opens_the_breaker(scripted: ScriptedMaster, welcomed: Client) -> None:
    scripted.deaf = True
    call = welcomed.submit(Stats())
    with pytest.raises(CallTimeout, match="Stats within 5 ms"):
        call.wait(5)
    assert not welcomed.ready
    scripted.expect(Stats)

    # While it's open nothing is sent but probes, and nothing is queued.
    for _ in range(100):
        with pytest.raises(Unavailable, match="doesn't answer"):
            welcomed.submit(Exists([b"a"])).poll()
    assert scripted.receive(timeout_ms=100) is None
    assert scripted.pings

    scripted.answer(scripted.pings[-1], Done())
    assert welcomed.wait_ready(ANSWER_MS)
    counters = welcomed.counters
    assert (counters["timeouts"], counters["breaker_opens"], counters["failures"]) == (1, 1, 100)
    after = welcomed.submit(Exists([b"a"]))
    scripted.answer(scripted.expect(Exists)[0], Found([True]))
    assert after.wait(ANSWER_MS) == Found([True])


def test_a_late_answer_closes_the_breaker_too(scripted: ScriptedMaster, welcomed: Client) -> None:
    scripted.deaf = True
    call = welcomed.submit(Stats())
    request, _ = scripted.expect(Stats)
    with pytest.raises(CallTimeout):
        call.wait(0)
    assert not welcomed.ready
    scripted.answer(request, StatsReply({}))
    assert welcomed.wait_ready(ANSWER_MS)
    with pytest.raises(CallTimeout, match="abandoned"):
        call.poll()


def test_silence_alone_opens_the_breaker(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    """An idle engine finds a hung master out before its next request does."""
    client = make_client(address=scripted.address, call_timeout_ms=30, retry_ms=20)
    scripted.welcome(heartbeat_ms=10)
    assert client.wait_ready(ANSWER_MS)
    scripted.deaf = True
    wait_until(lambda: not client.ready, "the breaker is open")
    assert "calls" not in client.counters
    scripted.deaf = False
    scripted.serve_until(lambda: client.ready)


def test_a_probe_is_sent_each_retry_period_only(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    client = make_client(address=scripted.address, retry_ms=50)
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)
    scripted.deaf = True
    started_s = time.monotonic()
    call = client.submit(Stats())
    scripted.expect(Stats)
    with pytest.raises(CallTimeout):
        call.wait(0)
    scripted.serve_until(lambda: time.monotonic() - started_s > 0.3)
    assert 1 <= len(scripted.pings) <= (time.monotonic() - started_s) * 1000 / 50 + 1


def test_calls_under_way_are_bounded(
    scripted: ScriptedMaster, welcomed: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpin.connection.CALLS_PENDING_MAX", 8)
    calls = [welcomed.submit(Stats()) for _ in range(8)]
    requests = [scripted.expect(Stats)[0] for _ in calls]
    wait_until(lambda: welcomed._live().connection.in_flight == 8, "all are accounted for")
    with pytest.raises(Unavailable, match="8 calls are under way"):
        welcomed.submit(Stats()).poll()
    scripted.answer(requests[0], StatsReply({}))
    calls[0].wait(ANSWER_MS)
    assert welcomed.submit(Stats()).poll() is None


def test_what_is_never_answered_is_forgotten(
    scripted: ScriptedMaster, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpin.call_table.ANSWER_MS_MAX", 20)
    client = make_client(address=scripted.address, retry_ms=20)
    scripted.welcome(heartbeat_ms=5)
    assert client.wait_ready(ANSWER_MS)
    call = client.submit(Stats())
    scripted.expect(Stats)
    scripted.serve_until(lambda: call.settled)
    with pytest.raises(Unavailable, match="no answer within"):
        call.poll()


def test_a_message_over_the_limit_is_not_sent(
    scripted: ScriptedMaster, welcomed: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpin.connection.FRAME_BYTES_MAX", 1000)
    with pytest.raises(ProtocolError, match="send smaller batches"):
        welcomed.submit(Exists([b"k" * 100] * 10)).poll()


# --- answers that nobody waits for -----------------------------------------------------------------------------------


def test_a_late_put_start_is_revoked(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(PUT)
    request, _ = scripted.expect(PutStart)
    call.abandon()
    scripted.answer(request, STARTED)
    _, revoke = scripted.expect(PutRevoke)
    assert revoke.keys == [b"a"]  # the one whose range was granted
    assert welcomed.counters["late_puts_revoked"] == 1


def test_an_answer_that_was_there_already_is_undone_too(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(PUT)
    scripted.answer(scripted.expect(PutStart)[0], STARTED)
    settled(call)
    call.abandon()
    assert scripted.expect(PutRevoke)[1].keys == [b"a"]


def test_an_answer_that_was_taken_is_the_callers_business(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(PUT)
    scripted.answer(scripted.expect(PutStart)[0], STARTED)
    assert call.wait(ANSWER_MS) == STARTED
    call.abandon()
    welcomed.submit(Stats())
    scripted.expect(Stats)  # and no PutRevoke before it


def test_a_put_that_the_master_has_given_up_is_not_revoked(
    scripted: ScriptedMaster, make_client: Callable[..., Client]
) -> None:
    """The key may be in a new put by then."""
    client = make_client(address=scripted.address)
    scripted.welcome(put_timeout_ms=0)
    assert client.wait_ready(ANSWER_MS)
    call = client.submit(PUT)
    request, _ = scripted.expect(PutStart)
    call.abandon()
    scripted.answer(request, STARTED)
    client.submit(Stats())
    scripted.expect(Stats)


def test_a_late_lease_is_released(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(GET)
    request, _ = scripted.expect(GetReplicas)
    call.abandon()
    scripted.answer(request, hit(lease_id=5))
    # The next message that is sent carries it.
    second = welcomed.submit(Exists([b"a"]))
    request, _ = scripted.expect(Exists)
    scripted.answer(request, Found([True]))
    second.wait(ANSWER_MS)
    welcomed.submit(Stats())
    assert request.released_leases + scripted.expect(Stats)[0].released_leases == [5]


def test_a_call_abandoned_before_it_was_sent_is_not_sent(
    scripted: ScriptedMaster, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=scripted.address)
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)
    busy, go_on = threading.Event(), threading.Event()

    def keep_io_thread(_: PendingCall) -> None:
        busy.set()
        go_on.wait(ANSWER_MS / 1000)

    first = client.submit(Stats())
    first.add_done_callback(keep_io_thread)
    scripted.answer(scripted.expect(Stats)[0], StatsReply({}))
    assert busy.wait(ANSWER_MS / 1000)
    client.submit(PUT).abandon()
    client.submit(Exists([b"a"]))
    go_on.set()
    scripted.expect(Exists)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_released_leases_ride_on_the_next_request(scripted: ScriptedMaster, welcomed: Client) -> None:
    for lease_id in (3, 4, 0):
        welcomed.release(lease_id)
    welcomed.submit(Stats())
    assert scripted.expect(Stats)[0].released_leases == [3, 4]
    welcomed.submit(Stats())
    assert scripted.expect(Stats)[0].released_leases == []


def test_or_on_the_next_heartbeat(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    client = make_client(address=scripted.address)
    scripted.welcome(heartbeat_ms=10)
    assert client.wait_ready(ANSWER_MS)
    scripted.serve_until(lambda: bool(scripted.pings))
    client.release(9)
    seen = len(scripted.pings)
    scripted.serve_until(lambda: len(scripted.pings) > seen + 1)
    assert 9 in [lease_id for ping in scripted.pings for lease_id in ping.released_leases]


def test_a_lease_of_an_older_epoch_is_never_released_in_a_new_one(scripted: ScriptedMaster, welcomed: Client) -> None:
    """A new master counts its leases from 1 again, so the numbers come again."""
    old = welcomed.submit(GET)
    scripted.answer(scripted.expect(GetReplicas)[0], hit(lease_id=1))
    old_lease = old.wait(ANSWER_MS).lease_id  # type: ignore[union-attr]

    other = welcomed.submit(Stats())
    scripted.epoch = 8
    scripted.answer(scripted.expect(Stats)[0], Failure(ErrorCode.EPOCH_CHANGED, "say Hello"))
    with pytest.raises(EpochChanged):
        other.wait(ANSWER_MS)
    scripted.welcome()
    assert welcomed.wait_ready(ANSWER_MS)
    new = welcomed.submit(GET)
    scripted.answer(scripted.expect(GetReplicas)[0], hit(lease_id=1))
    new_lease = new.wait(ANSWER_MS).lease_id  # type: ignore[union-attr]

    welcomed.release(old_lease)
    welcomed.submit(Stats())
    assert scripted.expect(Stats)[0].released_leases == []
    welcomed.release(new_lease)
    welcomed.submit(Stats())
    assert scripted.expect(Stats)[0].released_leases == [1]


# --- epochs and versions ---------------------------------------------------------------------------------------------


def test_a_changed_epoch_fails_all_calls_of_the_old_one(scripted: ScriptedMaster, welcomed: Client) -> None:
    assert welcomed.epoch == 7
    calls = [welcomed.submit(Exists([b"a"])) for _ in range(3)]
    requests = [scripted.expect(Exists)[0] for _ in calls]
    scripted.epoch = 8
    scripted.answer(requests[1], Failure(ErrorCode.EPOCH_CHANGED, "say Hello"))
    for call in calls:
        with pytest.raises(EpochChanged):
            call.wait(ANSWER_MS)
    scripted.welcome()
    assert welcomed.wait_ready(ANSWER_MS)
    assert welcomed.epoch == 8
    assert welcomed.segment is not None
    assert welcomed.segment.epoch == 8
    assert (welcomed.counters["sessions"], welcomed.counters["sessions_lost"]) == (2, 1)


def test_a_heartbeat_finds_a_changed_epoch_out(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    client = make_client(address=scripted.address)
    scripted.welcome(heartbeat_ms=10)
    assert client.wait_ready(ANSWER_MS)
    scripted.deaf = True
    scripted.serve_until(lambda: bool(scripted.pings))
    scripted.epoch = 8
    scripted.answer(scripted.pings[-1], Failure(ErrorCode.EPOCH_CHANGED, "say Hello"))
    scripted.welcome()
    wait_until(lambda: client.epoch == 8, "the client is in the new epoch")


def test_put_end_is_not_sent_into_another_session(scripted: ScriptedMaster, welcomed: Client) -> None:
    """A later put of the same keys could be hit."""
    io = welcomed._live()
    session = io.connection.session
    other = welcomed.submit(Stats())
    scripted.answer(scripted.expect(Stats)[0], Failure(ErrorCode.EPOCH_CHANGED, "say Hello"))
    with pytest.raises(EpochChanged):
        other.wait(ANSWER_MS)
    scripted.welcome()
    assert welcomed.wait_ready(ANSWER_MS)
    with pytest.raises(EpochChanged, match="since the ranges were granted"):
        io.connection.submit(PutEnd([b"a"]), session).poll()


def test_what_is_late_in_the_io_thread_is_not_sent(scripted: ScriptedMaster, welcomed: Client) -> None:
    """A put_end that was handed over in time could hit a newer put of another thread by the time it's sent."""
    connection = welcomed._live().connection
    busy, go_on = threading.Event(), threading.Event()

    def keep_io_thread(_: PendingCall) -> None:
        busy.set()
        go_on.wait(ANSWER_MS / 1000)

    first = welcomed.submit(Stats())
    first.add_done_callback(keep_io_thread)
    scripted.answer(scripted.expect(Stats)[0], StatsReply({}))
    assert busy.wait(ANSWER_MS / 1000)
    send_by_s = time.monotonic() + 0.02
    late = connection.submit(PutEnd([b"a"]), connection.session, send_by_s)
    in_time = connection.submit(Exists([b"a"]), connection.session, send_by_s + ANSWER_MS / 1000)
    wait_until(lambda: time.monotonic() > send_by_s, "it is late")
    go_on.set()
    with pytest.raises(Unavailable, match="not be sent in time"):
        late.wait(ANSWER_MS)
    scripted.answer(scripted.expect(Exists)[0], Found([True]))
    assert in_time.wait(ANSWER_MS) == Found([True])


@pytest.mark.parametrize("code", [ErrorCode.VERSION, ErrorCode.BAD_REQUEST])
def test_a_refused_hello_is_final(
    scripted: ScriptedMaster, make_client: Callable[..., Client], code: ErrorCode
) -> None:
    client = make_client(address=scripted.address, retry_ms=10, connect_timeout_ms=ANSWER_MS)
    request, _ = scripted.expect(Hello)
    scripted.answer(request, Failure(code, "you speak protocol 0"))
    with pytest.raises(ProtocolError, match="refused this client: you speak protocol 0"):
        client.stats()
    started_s = time.monotonic()
    assert not client.wait_ready(ANSWER_MS)
    assert time.monotonic() - started_s < ANSWER_MS / 1000 / 2
    with pytest.raises(ProtocolError):
        client.submit(Stats()).poll()
    assert scripted.receive(timeout_ms=50) is None  # it isn't tried again


def test_a_master_of_another_protocol_is_refused(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    client = make_client(address=scripted.address, connect_timeout_ms=ANSWER_MS)
    scripted.welcome(protocol=PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolError, match="install the same version"):
        client.stats()


def test_an_overloaded_master_is_asked_again(scripted: ScriptedMaster, make_client: Callable[..., Client]) -> None:
    client = make_client(address=scripted.address, retry_ms=10)
    request, _ = scripted.expect(Hello)
    scripted.answer(request, Failure(ErrorCode.OVERLOADED, "there are too many clients"))
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)


def test_the_answer_to_a_repeated_hello_changes_nothing(
    scripted: ScriptedMaster, make_client: Callable[..., Client]
) -> None:
    client = make_client(address=scripted.address, retry_ms=10)
    scripted.expect(Hello)
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)
    call = client.submit(Stats())
    request = scripted.receive()
    while request is not None and isinstance(request.body, Hello):  # repeated before it was answered
        request = scripted.receive()
    assert request is not None
    scripted.answer(request, scripted.welcome_body())
    scripted.answer(request, StatsReply({}))
    assert call.wait(ANSWER_MS) == StatsReply({})
    assert client.counters["sessions"] == 1


# --- garbage ---------------------------------------------------------------------------------------------------------


def test_garbage_is_counted_and_dropped(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(Stats())
    request, _ = scripted.expect(Stats)
    garbage = [b"", b"\xff" * 50, b"\x93\x01\x07\x91\xa3foo", b"\x93\xa1x\x07\x91\xa4done", bytes(100_000)]
    for frame in garbage:
        scripted.send(frame)
    scripted.answer(request, StatsReply({"wrong": 1}), epoch=99)
    request_of_nobody = type(request)(request.request_id + 1000, request.epoch, Ping())
    scripted.answer(request_of_nobody, StatsReply({"nobody's": 1}))
    scripted.answer(request, StatsReply({"right": 1}))
    assert call.wait(ANSWER_MS) == StatsReply({"right": 1})
    assert welcomed.counters["bad_replies"] == len(garbage)
    assert welcomed.counters["stray_replies"] == 1


def test_an_answer_of_the_wrong_kind_is_a_protocol_error(scripted: ScriptedMaster, welcomed: Client) -> None:
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            welcomed.exists([b"a"])
        except ProtocolError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    scripted.answer(scripted.expect(Exists)[0], Ended([EndStatus.OK]))
    thread.join()
    assert "answered Ended where Found was due" in str(failures[0])


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_run_once_in_the_io_thread(
    scripted: ScriptedMaster, welcomed: Client, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[PendingCall, str]] = []
    done = threading.Event()

    def faulty(_: PendingCall) -> None:
        raise RuntimeError("a fault of the application")

    def note(call: PendingCall) -> None:
        seen.append((call, threading.current_thread().name))
        done.set()

    call = welcomed.submit(Stats())
    call.add_done_callback(faulty)
    call.add_done_callback(note)
    scripted.answer(scripted.expect(Stats)[0], StatsReply({}))
    assert done.wait(ANSWER_MS / 1000)
    assert seen == [(call, "kvpin-io")]
    assert "callback_failed" in caplog.text
    call.add_done_callback(note)  # too late: at once, here
    assert seen[1:] == [(call, threading.current_thread().name)]


# --- beginning and end -----------------------------------------------------------------------------------------------


def test_the_first_call_waits_for_the_connection_and_later_ones_do_not(make_client: Callable[..., Client]) -> None:
    started_s = time.monotonic()
    client = make_client(address="ipc:///nowhere/at.all", connect_timeout_ms=100)
    with pytest.raises(Unavailable, match=r"no connection to a master at ipc:///nowhere/at\.all"):
        client.stats()
    assert time.monotonic() - started_s >= 0.09
    started_s = time.monotonic()
    for _ in range(200):
        with pytest.raises(Unavailable):
            client.stats()
    assert (time.monotonic() - started_s) / 200 < 0.001
    assert not client.wait_ready(0)
    assert (client.epoch, client.segment, client.put_timeout_ms) == (0, None, 0)


def test_closing_says_bye(scripted: ScriptedMaster, welcomed: Client) -> None:
    pending = welcomed.submit(Stats())
    closing = threading.Thread(target=welcomed.close)
    closing.start()
    scripted.expect(Stats)
    scripted.answer(scripted.expect(Bye)[0], Done())
    closing.join()
    with pytest.raises(Unavailable, match="the client is closed"):
        pending.wait(ANSWER_MS)
    with pytest.raises(Unavailable, match="the client is closed"):
        welcomed.stats()
    with pytest.raises(Unavailable, match="the client is closed"):
        welcomed.submit(Stats()).poll()
    welcomed.close()  # again


def test_closing_does_not_wait_for_a_hung_master(scripted: ScriptedMaster, welcomed: Client) -> None:
    started_s = time.monotonic()
    welcomed.close()
    assert time.monotonic() - started_s < 2


def test_a_client_that_is_dropped_leaves_too(scripted: ScriptedMaster, run_dir: Path) -> None:
    client = Client(scripted.address)
    scripted.welcome()
    assert client.wait_ready(ANSWER_MS)
    del client
    scripted.expect(Bye)


def test_a_broken_connection_fails_calls_at_once(scripted: ScriptedMaster, welcomed: Client) -> None:
    call = welcomed.submit(Stats())
    scripted.expect(Stats)
    scripted.close()
    with pytest.raises(Unavailable, match="broke"):
        call.wait(ANSWER_MS)
    assert not welcomed.ready
    with ScriptedMaster(scripted.address, epoch=9) as again:
        again.welcome()
        assert welcomed.wait_ready(ANSWER_MS)
        assert welcomed.epoch == 9
