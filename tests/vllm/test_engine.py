"""One real engine, one real master: outputs, windows, and what happens when things go wrong.

Cases share the engine and use tokens of their own; every window is ended after each case.
"""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import BLOCK_TOKENS, Engine, Prompt, engine, outputs, tokens

from kvpin import Client
from kvpin.keys import kv_key
from kvpin.protocol import EndStatus, ExpireMode, Grant, MarkReport, PrefixInfo, Report, Reported
from kvpin.vllm_connector import metrics
from tests.support.master import MasterProcess

MARKED_TOKENS = 4 * BLOCK_TOKENS


def many_prompts() -> list[Prompt]:
    """36 prompts: nested marked prefixes, unmarked ones that share them, and strangers of all lengths."""
    system, document = tokens("system", 96), tokens("document", 128)
    prompts = []
    for index in range(9):
        question = tokens(f"question {index}", 11 + 17 * index)
        prompts += [
            Prompt(system + question, marks=(96,)),
            Prompt(system + document + question, marks=(96, 224)),
            Prompt(system + document + question[::-1]),
            Prompt(tokens(f"stranger {index}", 20 + 45 * index)),
        ]
    return prompts


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with engine(model, kvpin=False) as plain:
        return outputs(plain.ask(*many_prompts()))


@pytest.fixture(scope="module")
def e(model: Path, master: MasterProcess, expected: object) -> Iterator[Engine]:
    with engine(model) as running:
        assert running.manager.client.wait_ready(5000)
        yield running


@pytest.fixture
def client(master: MasterProcess) -> Iterator[Client]:
    client = Client(name="test")
    assert client.wait_ready(5000)
    yield client
    for prefix in client.prefixes():
        client.expire(prefix.prefix_id, ExpireMode.DELETE)
    client.close()


def keys_of(e: Engine, prompt: Prompt) -> list[bytes]:
    """The objects of the prompt's full blocks."""
    core = e.llm.llm_engine.engine_core.engine_core
    from vllm.v1.request import Request

    request = Request("probe", prompt.ids, prompt.sampling(), None, block_hasher=core.request_block_hasher)
    return [kv_key(e.connector._namespace, block_hash, 0) for block_hash in request.block_hashes]


def window(client: Client, prompt: Prompt, end_token: int) -> PrefixInfo | None:
    found = [prefix for prefix in client.prefixes() if prefix.prefix_id == prompt.marked_id(end_token)]
    return found[0] if found else None


def report(client: Client, token: bytes) -> list[MarkReport]:
    reply = client.call(Report(token))
    assert isinstance(reply, Reported)
    return reply.marks


def test_outputs_are_equal_without_kvpin_when_stored_when_loaded_and_when_in_l1(
    e: Engine, client: Client, expected: list[list[int]]
) -> None:
    prompts = many_prompts()
    assert outputs(e.ask(*prompts)) == expected
    e.forget_l1()
    loaded = e.ask(*prompts)
    assert outputs(loaded) == expected
    assert outputs(e.ask(*prompts)) == expected
    # Every full block came back, but the one of the last token, which has to be computed.
    assert [answer.cached_tokens for answer in loaded] == [
        len(prompt.ids) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts
    ]
    assert e.count(metrics.LOOKUP_BLOCKS, "hit") > 0
    assert e.manager._open == {}


def test_a_marked_prefix_is_protected_and_the_report_says_so(e: Engine, client: Client) -> None:
    token = secrets.token_bytes(16)
    prompt = Prompt(tokens("protected", 150), marks=(64, MARKED_TOKENS), report=token)
    e.ask(prompt)
    assert window(client, prompt, MARKED_TOKENS).covered_tokens == MARKED_TOKENS
    assert [(mark.end_token, mark.covered_tokens, mark.opened_tokens) for mark in report(client, token)] == [
        (64, 64, 64),
        (MARKED_TOKENS, MARKED_TOKENS, MARKED_TOKENS),
    ]
    keys = keys_of(e, prompt)
    assert client.remove(keys) == [EndStatus.GUARANTEED] * 4


def test_a_hit_in_l1_renews_the_window(e: Engine, client: Client) -> None:
    ids = tokens("renewed", 150)
    e.ask(Prompt(ids, marks=(MARKED_TOKENS,), ttl_ms=20_000))
    token = secrets.token_bytes(16)
    prompt = Prompt(ids, marks=(MARKED_TOKENS,), ttl_ms=60_000, report=token)
    (answer,) = e.ask(prompt)
    assert answer.cached_tokens == MARKED_TOKENS
    assert window(client, prompt, MARKED_TOKENS).remaining_ms > 20_000
    (mark,) = report(client, token)
    assert (mark.opened_tokens, mark.renewed_tokens) == (0, MARKED_TOKENS)


def test_an_unmarked_request_renews_nothing(e: Engine, client: Client) -> None:
    ids = tokens("not renewed", 150)
    marked = Prompt(ids, marks=(MARKED_TOKENS,), ttl_ms=20_000)
    e.ask(marked)
    e.forget_l1()
    before = window(client, marked, MARKED_TOKENS)
    (answer,) = e.ask(Prompt(ids))
    assert answer.cached_tokens == MARKED_TOKENS
    after = window(client, marked, MARKED_TOKENS)
    assert after.renewals == before.renewals
    assert after.remaining_ms + (after.age_ms - before.age_ms) == pytest.approx(before.remaining_ms, abs=3)


