"""A checkpoint's files on disk. What is not a readable regular file becomes a fault that says what it is instead."""

import errno
import json
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from weightkeeper.errors import CheckpointError, Fault

MAX_JSON_BYTES = 100_000_000
"""A config or an index. The index of a 1,000-billion-parameter model is some 15 MB."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a git-lfs pointer begins: what a clone leaves where the real file was not fetched."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class Stamp(NamedTuple):
    """What `stat` tells of a file, times in ns. Equal stamps, the first one old enough, mean equal content."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def changes(self, now: "Stamp") -> str:
        """What differs in `now`, in words; empty where nothing does."""
        words = []
        if self.inode != now.inode:
            words.append(f"another file is in its place (inode {self.inode} → {now.inode})")
        if self.size != now.size:
            words.append(f"its size went from {self.size} to {now.size} bytes")
        if self.mtime_ns != now.mtime_ns:
            words.append("its modification time changed")
        if self.ctime_ns != now.ctime_ns:
            words.append("its change time changed")
        return ", ".join(words)


def shown(text: str | os.PathLike[str], limit: int = 4096) -> str:
    """A name for messages, cut at `limit`: control, odd and invisible characters as escapes."""
    name = os.fspath(text)
    if len(name) > limit:
        name = name[:limit] + "…"
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def refusal(path: str | os.PathLike[str], code: str, message: str) -> CheckpointError:
    """An error with one fault."""
    return CheckpointError(shown(path), [Fault(shown(path), code, message)])


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, Stamp]]:
    """A descriptor for reading and the stamp of what was opened. Never waits for a FIFO, never opens a device.

    Raises:
        CheckpointError: one fault: missing, dangling link, link loop, not a regular file, unreadable; or a read
            inside the `with` failed.
    """
    try:
        _require_regular(path, os.stat(path))  # before opening: to open a device can already do something
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise explain(path, error) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status)
        yield descriptor, Stamp.of(status)
    except OSError as error:
        raise explain(path, error) from error
    finally:
        os.close(descriptor)


def read_at(descriptor: int, nbytes: int, offset: int = 0) -> bytes:
    """`nbytes` bytes from `offset`, fewer only where the file ends."""
    parts = []
    while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def require_content(path: Path, head: bytes) -> None:
    """Refuse a git-lfs pointer, given a file's first bytes.

    Raises:
        CheckpointError: it is one.
    """
    if head.startswith(LFS_POINTER):
        raise refusal(path, "lfs_pointer", "a git-lfs pointer, not the file itself; run `git lfs pull` in the clone")


def read_json(path: Path, *, once: bool = False, top: tuple[type, ...] = (dict,)) -> Any:
    """The JSON in a file; with `once`, a name that is given twice in one object is refused.

    Raises:
        CheckpointError: the file cannot be read, is over the limit, or is no JSON of a type in `top`.
    """
    with open_regular(path) as (descriptor, stamp):
        if stamp.size > MAX_JSON_BYTES:
            raise refusal(path, "json", f"{stamp.size} bytes, over the limit of {MAX_JSON_BYTES}; is this JSON?")
        raw = read_at(descriptor, stamp.size)
    require_content(path, raw)
    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique if once else None)
    except (ValueError, RecursionError) as error:
        raise refusal(path, "json", f"not readable as JSON: {shown(str(error))}; fetch the file again") from error
    if not isinstance(value, top):
        raise refusal(path, "json", f"expected a JSON object, found a {type(value).__name__}; fetch the file again")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's items as a dict.

    Raises:
        ValueError: a name is given twice. What it means then depends on who reads it.
    """
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name '{shown(twice, 200)}' is given twice in one object")
    return items


def explain(path: Path, error: OSError | ValueError) -> CheckpointError:
    """Why a path cannot be used, as one fault."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOENT, errno.ENOTDIR):
        return _absent(path)
    if code == errno.ELOOP:
        return refusal(path, "link_loop", "a symbolic link that leads back to itself; link it to the real file")
    if code in (errno.EACCES, errno.EPERM):
        return _unreadable(path)
    if isinstance(error, OSError):
        return refusal(path, "unreadable", f"reading failed: {error.strerror or error}; check the disk or the mount")
    return refusal(path, "missing", f"no file can have this name: {error}")


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "no regular file")
    raise refusal(path, "not_a_file", f"{kind} where a file should be; put the real file there")


def _absent(path: Path) -> CheckpointError:
    links = (p for p in (path, *path.parents) if os.path.islink(p) and not os.path.exists(p))
    if (link := next(links, None)) is None:
        return refusal(path, "missing", "no such file or directory; fetch it, or mount the folder that holds it")
    end = Path(os.path.realpath(link))
    return refusal(
        path,
        "dangling_link",
        f"{shown(link)} leads to {shown(end)}, which does not exist here; in a container, mount the host's folder "
        f"with {shown(end.name)} too, under `volumes:`: `- HOST_FOLDER:{shown(end.parent)}:ro`",
    )


def _unreadable(path: Path) -> CheckpointError:
    end = Path(os.path.realpath(path))
    shut = (p for p in reversed(end.parents) if not os.access(p, os.X_OK, effective_ids=True))
    thing = next(shut, end)
    try:
        status = os.stat(thing)
        owner = f"belongs to uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
    except OSError:
        owner = "is hidden by the permissions of its folder"
    return refusal(
        path,
        "unreadable",
        f"{shown(thing)} {owner}, and this is uid {os.geteuid()}, gid {os.getegid()}; "
        f"`chmod a+rX {shlex.quote(shown(thing))}`, or run as its owner",
    )
