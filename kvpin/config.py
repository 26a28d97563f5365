"""One configuration, four sources: defaults < TOML file < `KVPIN_*` environment < command line (or an engine's JSON).

Every value remembers where it came from, so that `kvpin config` can say so and an error names the place to mend.
"""

import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvpin.errors import ConfigError
from kvpin.limits import (
    IPC_PATH_BYTES_MAX,
    LEASE_MS_MAX,
    PAGE_BYTES,
    POOL_AUTO_SHARE,
    POOL_BYTES_AUTO_MAX,
    POOL_BYTES_MIN,
    PUT_TIMEOUT_MS,
    QUARANTINE_MS,
    SESSION_TIMEOUT_MS,
    TTL_MS_MAX,
)

ENV_PREFIX = "KVPIN_"
DEFAULT_POOL = "default"
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_UNITS |= {"ti": 2**40}


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The master's settings. Sizes as "512MiB", "4GB" or bytes; the guaranteed limit also as "50%" of the pool."""

    pool: str = DEFAULT_POOL  # names the segment, socket and lock: one master a pool
    listen: str = ""  # ZeroMQ address; "" = ipc://<run_dir>/<pool>.sock
    insecure_tcp: bool = False  # allow tcp:// beyond loopback, unencrypted and unauthenticated
    pool_size: str = "auto"  # "auto" = a quarter of what is free in segment_dir
    guaranteed_limit: str = "50%"  # bytes that open windows may hold, in all
    high_watermark: float = 0.95  # of the pool: background eviction begins above it
    low_watermark: float = 0.90  # of the pool: background eviction ends below it
    headroom: float = 0.05  # of the pool: guarantees stay this far below high_watermark
    cache_quotas: dict[str, str] = {}  # guaranteed bytes a cache
    tenant_quotas: dict[str, str] = {}  # guaranteed bytes a tenant
    put_timeout_ms: int = PUT_TIMEOUT_MS  # from put_start to put_end
    quarantine_ms: int = QUARANTINE_MS  # before a lost put's range is used again
    lease_ms_max: int = LEASE_MS_MAX
    ttl_ms_max: int = TTL_MS_MAX  # longest guaranteed window
    session_timeout_ms: int = SESSION_TIMEOUT_MS  # a client silent for so long is taken for gone
    exit_when_idle_s: float = 0.0  # leave after so long without clients; 0 = never
    segment_dir: str = "/dev/shm"  # a tmpfs or hugetlbfs
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["kv", "json"] = "kv"


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's settings; engine adapters take the same names in their extra config."""

    address: str | None = None  # the master's; None = the pool's socket on this host
    pool: str = DEFAULT_POOL
    embedded: bool = True  # with no address: start a master if none is there
    pool_size: str | None = None  # of a master started that way
    guaranteed_limit: str | None = None  # of a master started that way
    connect_timeout_ms: int = 2000
    call_timeout_ms: int = 1000
    lookup_deadline_ms: int = 50  # an engine's lookup not answered by then is a miss
    put_deadline_ms: int = 10  # longest wait of an engine's scheduler for ranges
    lease_ms: int = 10_000
    retry_ms: int = 500  # how often a master that does not answer is tried again


Config = TypeVar("Config", MasterConfig, ClientConfig)


class Loaded(msgspec.Struct, frozen=True):
    """A master's configuration and where each value came from."""

    config: MasterConfig
    origins: dict[str, str]


def load_master_config(
    cli: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, toml_path: str | None = None
) -> Loaded:
    """Merge the four sources. `cli`: options given (None = not given). Raises ConfigError."""
    env = os.environ if env is None else env
    toml_path = toml_path or env.get("KVPIN_CONFIG")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_fields(MasterConfig), "default")

    def merge(source: Mapping[str, Any], origin: str) -> None:
        for name, value in source.items():
            _check_known(name, MasterConfig, origin)
            values[name] = value
            origins[name] = origin

    if toml_path:
        merge(_read_toml(toml_path), toml_path)
    for name in _fields(MasterConfig):
        variable = ENV_PREFIX + name.upper()
        if variable in env:
            merge({name: env[variable]}, f"${variable}")
    for name, value in (cli or {}).items():
        if value is not None:
            merge({name: value}, f"--{name.replace('_', '-')}")
    config = _convert(values, MasterConfig, origins)
    _check_master(config, origins)
    return Loaded(config, origins)


