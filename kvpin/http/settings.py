"""Settings of the HTTP side: the environment's `KVPIN_HTTP_*`."""

import os
from collections.abc import Mapping

import msgspec

from kvpin.errors import ConfigError
from kvpin.http.markers import parse_ttl
from kvpin.limits import LABEL_BYTES_MAX, REPORT_WAIT_MS, REPORT_WAIT_MS_MAX, TTL_MS_MAX

ENV_PREFIX = "KVPIN_HTTP_"


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`strict`: answer 400 to what the hosted APIs refuse. `ttl_max_ms`: longest window that a client gets.

    `report_wait_ms`: how long a complete answer waits for the master's report.
    """

    strict: bool = False
    ttl_max_ms: int = TTL_MS_MAX
    report_wait_ms: int = REPORT_WAIT_MS
    label: str = ""  # of prefixes whose request has no x-kvpin-label header


def http_config(env: Mapping[str, str] | None = None) -> HttpConfig:
    """`KVPIN_HTTP_STRICT` (true or false), `_TTL_MAX` ("1h"), `_REPORT_WAIT_MS`, `_LABEL`. Raises ConfigError."""
    env = os.environ if env is None else env
    known = {ENV_PREFIX + name for name in ("STRICT", "TTL_MAX", "REPORT_WAIT_MS", "LABEL")}
    if unknown := sorted(name for name in env if name.startswith(ENV_PREFIX) and name not in known):
        raise ConfigError(f"${unknown[0]}: unknown setting; known: {', '.join(sorted(known))}")
    strict = env.get(ENV_PREFIX + "STRICT", "false").strip().lower()
    if strict not in ("true", "false", "1", "0"):
        raise ConfigError(f"${ENV_PREFIX}STRICT = {strict!r}: give true or false")
    ttl = env.get(ENV_PREFIX + "TTL_MAX", f"{TTL_MS_MAX // 1000}s").strip()
    ttl_max_ms = parse_ttl(int(ttl) if ttl.isdecimal() else ttl)
    if ttl_max_ms is None or ttl_max_ms > TTL_MS_MAX:
        raise ConfigError(f'${ENV_PREFIX}TTL_MAX = {ttl!r}: give "5m", "1h" or seconds, at most {TTL_MS_MAX // 1000} s')
    label = env.get(ENV_PREFIX + "LABEL", "")
    if len(label.encode(errors="replace")) > LABEL_BYTES_MAX:
        raise ConfigError(f"${ENV_PREFIX}LABEL is longer than {LABEL_BYTES_MAX} bytes: shorten it")
    wait = env.get(ENV_PREFIX + "REPORT_WAIT_MS", str(REPORT_WAIT_MS)).strip()
    if not wait.isdecimal() or int(wait) > REPORT_WAIT_MS_MAX:
        raise ConfigError(f"${ENV_PREFIX}REPORT_WAIT_MS = {wait!r}: give 0 to {REPORT_WAIT_MS_MAX}")
    return HttpConfig(strict=strict in ("true", "1"), ttl_max_ms=ttl_max_ms, report_wait_ms=int(wait), label=label)
