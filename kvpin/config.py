"""One configuration, four sources: defaults < TOML file < `KVPIN_*` environment < command line (or an engine's JSON).

Every value remembers where it came from, so that `kvpin config` can say so and an error names the place to mend.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from kvpin.errors import ConfigError
from kvpin.limits import (
    LEASE_MS_MAX,
    PUT_TIMEOUT_MS,
    QUARANTINE_MS,
    SESSION_TIMEOUT_MS,
    SESSION_TIMEOUT_MS_MIN,
    TTL_MS_MAX,
    WAIT_MS_MAX,
)
from kvpin.paths import DEFAULT_POOL, check_address, check_listen, default_address, pool_address, run_dir
from kvpin.segment import SHM_DIR

__all__ = [
    "DEFAULT_POOL", "ClientConfig", "Loaded", "MasterConfig", "check_address", "client_config", "default_address",
    "load_master_config", "pool_address", "run_dir", "valid_values",
]  # fmt: skip

ENV_PREFIX = "KVPIN_"

PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")]  # a part of file names
Fraction = Annotated[float, Meta(ge=0, le=1)]
WaitMs = Annotated[int, Meta(ge=1, le=WAIT_MS_MAX)]


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The master's settings. Sizes as "512MiB", "4GB" or bytes; shares of the pool also as "50%" or 0.5."""

    pool: PoolName = DEFAULT_POOL  # names the segment, socket and lock: one master a pool
    listen: str = ""  # ZeroMQ address; "" = ipc://<run_dir>/<pool>.sock
    insecure_tcp: bool = False  # allow tcp:// beyond loopback, unencrypted and unauthenticated
    pool_size: str = "auto"  # "auto" = a quarter of what can be had in segment_dir
    guaranteed_limit: str = "50%"  # what open windows may hold, in all
    high_watermark: Fraction = 0.95  # of the pool: background eviction begins above it
    low_watermark: Fraction = 0.90  # of the pool: background eviction ends below it
    headroom: Fraction = 0.05  # of the pool: guarantees stay this far below high_watermark
    cache_quotas: dict[str, str] = {}  # guaranteed bytes a cache
    tenant_quotas: dict[str, str] = {}  # guaranteed bytes a tenant
    put_timeout_ms: WaitMs = PUT_TIMEOUT_MS  # from put_start to put_end
    quarantine_ms: WaitMs = QUARANTINE_MS  # before a lost put's range is used again
    lease_ms_max: Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)] = LEASE_MS_MAX
    ttl_ms_max: Annotated[int, Meta(ge=1, le=TTL_MS_MAX)] = TTL_MS_MAX  # longest guaranteed window
    session_timeout_ms: Annotated[int, Meta(ge=SESSION_TIMEOUT_MS_MIN, le=WAIT_MS_MAX)] = SESSION_TIMEOUT_MS
    exit_when_idle_s: Annotated[float, Meta(ge=0, le=WAIT_MS_MAX / 1000)] = 0.0  # without clients; 0 = never leave
    segment_dir: str = SHM_DIR  # a tmpfs or hugetlbfs
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["kv", "json"] = "kv"


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's settings; engine adapters take the same names in their extra config."""

    address: str | None = None  # the master's; None = the pool's socket on this host
    pool: PoolName = DEFAULT_POOL
    embedded: bool = True  # with no address: start a master if none is there
    pool_size: str | None = None  # of a master started that way
    guaranteed_limit: str | None = None  # of a master started that way
    connect_timeout_ms: WaitMs = 2000
    call_timeout_ms: WaitMs = 1000
    lookup_deadline_ms: WaitMs = 50  # an engine's lookup not answered by then is a miss
    put_deadline_ms: WaitMs = 10  # longest wait of an engine's scheduler for ranges
    lease_ms: Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)] = 10_000
    retry_ms: WaitMs = 500  # how often a master that does not answer is tried again


Config = TypeVar("Config", MasterConfig, ClientConfig)


class Loaded(msgspec.Struct, Generic[Config], frozen=True):
    """A configuration and where each value came from."""

    config: Config
    origins: dict[str, str]

    def named(self, name: str) -> str:
        """The setting as an error should name it: `$KVPIN_POOL_SIZE: pool_size`."""
        return f"{self.origins[name]}: {name}"


