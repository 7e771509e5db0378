"""Sockets that listen: at a port, which another socket of ours may have for another host, and at a path."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Collection, Iterator

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import holders
from weightkeeper.launcher.address import Address, reason
from weightkeeper.quantities import printable

BACKLOG = 2048
"""Clients that may wait; the kernel lowers it to net.core.somaxconn. Further ones wait in their own connect."""

_PROBE_SECONDS = 1.0


def at_port(address: Address, others: Collection[socket.socket] = ()) -> socket.socket:
    """A socket that listens on TCP.

    The kernel lets two sockets share a port where both say so with SO_REUSEPORT, and gives a connection to the one
    with the narrower address. Ours say so only while the new one is bound, so that nobody else shares it.

    Args:
        others: of ours that have the port.

    Raises:
        ConfigError: the address cannot be had; with who has it, where that can be seen.
    """
    try:
        try:
            return _bound(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not others:
                raise
        with _shared(others):
            return _bound(address, is_shared=True)
    except (OSError, ValueError, TypeError) as error:  # the latter of a host that is no name
        text = f"{printable(str(address))}: {reason(error)}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            who = holders.of_port(address.port, {inode(each) for each in others})
            text = f"{text}, by {who}; stop it, or choose another --port"
        raise ConfigError(text) from error


def at_path(path: str) -> socket.socket:
    """A socket that listens at a path; a dead socket there is taken over.

    Raises:
        ConfigError: the path cannot be had.
    """
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--uds {printable(path)}: {reason(error)}") from error
    try:
        if _is_dead(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except (OSError, ValueError, TypeError) as error:
        listener.close()
        text = f"--uds {printable(path)}: {reason(error)}; stop who listens there, or choose another"
        raise ConfigError(text) from error
    return listener


def file(path: str) -> tuple[int, int]:
    """Which file lies there: device and inode; zeros where there is none."""
    try:
        state = os.lstat(path)
    except (OSError, ValueError):
        return 0, 0
    return state.st_dev, state.st_ino


def inode(listener: socket.socket) -> int:
    """The number of a socket, by which /proc shows who holds it."""
    return os.fstat(listener.fileno()).st_ino


def _bound(address: Address, is_shared: bool = False) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _shared([listener] if is_shared else []):
            listener.bind((address.host, address.port))
            listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _shared(sockets: Collection[socket.socket]) -> Iterator[None]:
    try:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield
    finally:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


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