def client_config(overrides: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> ClientConfig:
    """A client's configuration: defaults < `KVPIN_*` < `overrides`. Raises ConfigError."""
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in _fields(ClientConfig):
        variable = ENV_PREFIX + name.upper()
        if variable in env:
            values[name] = env[variable]
            origins[name] = f"${variable}"
    for name, value in (overrides or {}).items():
        _check_known(name, ClientConfig, "client settings")
        values[name] = value
        origins[name] = name
    return _convert(values, ClientConfig, origins)


def parse_size(text: str | int, what: str) -> int:
    """Bytes of "512MiB", "4GB", "4g" or a number. Raises ConfigError naming `what`."""
    if isinstance(text, int):
        return text
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = cleaned[len(digits) :].strip()
    factor = _UNITS.get(unit if unit == "b" else unit.removesuffix("b"))
    try:
        size = float(digits) * factor if factor is not None else -1.0
    except ValueError:
        size = -1.0
    if not 0 <= size < 2**63:
        raise ConfigError(f'{what} = {text!r}: give a size such as "512MiB", "4GB" or a number of bytes')
    return int(size)


def pool_bytes(config: MasterConfig) -> int:
    """The pool's size in whole pages. Raises ConfigError."""
    if config.pool_size == "auto":
        try:
            status = os.statvfs(config.segment_dir)
        except OSError as error:
            raise ConfigError(f"segment_dir = {config.segment_dir!r}: {error.strerror}") from error
        size = min(int(status.f_bavail * status.f_frsize * POOL_AUTO_SHARE), POOL_BYTES_AUTO_MAX)
        if size < POOL_BYTES_MIN:
            raise ConfigError(
                f"{config.segment_dir} has {status.f_bavail * status.f_frsize} bytes free, too little for a pool of "
                f"at least {POOL_BYTES_MIN} in a quarter of it: enlarge it (docker run --shm-size=16g; Docker's "
                "default is 64 MB) or set pool_size"
            )
    else:
        size = parse_size(config.pool_size, "pool_size")
    size -= size % PAGE_BYTES
    if size < POOL_BYTES_MIN:
        raise ConfigError(f"pool_size = {config.pool_size!r}: give at least {POOL_BYTES_MIN} bytes")
    return size


def share_bytes(text: str, whole_bytes: int, what: str) -> int:
    """Bytes of "50%" of `whole_bytes`, or of a size. Raises ConfigError."""
    if not text.strip().endswith("%"):
        return parse_size(text, what)
    try:
        percent = float(text.strip()[:-1])
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ConfigError(f'{what} = {text!r}: give "0%" to "100%", or a size such as "2GiB"')
    return int(whole_bytes * percent / 100)


def run_dir(env: Mapping[str, str] | None = None) -> Path:
    """The directory of sockets, locks and keys, mode 0700, made if absent. Raises ConfigError if others may enter."""
    env = os.environ if env is None else env
    if chosen := env.get("KVPIN_RUN_DIR"):
        path = Path(chosen)
    elif base := env.get("XDG_RUNTIME_DIR"):
        path = Path(base) / "kvpin"
    else:
        path = Path("/tmp") / f"kvpin-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"run directory {path}: {error.strerror}; set KVPIN_RUN_DIR to one you own") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"run directory {path} must be a directory of yours with mode 0700: chmod 700 {path}")
    return path


def pool_address(pool: str = DEFAULT_POOL, env: Mapping[str, str] | None = None) -> str:
    """Where the pool's master listens on this host. Raises ConfigError if the path is too long for a socket."""
    path = run_dir(env) / f"{pool}.sock"
    if len(str(path).encode()) > IPC_PATH_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {IPC_PATH_BYTES_MAX} bytes: set KVPIN_RUN_DIR to a shorter one")
    return f"ipc://{path}"


def default_address(env: Mapping[str, str] | None = None) -> str:
    return pool_address(DEFAULT_POOL, env)


def _fields(config: type[Config]) -> tuple[str, ...]:
    return config.__struct_fields__


def _check_known(name: str, config: type[Config], origin: str) -> None:
    known = _fields(config)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"{origin}: unknown setting {name!r}; {hint}")


def _convert(values: Mapping[str, Any], config: type[Config], origins: Mapping[str, str]) -> Config:
    sized = {"pool_size", "guaranteed_limit"}
    plain = {name: str(value) if name in sized and isinstance(value, int) else value for name, value in values.items()}
    for name in ("cache_quotas", "tenant_quotas"):
        if isinstance(text := plain.get(name), str):  # from the environment: cache=1GiB,other=2GiB
            plain[name] = dict(pair.partition("=")[::2] for pair in text.split(",") if pair)
        elif isinstance(text, Mapping):
            plain[name] = {owner: str(quota) for owner, quota in text.items()}
    try:
        return msgspec.convert(plain, config, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0] if "$." in str(error) else ""
        raise ConfigError(f"{origins.get(name, 'settings')}: {name} = {values.get(name)!r}: {error}") from error


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _check_master(config: MasterConfig, origins: Mapping[str, str]) -> None:
    """What types can't say; the core checks sizes and watermarks against the pool."""
    if not config.pool or not all(c.isalnum() or c in "_." for c in config.pool) or config.pool.startswith("."):
        raise ConfigError(f"{origins['pool']}: pool = {config.pool!r}: use letters, digits, '_' and '.'")
    if config.exit_when_idle_s < 0 or config.session_timeout_ms <= 0:
        raise ConfigError("exit_when_idle_s must be 0 or more, session_timeout_ms more than 0")
    if config.listen and not config.listen.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"{origins['listen']}: listen = {config.listen!r}: give ipc:///path or tcp://127.0.0.1:port")
    host = config.listen.removeprefix("tcp://").rpartition(":")[0]
    loopback = host.startswith("127.") or host in ("localhost", "[::1]")
    if config.listen.startswith("tcp://") and not (loopback or config.insecure_tcp):
        raise ConfigError(
            f"{origins['listen']}: listen = {config.listen!r} is open to the network, and tcp is neither encrypted nor "
            "authenticated yet: listen on 127.0.0.1, or set insecure_tcp on a network you trust"
        )
