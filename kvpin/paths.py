"""Where processes of one user and host find each other: the run directory and the addresses in it."""

import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvpin.errors import ConfigError
from kvpin.limits import IPC_PATH_BYTES_MAX

DEFAULT_POOL = "default"


def run_dir(env: Mapping[str, str] | None = None) -> Path:
    """The directory of sockets, locks and keys, mode 0700, made if absent. Raises ConfigError if others may enter.

    `$KVPIN_RUN_DIR`, else `$XDG_RUNTIME_DIR/kvpin` if that is this user's, else `/tmp/kvpin-<uid>`.
    """
    path = _chosen_run_dir(os.environ if env is None else env)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"run directory {path}: {error.strerror}; set KVPIN_RUN_DIR to one you own") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"run directory {path} must be a directory of yours (user {os.geteuid()}) that nobody else may enter: "
            f"chmod 700 {path}, or set KVPIN_RUN_DIR to another"
        )
    return path


def pool_address(pool: str = DEFAULT_POOL, env: Mapping[str, str] | None = None) -> str:
    """Where the pool's master listens on this host. Raises ConfigError if the path is too long for a socket."""
    path = run_dir(env) / f"{pool}.sock"
    if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {IPC_PATH_BYTES_MAX} bytes: set KVPIN_RUN_DIR to a shorter one")
    return f"ipc://{path}"


def default_address(env: Mapping[str, str] | None = None) -> str:
    """Where a master of the default pool listens."""
    return pool_address(DEFAULT_POOL, env)


def check_address(address: str) -> str:
    """The address, if ZeroMQ and kvpin can use it. Raises ConfigError."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ConfigError(f"{address!r}: give an absolute path, as in ipc:///run/user/1000/kvpin/default.sock")
        if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
            raise ConfigError(
                f"{address!r}: a socket's path has at most {IPC_PATH_BYTES_MAX} bytes; give a shorter one"
            )
        return address
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if address.startswith("tcp://") and host and colon and (port == "*" or (port.isdigit() and int(port) < 1 << 16)):
        return address
    raise ConfigError(f"{address!r}: give ipc:///path/to/socket or tcp://host:port")


def check_listen(address: str, insecure_tcp: bool) -> str:
    """The address, if a master may listen there. Raises ConfigError."""
    check_address(address)
    if address.startswith("tcp://") and not insecure_tcp and not _is_loopback(address):
        raise ConfigError(
            f"{address!r} is open to the network, and tcp is neither encrypted nor authenticated yet: listen on "
            "tcp://127.0.0.1:port, or set insecure_tcp too where you trust everybody on that network"
        )
    return address


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an interface: who knows


def _chosen_run_dir(env: Mapping[str, str]) -> Path:
    if chosen := env.get("KVPIN_RUN_DIR"):
        return Path(chosen).absolute()
    if base := env.get("XDG_RUNTIME_DIR"):
        try:
            status = os.stat(base)
        except OSError:
            status = None
        # `su` and containers keep the variable of another user, or one whose directory isn't there.
        if status is not None and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            return Path(base) / "kvpin"
    return Path("/tmp") / f"kvpin-{os.geteuid()}"
