"""What was done to engines and what became of it: JSON lines in the state directory, which outlive the supervisor."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from weightkeeper.errors import ConfigError

STATE_DIR = Path("/var/lib/weightkeeper")
"""Where the images put the state volume."""

NAME = "history.jsonl"

MAX_BYTES = 1024 * 1024
"""Some 4,000 records; then the older half goes."""


class Record(msgspec.Struct, frozen=True):
    """One thing that happened to one engine.

    Attributes:
        time: of its end, ISO 8601 in UTC.
        action: `reload`, `restart`, `recreate`, `load`, `start`, `rollback`; `check`, of what was refused before
            weights were loaded for a reload; or, not by us, `crash` and `start`.
        cause: why, in words.
        result: `healthy`, `running`, `unhealthy`, `exited`, `starting`, `gone`,
            `failed`, `skipped`, `refused`, `done`, `undecided`.
        detail: more about the result, for people.
        from_: option or field → its value before, of what was changed; in the file it is called `from`.
        to: likewise, after.
        phases: name → seconds, where they went.
        seconds: from beginning to result.
        before: id of the container before.
        after: id of the container after.
    """

    time: str
    service: str
    action: str
    cause: str
    result: str
    seconds: float
    before: str = ""
    after: str = ""
    detail: str = ""
    from_: dict[str, str] = msgspec.field(default_factory=dict, name="from")
    to: dict[str, str] = msgspec.field(default_factory=dict)
    phases: dict[str, float] = msgspec.field(default_factory=dict)


def now() -> str:
    """This moment as `Record.time` has it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class History:
    """The file in one state directory. Several processes may append to it."""

    def __init__(
        self, directory: Path, max_bytes: int = MAX_BYTES, observe: Callable[[Record], None] = lambda _: None
    ) -> None:
        """`observe` is called with each record that is added here, whether or not it could be written."""
        self._path = directory / NAME
        self._max_bytes = max_bytes
        self._observe = observe

    def check(self) -> None:
        """Refuse a directory in which nothing can be kept.

        Raises:
            ConfigError: it cannot be made or written; the message has owner, our uid and the remedy.
        """
        directory = self._path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; {_remedy(directory)}") from error

    def append(self, record: Record) -> None:
        """Add a record; it is on the disk when this returns.

        Raises:
            OSError: the disk is full, or the directory cannot be written any more.
        """
        self._observe(record)
        line = msgspec.json.encode(record) + b"\n"
        with self._locked():
            kept = self._kept(len(line))
            if kept is not None:
                self._replace(kept + line)
                return
            with self._path.open("ab+") as stream:
                if stream.tell() and not self._ends_whole():
                    line = b"\n" + line  # a writer died in the middle of its line
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())

    def read(self) -> list[Record]:
        """All records, oldest first; lines that are none are left out.

        Raises:
            ConfigError: the file is there and cannot be read.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; {_remedy(self._path.parent)}") from error
        return list(_records(raw))

    def _kept(self, more: int) -> bytes | None:
        """The newer half of the lines where `more` bytes would go over the limit, else None."""
        try:
            if self._path.stat().st_size + more <= self._max_bytes:
                return None
        except FileNotFoundError:
            return None
        newer = self._path.read_bytes()[-(self._max_bytes // 2) :]
        return newer[newer.find(b"\n") + 1 :]

    def _replace(self, content: bytes) -> None:
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._path)

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) == b"\n"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A file of its own: the history itself is replaced when it is cut.
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _records(raw: bytes) -> Iterator[Record]:
    for line in raw.splitlines():
        try:
            yield msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError:
            continue


def _remedy(directory: Path) -> str:
    try:
        owner = f"the directory belongs to uid {directory.stat().st_uid}, we are {os.geteuid()}"
    except OSError:
        owner = f"we are uid {os.geteuid()}"
    return f"{owner}; chown it, or give another with --state-dir"
