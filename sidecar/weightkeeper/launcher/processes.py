"""Processes as the kernel shows them in /proc, and what it does for their parents."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Collection
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

TRACKER_SECONDS = 3.0
"""For Python's resource trackers, which remove the shared memory that the dead left; they end by themselves."""

_TRACKER = b"multiprocessing.resource_tracker"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat, see proc_pid_stat(5).

    Attributes:
        started: in clock ticks since boot: with the pid, who it is.
        stack: address at which its stack begins. Drawn anew by each exec, so equal means forked without one.
        code: status as waitpid gives it; of a zombie only.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    started: int
    stack: int
    code: int

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def process(pid: int) -> Process | None:
    """One process; None where there is none.

    Raises:
        OSError: there is no room to look, which does not say that there is none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            raw = stream.read(4096)
    except OSError as error:
        if lacks_room(error):
            raise
        return None
    head, _, tail = raw.rpartition(b")")
    name = head.partition(b"(")[2].decode(errors="replace")
    fields = tail.split()  # from field 3 on
    if len(fields) < 50:
        return None
    numbers = [int(fields[number - 3]) for number in (4, 6, 22, 28, 52)]
    return Process(pid, name, fields[0].decode(), *numbers)


def lacks_room(error: OSError) -> bool:
    """Whether we have no descriptor or memory left, so that an answer says nothing of what was asked for."""
    return error.errno in _NO_ROOM


def table() -> dict[int, Process]:
    """All processes that we see. Raises as `process`."""
    found = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {each.pid: each for each in found if each is not None}


def with_descendants(roots: Collection[int], of: dict[int, Process]) -> list[Process]:
    """The processes of these pids and everything below them."""
    children: dict[int, list[int]] = {}
    for each in of.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: dict[int, Process] = {}
    left = [pid for pid in roots if pid in of]
    while left:
        pid = left.pop()
        if pid not in found:
            found[pid] = of[pid]
            left += children.get(pid, ())
    return list(found.values())


def command_line(pid: int) -> bytes:
    """Arguments, with zero bytes between; empty where it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:
        return stream.read(65536)
    return b""


def is_tracker(pid: int) -> bool:
    """Whether it is one of Python's resource trackers, see TRACKER_SECONDS."""
    return _TRACKER in command_line(pid)


def become_subreaper() -> None:
    """Become the parent of what our descendants leave behind."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(number: int) -> None:
    """Have the kernel send us this signal when our parent ends; 0 for none."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
