"""The command line against a real master: what it shows, as text and as JSON, and its exit codes."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpin import __version__
from kvpin.cli_output import duration_text, size_text
from kvpin.keys import named_prefix_id
from kvpin.limits import LIST_LIMIT_MAX, MARKS_MAX, PAGE_BYTES
from kvpin.protocol import Ended, Grant, Mark, Protect, Protected, PutEnd, PutItem, PutStart, PutStarted
from tests.support.master import POOL_BYTES, MasterProcess
from tests.support.raw import RawClient

RAG = named_prefix_id("rag")
TOOLS = named_prefix_id("tools")
COMMAND = [sys.executable, "-c", "from kvpin.cli import main; main()"]


def kvpin(*arguments: str, code: int = 0) -> str:
    """What a command writes; its exit code must be `code`."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def kvpin_json(*arguments: str, code: int = 0) -> Any:
    return msgspec.json.decode(kvpin(*arguments, "--json", code=code))


@pytest.fixture
def filled(master: MasterProcess) -> Iterator[RawClient]:
    """Two marked prefixes of two blocks each, labelled, and one block without a mark."""
    with RawClient(master.address) as client:
        client.hello()
        for prefix_id, label in ((RAG, "rag"), (TOOLS, "tools")):
            keys = [label.encode() + b"1", label.encode() + b"2"]
            items = [PutItem(key, PAGE_BYTES, 16 * (i + 1)) for i, key in enumerate(keys)]
            started = client.ask(PutStart(items, [Mark(prefix_id, 32, 60_000, label)]), PutStarted)
            assert started.grants == [Grant.OPENED] * 2
            client.ask(PutEnd(keys), Ended)
        client.ask(PutStart([PutItem(b"plain", PAGE_BYTES)]), PutStarted)
        client.ask(PutEnd([b"plain"]), Ended)
        yield client


def labels() -> list[str]:
    return sorted(info["label"] for info in kvpin_json("prefixes"))


def test_version() -> None:
    assert kvpin("--version").strip() == __version__


@pytest.mark.parametrize(
    "command",
    ["", "master", "status", "prefixes", "evict", "renew", "story", "check", "config"],
    ids=lambda c: c or "-",
)
def test_help_tells_of_every_command(command: str) -> None:
    text = kvpin(*command.split(), "--help")
    assert "Usage: kvpin" in text
    assert "Example" in text or command in ("", "check")


def test_status(filled: RawClient) -> None:
    shown = kvpin_json("status")
    assert shown["values"]["objects"] == 5
    assert shown["values"]["guaranteed_bytes"] == 4 * PAGE_BYTES
    assert shown["segment"]["size_bytes"] == POOL_BYTES
    text = kvpin("status")
    assert "64.0 MiB" in text
    assert "guaranteed" in text


def test_prefixes(filled: RawClient) -> None:
    by_label = {info["label"]: info for info in kvpin_json("prefixes")}
    assert set(by_label) == {"rag", "tools"}
    rag = by_label["rag"]
    assert (rag["prefix_id"], rag["end_token"], rag["covered_tokens"], rag["blocks"]) == (RAG.hex(), 32, 32, 2)
    assert 0 < rag["remaining_ms"] <= 60_000
    assert [info["label"] for info in kvpin_json("prefixes", "--label", "tools")] == ["tools"]
    assert RAG.hex() in kvpin("prefixes")


def test_evict_by_id_name_and_label(filled: RawClient) -> None:
    done = kvpin_json("evict", RAG.hex(), "--yes", "--mode", "delete")
    assert (done["prefixes"], done["memory_blocks"], done["memory_bytes"]) == (1, 2, 2 * PAGE_BYTES)
    assert labels() == ["tools"]
    assert kvpin_json("evict", "--label", "tools", "--dry-run")["memory_blocks"] == 2
    assert labels() == ["tools"], "a dry run changes nothing"
    assert kvpin_json("evict", "name:tools", "--yes")["memory_blocks"] == 2
    assert labels() == []
    assert kvpin_json("status")["values"]["objects"] == 3, "expire keeps the data"


def test_evict_all(filled: RawClient) -> None:
    assert kvpin_json("evict", "--all", "--yes")["prefixes"] == 2
    assert labels() == []
    assert "0 prefixes" in kvpin("evict", "--all", "--yes")


