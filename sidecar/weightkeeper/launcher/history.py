"""Starts and ends of one engine's servers as JSON lines, `engine-NAME.jsonl` in the state directory."""

import contextlib
import errno
import logging
import os
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from weightkeeper.errors import ConfigError

MAX_BYTES = 1024 * 1024
"""Some 3,000 records; then the older half goes."""

_MODE = 0o600
"""Causes may quote what a server said."""

logger = logging.getLogger(__name__)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened.

    Attributes:
        time: ISO 8601 in UTC.
        event: `ready`, `ended`, `refused` or `broken`.
        cause: of the start, of the end, or of the refusal.
        phases: name → seconds, of `ready`; they add up to `seconds`.
    """

    time: str
    event: str
    generation: int
    pid: int
    cause: str
    code: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    phases: dict[str, float] = {}


class EngineHistory:
    """The file, or nothing where there is no state directory. This launcher alone writes it.

    Raises:
        ConfigError: the directory cannot be made or written.
    """

    def __init__(self, state_dir: Path | None, name: str):
        self._path = state_dir / f"engine-{name}.jsonl" if state_dir is not None else None
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", opener=_private) as stream, contextlib.suppress(PermissionError):
                os.fchmod(stream.fileno(), _MODE)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; give another with --state-dir") from error

    def append(self, event: str, generation: int, pid: int, cause: str, **more: object) -> None:
        """Add a record, whole or not at all. A full disk is said and stops nothing."""
        if self._path is None:
            return
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        cause = cause.encode(errors="replace").decode()  # the name of a file need not be text
        line = msgspec.json.encode(Record(time, event, generation, pid, cause, **more)) + b"\n"  # type: ignore[arg-type]
        try:
            self._shorten(len(line))
            self._write(line)
        except OSError as error:
            logger.warning("history: %s: %s; this is not in it: %s", self._path, error.strerror, line.decode().strip())

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # the one before was cut short, by a power failure, say
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def _shorten(self, more: int) -> None:
        if self._path is None or self._path.stat().st_size + more <= MAX_BYTES:
            return
        newer = self._path.read_bytes()[-(MAX_BYTES // 2) :]
        temporary = self._path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        try:
            with open(temporary, "xb", opener=_private) as stream:
                stream.write(newer[newer.find(b"\n") + 1 :])
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)  # it has taken the last room
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)  # a FIFO would wait for a reader
