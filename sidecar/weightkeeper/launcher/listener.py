"""The listening socket. The launcher owns it for its whole life, so that clients wait during a restart."""

import contextlib
import errno
import logging
import os
import socket
import stat
from dataclasses import dataclass

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import holders
from weightkeeper.quantities import printable
from weightkeeper.sockets import fitting

BACKLOG = 2048
"""Clients that may wait; the kernel lowers it to net.core.somaxconn. Further ones wait in their own connect."""

_PROBE_SECONDS = 1.0
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound


logger = logging.getLogger(__name__)


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

    def renew(self) -> None:
        """Bind anew where somebody has removed or replaced the socket's file: nobody could reach the next server.

        Raises:
            ConfigError: as when it was made; the old socket stays.
        """
        if self._identity is None or self._is_there():
            return
        old, self.socket = self.socket, self._at_path(self.address.path)
        old.close()
        self.inode = os.fstat(self.socket.fileno()).st_ino
        logger.warning("--uds %s: the socket's file was gone; it is bound anew", self.address.path)

    def close(self) -> None:
        self.socket.close()
        if self._identity is not None and self._is_there():
            with contextlib.suppress(OSError):
                os.unlink(self.reach)

    def _is_there(self) -> bool:
        try:
            state = os.lstat(self.reach)
        except OSError:
            return False
        return (state.st_dev, state.st_ino) == self._identity

    def _at_path(self, path: str) -> socket.socket:
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--uds {printable(path)}: {_reason(error)}") from error
        try:
            if _is_dead(path):
                os.unlink(path)
            listener.bind(path)
            listener.listen(BACKLOG)
            state = os.lstat(path)
        except (OSError, ValueError, TypeError) as error:
            listener.close()
            raise ConfigError(
                f"--uds {printable(path)}: {_reason(error)}; stop who listens there, or choose another"
            ) from error
        self._identity = state.st_dev, state.st_ino
        return listener


def _at_port(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{address}: {_reason(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except (OSError, ValueError, TypeError) as error:  # the latter of a host that is no name
        listener.close()
        text = f"{printable(str(address))}: {_reason(error)}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            text = f"{text}, by {holders.of_port(address.port)}; stop it, or choose another --port"
        raise ConfigError(text) from error
    return listener


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or printable(str(error))


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
