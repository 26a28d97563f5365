"""The master's socket: where it listens, and every option that keeps a peer from hurting it."""

import os
import socket
import stat
from types import TracebackType

import zmq

from kvpin.errors import ConfigError, MasterBusy
from kvpin.limits import CLIENT_QUEUE_MAX, FRAME_BYTES_MAX, IPC_PATH_BYTES_MAX, SOCKET_HEARTBEAT_MS


class Listener:
    """A bound ROUTER. `address` is where clients find it. Raises ConfigError or MasterBusy."""

    def __init__(self, address: str, peer_timeout_ms: int) -> None:
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else None
        if self._path is not None:
            _clear_path(self._path)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),  # a master that leaves owes nobody an answer
            (zmq.SNDHWM, CLIENT_QUEUE_MAX),
            (zmq.RCVHWM, CLIENT_QUEUE_MAX),
            (zmq.MAXMSGSIZE, FRAME_BYTES_MAX),  # libzmq drops the connection of whoever sends more
            (zmq.ROUTER_MANDATORY, 1),  # otherwise replies that can't be sent vanish uncounted
            (zmq.ROUTER_HANDOVER, 1),  # a client that reconnects under its id takes the id over
            (zmq.HEARTBEAT_IVL, SOCKET_HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, peer_timeout_ms),
            (zmq.HEARTBEAT_TTL, peer_timeout_ms),
        ):
            self.socket.setsockopt(option, value)
        umask = os.umask(0o077)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"can't listen on {address}: {error.strerror}") from error
        finally:
            os.umask(umask)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)
        if self._path is not None and os.path.exists(self._path):
            os.unlink(self._path)


def _clear_path(path: str) -> None:
    """Remove a socket that a crash left; libzmq itself would replace any file, and a living master's socket too."""
    if path.startswith("@"):
        raise ConfigError(f"listen = 'ipc://{path}': abstract sockets have no permissions; give a path in a directory")
    if len(path.encode()) > IPC_PATH_BYTES_MAX:
        raise ConfigError(f"listen = 'ipc://{path}': a socket's path has at most {IPC_PATH_BYTES_MAX} bytes")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ConfigError(f"listen = 'ipc://{path}': no such directory {os.path.dirname(path)}") from None
        return
    except OSError as error:
        raise ConfigError(f"listen = 'ipc://{path}': {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"listen = 'ipc://{path}': there is a file that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
        else:
            raise MasterBusy(f"somebody listens on ipc://{path} already: stop that master, or choose another --listen")
