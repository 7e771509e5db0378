"""What lies at a watched path, read with limits: whatever it is, a read ends at once and stays small."""

import errno
import hashlib
import os
import stat
from pathlib import Path

from weightkeeper.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Compose, environment and config files are some kilobytes; more than this is a mistake in a path."""

MAX_LINKS = 40
"""The kernel's own limit for one path."""


def read(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        ConfigError: nothing is there, it is no regular file, it cannot be read, or it is over MAX_FILE_BYTES.
    """
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {_reason(error, path)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: no regular file; put a file there")
    with os.fdopen(descriptor, "rb") as stream:
        try:
            raw = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path}: {_reason(error, path)}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: over {MAX_FILE_BYTES} bytes; is this the right file?")
    return raw


def digest(path: Path) -> str:
    """Equal for two moments exactly when the content is, or the reason why the file cannot be read."""
    try:
        return hashlib.sha256(read(path)).hexdigest()
    except ConfigError as error:
        return str(error)


def directories(path: Path) -> frozenset[Path]:
    """Every existing directory in which a change of names can give `path` other content.

    That is the directory of the path, of each symbolic link on the way to the file, and of the file itself. Where
    a directory does not exist, the nearest one above it stands in.
    """
    found: set[Path] = set()
    pending = list(path.parts[1:])
    here = Path("/")
    links = 0
    while pending:
        part = pending.pop(0)
        if part == "..":
            here = here.parent
            continue
        step = here / part
        if not pending:
            found.add(here)
        if step.is_symlink() and links < MAX_LINKS:
            links += 1
            found.add(here)
            target = Path(os.readlink(step))
            here, parts = (Path("/"), target.parts[1:]) if target.is_absolute() else (here, target.parts)
            pending = [*parts, *pending]
        else:
            here = step
    return frozenset(_existing(directory) for directory in found)


def _existing(directory: Path) -> Path:
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return directory


def _reason(error: OSError, path: Path) -> str:
    if error.errno == errno.ENOENT:
        where = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        return f"no such file{where}; put it back or correct the path"
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            status = path.stat()
            owned = f"mode {stat.S_IMODE(status.st_mode):04o} of uid {status.st_uid}"
        except OSError:
            owned = "a directory above it is closed"
        return f"not readable for uid {os.geteuid()} ({owned}); chmod it"
    return error.strerror or str(error)
