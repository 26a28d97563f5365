import pytest

from kvpin.errors import ConfigError
from kvpin.http.settings import HttpConfig, http_config
from kvpin.limits import TTL_MS_MAX


def test_defaults() -> None:
    assert http_config({}) == HttpConfig(strict=False, ttl_max_ms=TTL_MS_MAX, label="")


def test_all_settings() -> None:
    env = {"KVPIN_HTTP_STRICT": "true", "KVPIN_HTTP_TTL_MAX": "1h", "KVPIN_HTTP_LABEL": "a", "KVPIN_POOL": "x"}
    assert http_config(env) == HttpConfig(strict=True, ttl_max_ms=3_600_000, label="a")
    assert http_config({"KVPIN_HTTP_TTL_MAX": "90"}).ttl_max_ms == 90_000


@pytest.mark.parametrize(
    "env",
    [
        {"KVPIN_HTTP_STRICT": "maybe"},
        {"KVPIN_HTTP_TTL_MAX": "forever"},
        {"KVPIN_HTTP_TTL_MAX": "0"},
        {"KVPIN_HTTP_TTL_MAX": "25h"},
        {"KVPIN_HTTP_REPORT_WAIT_MS": "-1"},
        {"KVPIN_HTTP_REPORT_WAIT_MS": "10001"},
        {"KVPIN_HTTP_LABEL": "x" * 201},
        {"KVPIN_HTTP_STRIKT": "1"},
    ],
    ids=lambda env: str(env)[:40],
)
def test_a_wrong_setting_is_named(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        http_config(env)
