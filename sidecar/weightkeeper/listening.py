"""The keeper's hold on its socket directory: one live keeper in it, dead leftovers taken over, sockets made whole."""

import fcntl
import logging
import os
import socket
import stat
from collections.abc import Collection

from weightkeeper.errors import SocketInUseError, SocketPathError
from weightkeeper.sockets import CONTROL, SUFFIX, fitting, prepare_directory

LOCK = "keeper.lock"
"""Locked for a keeper's life, and never removed: whoever could lock a new file could run beside a live keeper."""

BACKLOG = 256
"""Connections that may wait to be accepted. Further ones wait in their own connect."""

_PROBE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class SocketDirectory:
    """The directory while this process is its keeper.

    Raises:
        SocketPathError: the directory cannot be used.
        SocketInUseError: a live keeper has it.
    """

    def __init__(self, path: str, allowed_uids: Collection[int] = ()):
        self.path = path
        self._mode = 0o666 if allowed_uids else 0o600
        self._bound: dict[str, tuple[int, int]] = {}
        prepare_directory(path, allowed_uids)
        self._lock = _locked(os.path.join(path, LOCK))
        try:
            self._remove_leftovers()
        except BaseException:
            os.close(self._lock)
            raise

    def listen(self, path: str) -> socket.socket:
        """A non-blocking listening socket at `path`, which is inside the directory.

        It is bound under another name and renamed when it listens, so that whoever finds it can connect.
        """
        unborn = fitting(os.path.join(self.path, ".bind"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(unborn):
                os.unlink(unborn)
            listener.setblocking(False)
            listener.bind(unborn)
            os.chmod(unborn, self._mode)
            listener.listen(BACKLOG)
            state = os.lstat(unborn)
            os.rename(unborn, path)
        except OSError as error:
            listener.close()
            raise SocketPathError(f"{path}: cannot listen: {error.strerror}") from error
        self._bound[path] = (state.st_dev, state.st_ino)
        return listener

    def remove(self, path: str) -> None:
        """Take a socket's name away, if it is still the one that was made here."""
        identity = self._bound.pop(path, None)
        try:
            state = os.lstat(path)
            if (state.st_dev, state.st_ino) == identity:
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s: not removed: %s", path, error.strerror)

    def close(self) -> None:
        for path in list(self._bound):
            self.remove(path)
        os.close(self._lock)

    def _remove_leftovers(self) -> None:
        """Remove dead sockets. All are probed before the first is removed."""
        dead = []
        for name in sorted(os.listdir(self.path)):
            path = os.path.join(self.path, name)
            if not name.endswith(SUFFIX):
                continue
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                if name == CONTROL + SUFFIX:
                    raise SocketPathError(f"{path} is in the way and is not a socket; remove it")
                continue
            if _is_live(path):
                raise SocketInUseError(f"{path}: a live process answers there; stop it or choose another --socket-dir")
            dead.append(path)
        for path in dead:
            os.unlink(path)
        if dead:
            names = ", ".join(os.path.basename(path) for path in dead)
            logger.info("took over %s from a keeper that ended without cleaning up: removed %s", self.path, names)


def _locked(path: str) -> int:
    """An open descriptor that holds the lock; the kernel lets go of it when this process ends, however it ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketPathError(f"{path}: {error.strerror}; the directory has to be writable for us") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        directory = os.path.dirname(path)
        raise SocketInUseError(
            f"{directory}: a live keeper (pid {holder}, in its own container perhaps) has it; "
            "stop it or choose another --socket-dir"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise SocketPathError(f"{path}: cannot be locked: {error.strerror}; use a local file system") from error
    return descriptor


def _is_live(path: str) -> bool:
    """Whether anybody listens. A full queue of connections, or no answer in time, counts as life."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError, PermissionError):
            # Another user's socket that we may not even connect to: a live keeper would have the lock.
            return False
        except OSError:
            return True
    return True
