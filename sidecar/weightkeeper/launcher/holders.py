"""Which processes hold a socket, by the links in /proc."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

_LISTENS = "0A"


def of_sockets(inodes: Collection[int]) -> list[int]:
    """Processes of ours, other than this one, that have one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in _processes() if pid != os.getpid() and _holds(pid, wanted)]


def of_port(port: int, but: Collection[int] = ()) -> str:
    """Who listens on a TCP port, in words, on other sockets than those of `but`."""
    inodes = [fields[9] for fields in _connections() if fields[3] == _LISTENS and int(fields[1][-4:], 16) == port]
    pids = of_sockets({int(inode) for inode in inodes} - set(but))
    return ", ".join(f"pid {pid} ({_command(pid)})" for pid in pids) or "another process that cannot be seen from here"


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _holds(pid: int, wanted: Collection[str]) -> bool:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) in wanted:
                    return True
    return False


def _connections() -> list[list[str]]:
    """Lines of /proc/net/tcp as fields: 1 is the local address, 3 the state, 9 the inode."""
    lines: list[list[str]] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines += [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return lines


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended meanwhile"
