"""The launcher's private directory: a directory for each server's temporary files, and what dead launchers left."""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

from weightkeeper.errors import ConfigError
from weightkeeper.sockets import MAX_PATH_BYTES

PREFIX = "weightkeeper-engine-"
LOCK = "lock"
_SOCKET_NAME_BYTES = 40
"""vLLM's processes meet on sockets that are named by a UUID in the temporary directory."""

logger = logging.getLogger(__name__)


class PrivateDirectory:
    """A new directory of our own, locked for as long as we live.

    Raises:
        ConfigError: it cannot be made, or is too deep for vLLM's sockets in it.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _remove_dead(parent)
        try:
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise ConfigError(f"{parent}: {error.strerror}; set TMPDIR to a directory that can be written") from error
        length = len(os.fsencode(self.generation(9999))) + 1 + _SOCKET_NAME_BYTES
        if length > MAX_PATH_BYTES:
            self.close()
            raise ConfigError(
                f"{parent}: {length - MAX_PATH_BYTES} bytes too long for the sockets of vLLM's processes in it; "
                "set TMPDIR to a shorter path"
            )

    def generation(self, number: int) -> Path:
        """Of one server's temporary files. Not made here."""
        return self.path / f"generation-{number}"

    def configuration(self, number: int) -> Path:
        """Of the copy of a config file. Not made here."""
        return self.path / f"config-{number}"

    def remove(self, directory: Path) -> None:
        """Remove a directory inside, as far as that goes."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        self.remove(self.path)
        os.close(self._lock)


def _made(parent: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / LOCK).exists():
            return path, lock
        os.close(lock)  # another launcher found it unlocked, and took it for a dead one's


def _remove_dead(parent: Path) -> None:
    """Remove the directories of our own launchers that ended without clearing up. A live one holds its lock."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            if directory.is_symlink() or directory.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            logger.info("removed %s of a launcher that ended without clearing up", directory)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