def load_master_config(
    cli: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, toml_path: str | None = None
) -> Loaded[MasterConfig]:
    """Merge the four sources. `cli`: options given (None = not given). Raises ConfigError."""
    env = os.environ if env is None else env
    merged = _Merged(MasterConfig)
    if toml_path := toml_path or env.get("KVPIN_CONFIG"):
        merged.add(_read_toml(toml_path), lambda name: toml_path)
    merged.add_environment(env)
    given = {name: value for name, value in (cli or {}).items() if value is not None}
    merged.add(given, lambda name: f"--{name.replace('_', '-')}")
    loaded = merged.loaded()
    if loaded.config.listen:
        _blame(loaded.named("listen"), check_listen, loaded.config.listen, loaded.config.insecure_tcp)
    return loaded


def client_config(
    overrides: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, source: str = "given"
) -> ClientConfig:
    """A client's configuration: defaults < `KVPIN_*` < `overrides`, which errors call `source`. Raises ConfigError."""
    merged = _Merged(ClientConfig)
    merged.add_environment(os.environ if env is None else env)
    merged.add(overrides or {}, lambda name: source)
    loaded = merged.loaded()
    if loaded.config.address is not None:
        _blame(loaded.named("address"), check_address, loaded.config.address)
    return loaded.config


def valid_values(config: type[Config], name: str) -> str:
    """What a setting may be, in words."""
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    unit = " ms" if "_ms" in name else " s" if name.endswith("_s") else ""
    match msgspec.inspect.type_info(_types(config)[name]):
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(map(str, values))
        case msgspec.inspect.IntType(ge=least, le=most) | msgspec.inspect.FloatType(ge=least, le=most):
            return f"{least:g} to {most:.12g}{unit}"
    return "text"


_SPELLINGS = {
    "pool": "at most 40 letters, digits, '_', '.' and '-', a letter or digit first",
    "listen": "ipc:///path or tcp://host:port",
    "address": "ipc:///path or tcp://host:port",
    "pool_size": 'auto, a size such as "16GiB" or "4GB", or bytes',
    "guaranteed_limit": 'a share of the pool such as "50%" or 0.5, or a size such as "8GiB"',
    "cache_quotas": 'owners with a size or share each, such as kv=4GiB,responses=10%, or a TOML table',
    "tenant_quotas": 'owners with a size or share each, such as acme=4GiB,other=10%, or a TOML table',
    "segment_dir": "a directory on a tmpfs or hugetlbfs",
}  # fmt: skip


class _Merged(Generic[Config]):
    """Values and their origins, one source over the other."""

    def __init__(self, config: type[Config]) -> None:
        self._config: type[Config] = config
        self._types = _types(config)
        self._values: dict[str, Any] = {}
        self._origins = dict.fromkeys(self._types, "default")

    def add_environment(self, env: Mapping[str, str]) -> None:
        """Only known names: other programs' variables may begin with KVPIN_ too."""
        variables = {name: f"{ENV_PREFIX}{name.upper()}" for name in self._types}
        found = {name: env[variable] for name, variable in variables.items() if variable in env}
        self.add(found, lambda name: f"${variables[name]}")

    def add(self, source: Mapping[str, Any], origin_of: Callable[[str], str]) -> None:
        for name, value in source.items():
            origin = origin_of(name)
            if name not in self._types:
                raise ConfigError(f"{origin}: unknown setting {name!r}; {_suggestion(name, list(self._types))}")
            self._values[name] = self._convert(name, value, origin)
            self._origins[name] = origin

    def loaded(self) -> Loaded[Config]:
        return Loaded(self._config(**self._values), self._origins)

    def _convert(self, name: str, value: Any, origin: str) -> Any:
        try:
            converted = msgspec.convert(_plain(self._types[name], value), self._types[name], strict=False)
            if converted != converted:
                raise ValueError("not a number")
            return converted
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(
                f"{origin}: {name} = {value!r}: give {valid_values(self._config, name)} ({error})"
            ) from error


def _plain(kind: Any, value: Any) -> Any:
    """The value as msgspec wants it: numbers where text is asked for, and quotas in one line, are fine too."""
    if kind == dict[str, str]:
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
            if not all(owner.strip() and sign for owner, sign, _ in pairs):
                raise ValueError("not of the form NAME=SIZE,NAME=SIZE")
            return {owner.strip(): quota.strip() for owner, _, quota in pairs}
        if isinstance(value, Mapping):
            return {owner: str(quota) for owner, quota in value.items()}
    if kind in (str, str | None) and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _types(config: type[Config]) -> dict[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {name: hints[name] for name in config.__struct_fields__}


def _suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def _blame(who: str, check: Callable[..., object], *values: object) -> None:
    try:
        check(*values)
    except ConfigError as error:
        raise ConfigError(f"{who} = {error}") from error


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
