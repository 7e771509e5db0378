"""A file server as its clients see it: a read-only mount of a directory that shows each change and sends no event.

    python3 silent_mount.py SOURCE TARGET

Mounts at TARGET, prints `mounted`, and serves until SIGTERM. Exit code 1, with the reason, where this machine cannot
mount it. It is the protocol of Linux's fuse.h, as virtiofs and the mounts of desktop machines speak it: what is written
beside the mount reaches it only when somebody looks. Overlayfs would not do: it goes on showing a file that was renamed
over in its lower directory.
"""

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 30.0
"""For the server to end."""

ROOT = 1

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
INIT = struct.Struct("<IIIIHHIIHHI28x")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY = struct.Struct("<QQQQII")
ATTRIBUTES_OUT = struct.Struct("<QII")
OPENED = struct.Struct("<QII")
READ = struct.Struct("<QQI")
NAME = struct.Struct("<QQII")
STATISTICS = struct.Struct("<QQQQQIIII24x")

DIRECT_IO = 1
"""Reads always reach us: nothing is cached in between."""

MAX_REQUEST = 1 << 20
WRITE = 1 << 17
SECOND_NS = 1_000_000_000

LIBC = ctypes.CDLL(None, use_errno=True)
READ_ONLY, NO_SET_UID, NO_DEVICES, DETACH = 1, 2, 4, 2


class CannotMountError(Exception):
    """This machine cannot mount it; the message says why."""


@contextmanager
def mounted(source: Path, target: Path) -> Iterator[Path]:
    """`source`, seen at `target`, which is made; served by a process of its own.

    Raises:
        CannotMountError: not on this machine.
    """
    target.mkdir(exist_ok=True)
    command = [sys.executable, __file__, source, target]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if server.stdout.readline() != "mounted\n":
            raise CannotMountError(server.communicate(timeout=SECONDS)[1].strip())
        yield target
    finally:
        server.terminate()
        server.communicate(timeout=SECONDS)


def attributes(status: os.stat_result, node: int) -> bytes:
    moments = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return ATTRIBUTES.pack(
        node, status.st_size, status.st_blocks, *(moment // SECOND_NS for moment in moments),
        *(moment % SECOND_NS for moment in moments), status.st_mode, status.st_nlink, status.st_uid, status.st_gid,
        0, 4096, 0,
    )  # fmt: skip


class Mirror:
    """Answers the kernel's requests about what lies below a directory. A node is the file's inode number."""

    def __init__(self, source: Path) -> None:
        self._paths = {ROOT: source}
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._attributes, 5: self._link, 14: self._open, 15: self._read, 17: self._statistics,
            18: self._release, 25: lambda *_: b"", 26: self._init, 27: self._open_directory, 28: self._names,
            29: lambda *_: b"",
        }  # fmt: skip

    def answer(self, request: bytes) -> bytes | None:
        """What the kernel gets; None for what takes no answer: forget, interrupt, batch forget."""
        _, what, unique, node, *_ = IN_HEADER.unpack_from(request)
        if what in (2, 36, 42):
            return None
        known = self._answers.get(what)
        try:
            error, body = (0, known(node, request[IN_HEADER.size :])) if known else (errno.ENOSYS, b"")
        except OSError as failed:
            error, body = failed.errno or errno.EIO, b""
        return OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body

    def _init(self, _: int, body: bytes) -> bytes:
        return INIT.pack(7, 31, struct.unpack_from("<I", body, 8)[0], 0, 16, 12, WRITE, 1, 0, 0, 0)

    def _lookup(self, node: int, body: bytes) -> bytes:
        path = self._paths[node] / os.fsdecode(body.rstrip(b"\0"))
        status = path.lstat()
        self._paths[status.st_ino] = path
        return ENTRY.pack(status.st_ino, 0, 0, 0, 0, 0) + attributes(status, status.st_ino)

    def _attributes(self, node: int, _: bytes) -> bytes:
        return ATTRIBUTES_OUT.pack(0, 0, 0) + attributes(self._paths[node].lstat(), node)

    def _link(self, node: int, _: bytes) -> bytes:
        return os.fsencode(os.readlink(self._paths[node]))

    def _open(self, node: int, _: bytes) -> bytes:
        return OPENED.pack(os.open(self._paths[node], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), DIRECT_IO, 0)

    def _read(self, _: int, body: bytes) -> bytes:
        handle, offset, size = READ.unpack_from(body)
        return os.pread(handle, size, offset)

    def _release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _open_directory(self, node: int, _: bytes) -> bytes:
        self._paths[node].stat()
        return OPENED.pack(0, 0, 0)

    def _names(self, node: int, body: bytes) -> bytes:
        _, offset, size = READ.unpack_from(body)
        found = b""
        with os.scandir(self._paths[node]) as entries:
            named = sorted((entry.name, entry.inode(), entry.stat(follow_symlinks=False).st_mode) for entry in entries)
        for number, (name, inode, mode) in enumerate(named[offset:], offset + 1):
            raw = os.fsencode(name)
            one = NAME.pack(inode, number, len(raw), stat.S_IFMT(mode) >> 12) + raw
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found

    def _statistics(self, *_: object) -> bytes:
        return STATISTICS.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0)


def mount(target: Path) -> int:
    """Mount at `target`; the descriptor on which the kernel asks.

    Raises:
        OSError: no such device, or we may not.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions"
    flags = READ_ONLY | NO_SET_UID | NO_DEVICES
    if LIBC.mount(b"silent", os.fsencode(target), b"fuse.silent", ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}")
    return device


def main(source: Path, target: Path) -> None:
    try:
        device = mount(target)
    except OSError as error:
        sys.exit(f"no FUSE mount on this machine: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("mounted", flush=True)
    mirror = Mirror(source)
    try:
        while True:
            answer = mirror.answer(os.read(device, MAX_REQUEST))
            if answer is not None:
                with suppress(FileNotFoundError):  # who asked was interrupted, and waits no longer
                    os.write(device, answer)
    except OSError as error:
        if error.errno != errno.ENODEV:  # else somebody unmounted it
            raise
    finally:
        LIBC.umount2(os.fsencode(target), DETACH)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
