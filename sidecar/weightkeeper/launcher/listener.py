"""The listening socket. The launcher owns it for its whole life, so that clients wait during a restart."""

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import holders
from weightkeeper.sockets import fitting

BACKLOG = 2048
"""Clients that may wait; the kernel lowers it to net.core.somaxconn. Further ones wait in their own connect."""

_PROBE_SECONDS = 1.0
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: `--host` and `--port`, or `--uds`, as vLLM understands them."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or "0.0.0.0"  # noqa: S104
        return self.path or f"{host}:{self.port}"


class Listener:
    """A listening socket at an address.

    Attributes:
        reach: how the launcher's own health check gets there: (host, port), or a path.

    Raises:
        ConfigError: the address cannot be had; the message says who has it, where that can be seen.
    """

    def __init__(self, address: Address):
        self.address = address
        self._identity: tuple[int, int] | None = None
        if address.path:
            self.socket = self._at_path(fitting(address.path))
            self.reach: str | tuple[str, int] = os.path.abspath(address.path)
        else:
            self.socket = _at_port(address)
            self.reach = _ANY.get(address.host, address.host), self.socket.getsockname()[1]
        self.inode = os.fstat(self.socket.fileno()).st_ino

    def close(self) -> None:
        self.socket.close()
        if self._identity is not None:
            with contextlib.suppress(OSError):
                state = os.lstat(self.reach)
                if (state.st_dev, state.st_ino) == self._identity:
                    os.unlink(self.reach)

    def _at_path(self, path: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if _is_dead(path):
                os.unlink(path)
            listener.bind(path)
            listener.listen(BACKLOG)
            state = os.lstat(path)
        except OSError as error:
            listener.close()
            raise ConfigError(f"--uds {path}: {error.strerror}; stop who listens there, or choose another") from error
        self._identity = state.st_dev, state.st_ino
        return listener


def _at_port(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        text = f"{address}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            text = f"{text}, by {holders.of_port(address.port)}; stop it, or choose another --port"
        raise ConfigError(text) from error
    return listener


def _is_dead(path: str) -> bool:
    """Whether a socket lies there on which nobody listens any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
