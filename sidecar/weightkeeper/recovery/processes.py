"""Processes that the benchmark has started: all that belongs to one, what it uses, and its end."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from weightkeeper.errors import ServerStartError
from weightkeeper.launcher import processes
from weightkeeper.launcher.processes import Process

END_SECONDS = 60.0
"""For everything to be gone after SIGKILL; a process in the GPU driver can take long."""

MARK = "WEIGHTKEEPER_RECOVERY"
"""Variable that all processes of a run have; its value is drawn for each run."""

_CUDA_LIBRARY = re.compile(r"/(lib(?:cuda|cudart|nvidia|torch|nccl)[^/]*)\.so")


def family(leader: int) -> dict[int, Process]:
    """Live processes of the session that `leader` began, and what they started in sessions of their own."""
    table = processes.table()
    roots = [pid for pid, each in table.items() if each.session == leader or pid == leader]
    return {each.pid: each for each in processes.with_descendants(roots, table) if each.is_alive}


def kill_family(leader: int) -> None:
    """SIGKILL to the session that `leader` began and to all that its processes started; returns when they are gone.

    Raises:
        ServerStartError: some of them do not end.
    """
    begun = time.monotonic()
    known: dict[tuple[int, int], Process] = {}
    while True:
        known |= {each.key: each for each in family(leader).values()}
        living = [each for each in known.values() if _lives(each)]
        if not living:
            return
        for each in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        if time.monotonic() - begun > END_SECONDS:
            raise ServerStartError(f"{', '.join(map(str, living))} did not end {END_SECONDS:.0f} s after SIGKILL")
        time.sleep(0.005)


def kill_marked(mark: str) -> None:
    """SIGKILL to every process of ours that was started with `MARK=mark` in its environment, wherever it hangs.

    What was being started when a signal came is in nobody's hand; it is found by this.
    """
    deadline = time.monotonic() + END_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:  # a child shows our environment until it has become its program
        found = marked(mark)
        quiet = 0 if found else quiet + 1
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Live processes other than this one with `MARK=mark` in the environment they were started with."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid, each in processes.table().items():
        if pid != os.getpid() and each.is_alive:
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
    return found


def _lives(known: Process) -> bool:
    now = processes.process(known.pid)
    return now is not None and now.key == known.key and now.is_alive


def resident_bytes(pid: int) -> int:
    """Of one process; 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def own_bytes(pid: int) -> int:
    """The proportional share of one process without shared memory; 0 where it is gone or may not be looked into."""
    found = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_File:")):
                found += int(line.split()[1]) * 1024
    return found


def cuda_libraries(pid: int) -> set[str]:
    """Names of the libraries of CUDA and torch that a process has mapped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        return {match[1] for line in maps if (match := _CUDA_LIBRARY.search(line))}
    return set()
