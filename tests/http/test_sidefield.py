"""Nobody but this user's processes can write a side field."""

import copy
import multiprocessing
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpin.errors import ConfigError
from kvpin.http.sidefield import KEY_FILE, MarkedPrefix, SideField, load_key, sign, verify

KEY, OTHER = b"k" * 32, b"o" * 32
FIELD = SideField([MarkedPrefix("0a" * 16, 64, 300_000, "team"), MarkedPrefix("0b" * 16, 128, 60_000)], "0c" * 16)


def test_a_signed_field_comes_back() -> None:
    found = verify(sign(FIELD, KEY), KEY)
    assert found is not None
    assert (found.prefixes, found.report) == (FIELD.prefixes, FIELD.report)


def test_another_key_does_not_count() -> None:
    assert verify(sign(FIELD, OTHER), KEY) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prefixes", 0, "id"), "0d" * 16),
        (("prefixes", 0, "end_token"), 96),
        (("prefixes", 0, "ttl_ms"), 300_001),
        (("prefixes", 0, "label"), "other"),
        (("report",), ""),
        (("signature",), ""),
        (("signature",), "é"),
        (("prefixes",), []),
        (("extra",), 1),
        (("prefixes", 0, "id"), "short"),
        (("prefixes", 0, "end_token"), "64"),
    ],
)
def test_any_change_is_noticed(path: tuple[Any, ...], value: Any) -> None:
    raw: Any = copy.deepcopy(sign(FIELD, KEY))
    holder = raw
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    assert verify(raw, KEY) is None


def test_a_field_over_a_limit_does_not_count_though_it_is_signed() -> None:
    assert verify(sign(SideField([MarkedPrefix("0a" * 16, 64, 1)] * 100), KEY), KEY) is None
    assert verify(sign(SideField([MarkedPrefix("0a", 64, 1)]), KEY), KEY) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["prefixes", "report", "signature", "id", "end_token"]), inner, max_size=4)
    ),
)


@given(JSON)
def test_nothing_makes_it_raise(raw: Any) -> None:
    assert verify(raw, KEY) is None


def test_the_key_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert load_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_processes_that_start_together_agree_on_the_key(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        keys = pool.map(load_key, [tmp_path] * 16)
    assert len(set(keys)) == 1


def test_a_damaged_key_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(ConfigError, match="remove it"):
        load_key(tmp_path)