def test_a_marked_request_protects_what_an_unmarked_one_wrote(e: Engine, client: Client) -> None:
    ids = tokens("written before", 150)
    e.ask(Prompt(ids))
    prompt = Prompt(ids, marks=(MARKED_TOKENS,))
    assert window(client, prompt, MARKED_TOKENS) is None
    stored = e.count(metrics.STORE_BLOCKS, "stored")
    e.ask(prompt)
    assert window(client, prompt, MARKED_TOKENS).covered_tokens == MARKED_TOKENS
    assert e.count(metrics.STORE_BLOCKS, "stored") == stored


def test_blocks_that_l1_has_but_kvpin_lost_are_written_again(e: Engine, client: Client) -> None:
    ids = tokens("lost", 150)
    e.ask(Prompt(ids))
    keys = keys_of(e, Prompt(ids))
    assert client.remove(keys[1:3]) == [EndStatus.OK] * 2
    assert client.exists(keys) == [True, False, False, True]
    e.ask(Prompt(ids, marks=(MARKED_TOKENS,)))
    assert client.exists(keys) == [True] * 4


def test_when_the_window_has_ended_the_blocks_are_ordinary(e: Engine, client: Client) -> None:
    prompt = Prompt(tokens("short", 150), marks=(MARKED_TOKENS,), ttl_ms=1000)
    e.ask(prompt)
    keys = keys_of(e, prompt)
    assert client.remove(keys) == [EndStatus.GUARANTEED] * 4
    until_s = time.monotonic() + 5
    while window(client, prompt, MARKED_TOKENS) is not None and time.monotonic() < until_s:
        time.sleep(0.02)
    assert client.remove(keys) == [EndStatus.OK] * 4


def test_over_the_limit_a_prefix_is_protected_in_part_and_the_report_says_so(e: Engine, client: Client) -> None:
    limit_bytes = client.stats()["guaranteed_limit_bytes"]
    fitting_tokens = limit_bytes // e.manager._layout.object_bytes * BLOCK_TOKENS
    token = secrets.token_bytes(16)
    end = fitting_tokens + 4 * BLOCK_TOKENS
    prompt = Prompt(tokens("too long", end + 40), marks=(end,), report=token)
    (answer,) = e.ask(prompt)
    assert len(answer.ids) == prompt.output_tokens
    (mark,) = report(client, token)
    assert (mark.covered_tokens, mark.refusal) == (fitting_tokens, Grant.CAPACITY_EXCEEDED)
    assert window(client, prompt, end).covered_tokens == fitting_tokens
    assert client.exists(keys_of(e, prompt)) == [True] * (len(prompt.ids) // BLOCK_TOKENS)


def test_a_failed_load_is_computed_instead(e: Engine, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(tokens("failed load", 300))
    cold = outputs(e.ask(prompt))
    e.forget_l1()
    with monkeypatch.context() as patched:
        patched.setattr(e.worker, "_clock", lambda: float("inf"))
        (answer,) = e.ask(prompt)
    assert [answer.ids] == cold
    assert e.count(metrics.TRANSFER_FAILURES, "load", "expired") == 1
    e.forget_l1()
    (answer,) = e.ask(prompt)
    assert ([answer.ids], answer.cached_tokens) == (cold, 288)


def test_a_failed_store_is_never_visible(e: Engine, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(tokens("failed store", 100))
    with monkeypatch.context() as patched:
        patched.setattr(e.worker, "_clock", lambda: float("inf"))
        cold = outputs(e.ask(prompt))
    assert client.exists(keys_of(e, prompt)) == [False] * 3
    e.forget_l1()
    assert outputs(e.ask(prompt)) == cold
    assert client.exists(keys_of(e, prompt)) == [True] * 3


def test_aborts_leave_nothing_behind_and_harm_nobody(e: Engine, client: Client) -> None:
    prompts = {f"abort {index}": Prompt(tokens(f"abort {index}", 200), output_tokens=40) for index in range(6)}
    alone = {name: outputs(e.ask(prompt))[0] for name, prompt in prompts.items()}
    e.forget_l1()
    victims = ["abort 1", "abort 3", "abort 4"]
    for name, prompt in prompts.items():
        e.start(name, prompt)
    for aborted in victims:  # one in its lookup or load, the others in the midst of decoding
        e.step()
        e.llm.llm_engine.abort_request([aborted])
        for _ in range(3):
            e.step()
    finished = e.run()
    assert finished == {name: ids for name, ids in alone.items() if name not in victims}
    e.settle()
    assert e.manager._open == {}
    assert [state for state in e.manager._states.values() if state.question or state.load or state.puts] == []


def test_a_reset_forgets_this_engines_objects_but_not_an_open_window(e: Engine, client: Client) -> None:
    ordinary = Prompt(tokens("ordinary", 100))
    protected = Prompt(tokens("kept", 150), marks=(MARKED_TOKENS,))
    e.ask(ordinary, protected)
    assert e.llm.reset_prefix_cache(reset_connector=True)
    assert client.exists(keys_of(e, ordinary)) == [False] * 3
    assert client.exists(keys_of(e, protected)) == [True] * 4


def test_counters_reach_vllms_prometheus_endpoint(e: Engine, client: Client) -> None:
    import prometheus_client

    e.ask(Prompt(tokens("counted", 100)))
    text = prometheus_client.generate_latest().decode()
    assert 'vllm:kvpin_store_blocks_total{engine="0",model_name="' in text
    assert 'outcome="stored"' in text
    assert "vllm:kvpin_connected{" in text
