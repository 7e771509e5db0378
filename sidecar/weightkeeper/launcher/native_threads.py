"""Threads that libraries started in this process: their names, and which library each of them waits in.

A library seldom names its threads; the return addresses on a thread's stack tell whose code it is in.
"""

import bisect
import contextlib
import os
import re
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STACK_BYTES = 16384
"""That are looked at, from the stack pointer on. A thread that waits is a few frames deep."""

LOOKS, LOOK_SECONDS = 20, 0.005
"""How often, and how long after each other, a thread is looked at that runs: only one that waits shows its stack."""

_EVERYBODYS = re.compile(r"(libc|libc-[\d.]+|ld|ld-linux.*|libpthread|libpthread-[\d.]+|libstdc\+\+|libm)\.so\b")
"""Everybody waits in these; they say nothing."""


@dataclass(frozen=True, slots=True)
class NativeThread:
    """One thread besides the first.

    Attributes:
        name: the kernel's, at most 15 characters; mostly that of the process.
        library: name of the file whose code it waits in, without its directory; "" where that cannot be seen.
    """

    name: str
    library: str

    def __str__(self) -> str:
        return f"{self.name} in {self.library}" if self.library else self.name


@dataclass(frozen=True, slots=True)
class _Mapping:
    begin: int
    end: int
    library: str
    """Where its code may be executed; "" otherwise."""


def native_threads() -> list[NativeThread]:
    """All of this process that neither are its first nor Python's own, oldest first."""
    python = {thread.native_id for thread in threading.enumerate()}
    mappings = _mappings()
    found = []
    for task in sorted(map(int, os.listdir("/proc/self/task"))):
        if task != os.getpid() and task not in python:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
                found.append(NativeThread(name, _library(task, mappings)))
    return found


def _library(task: int, mappings: list[_Mapping]) -> str:
    """The library with most addresses on the thread's stack. One address alone may be left from before."""
    try:
        pointer = _stack_pointer(task)
        stack = _at(pointer, mappings)
        if stack is None:
            return ""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(pointer)
            data = memory.read(min(STACK_BYTES, stack.end - pointer) // 8 * 8)
    except OSError:  # a kernel without these files (gVisor has none), or one that lets nobody read them
        return ""
    count: Counter[str] = Counter()
    for (address,) in struct.iter_unpack("<Q", data):
        mapping = _at(address, mappings)
        if mapping and mapping.library and not _EVERYBODYS.match(mapping.library):
            count[mapping.library] += 1
    return max(count, key=count.__getitem__, default="")


def _stack_pointer(task: int) -> int:
    """Of a thread that waits in the kernel; 0 of one that keeps running."""
    for _ in range(LOOKS):
        words = Path(f"/proc/self/task/{task}/syscall").read_text().split()
        if len(words) > 2:
            return int(words[-2], 16)
        time.sleep(LOOK_SECONDS)
    return 0


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in span.split("-"))
        is_code = "x" in rights and path and path[0].startswith("/")
        found.append(_Mapping(begin, end, os.path.basename(path[0]) if is_code else ""))
    return found


def _at(address: int, mappings: list[_Mapping]) -> _Mapping | None:
    position = bisect.bisect_right(mappings, address, key=lambda one: one.begin) - 1
    return mappings[position] if position >= 0 and address < mappings[position].end else None