def test_more_prefixes_than_one_answer_lists(master: MasterProcess) -> None:
    count = LIST_LIMIT_MAX + 100
    with RawClient(master.address) as client:
        client.hello()
        client.ask(PutStart([PutItem(b"shared", PAGE_BYTES, 16)]), PutStarted)
        client.ask(PutEnd([b"shared"]), Ended)
        marks = [Mark(named_prefix_id(str(i)), 16, 60_000, "many") for i in range(count)]
        for start in range(0, count, MARKS_MAX):
            client.ask(Protect([b"shared"], [16], marks[start : start + MARKS_MAX]), Protected)
    assert len(kvpin_json("prefixes")) == count
    assert kvpin_json("evict", "--label", "many", "--yes")["prefixes"] == count
    assert kvpin_json("prefixes") == []


def test_evict_asks_and_no_means_no(filled: RawClient) -> None:
    reader, terminal = pty.openpty()
    os.write(reader, b"n\n")
    done = subprocess.run([*COMMAND, "evict", "--all"], stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(reader)
    os.close(terminal)
    assert done.returncode == 1
    assert "2 prefixes, 4 blocks" in done.stderr
    assert labels() == ["rag", "tools"]


def test_evict_without_a_terminal_wants_yes(filled: RawClient) -> None:
    assert "--yes" in kvpin("evict", "--all", code=2)
    assert labels() == ["rag", "tools"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--label"),
        (["--all", "--label", "x"], "--label"),
        (["xyz", "--yes"], "hexadecimal"),
        (["abcd", "--yes"], "32 hex digits"),
        (["--all", "--mode", "explode"], "explode"),
    ],
)
def test_wrong_evicts_are_usage_errors(run_dir: Path, arguments: list[str], word: str) -> None:
    assert word in kvpin("evict", *arguments, code=2)


def test_renew(filled: RawClient) -> None:
    assert kvpin_json("renew", RAG.hex(), "--ttl-s", "600")["memory_blocks"] == 2
    remaining_ms = {info["label"]: info["remaining_ms"] for info in kvpin_json("prefixes")}
    assert remaining_ms["rag"] > 500_000
    assert remaining_ms["tools"] <= 60_000
    assert kvpin_json("renew", "name:absent", "--ttl-s", "600")["prefixes"] == 0


def test_story(filled: RawClient) -> None:
    events = [line["event"] for line in kvpin_json("story", b"rag1".hex())]
    assert events
    text = kvpin("story", b"rag1".hex())
    for event in events:
        assert event in text
    assert kvpin_json("story", b"absent".hex()) == []
    kvpin("story", "no-hex", code=2)


def test_check(filled: RawClient) -> None:
    assert kvpin_json("check") == {"violations": []}
    assert "hold" in kvpin("check")


@pytest.mark.parametrize("command", [["status"], ["prefixes"], ["check"], ["story", "00"], ["evict", "--all", "--yes"]])
def test_no_master_is_exit_code_4(run_dir: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPIN_CONNECT_TIMEOUT_MS", "100")
    assert "kvpin master" in kvpin(*command, code=4)
    assert not list(run_dir.glob("*.sock")), "and none was started"


def test_address_by_option_and_environment(
    make_master: Callable[..., MasterProcess], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = make_master(pool="elsewhere")
    assert kvpin_json("status", "--address", master.address)["values"]["server_pid"] == master.pid
    monkeypatch.setenv("KVPIN_ADDRESS", master.address)
    assert kvpin_json("status")["values"]["server_pid"] == master.pid


def test_a_wrong_address_is_a_usage_error(run_dir: Path) -> None:
    assert "smoke://x" in kvpin("status", "--address", "smoke://x", code=2)


def test_config_tells_where_each_value_comes_from(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir / "kvpin.toml"
    path.write_text('pool_size = "3GiB"')
    monkeypatch.setenv("KVPIN_TTL_MS_MAX", "1000")
    shown = kvpin_json("config", "--config", str(path))
    origins = {name: (setting["value"], setting["origin"]) for name, setting in shown.items()}
    assert origins["pool_size"] == ("3GiB", str(path))
    assert origins["ttl_ms_max"] == (1000, "$KVPIN_TTL_MS_MAX")
    assert origins["pool"] == ("default", "default")
    assert shown["lease_ms_max"]["valid"] == "1 to 60000 ms"
    text = kvpin("config", "--config", str(path))
    assert str(path) in text
    assert "$KVPIN_TTL_MS_MAX" in text


def test_texts() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [duration_text(ms) for ms in (999, 59_000, 61_000, 3_723_000)] == ["0s", "59s", "1m01s", "1h02m03s"]
