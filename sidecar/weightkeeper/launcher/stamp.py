"""A number that a process hands on to all that it starts, by which they are found whatever they do to be on their own.

It is the soft limit of RLIMIT_LOCKS, which no Linux since 2.4.25 enforces, see setrlimit(2). The kernel hands it on at
each fork and keeps it at each exec: another parent, session, name or environment changes nothing.
"""

import os
import resource
import secrets

from weightkeeper.launcher.processes import Process, lacks_room, table

SERVERS = 1 << 20
"""Numbers of one launcher: the first is its own and its template's, each server has one of the others."""

_RLIMIT_LOCKS = 10  # Python's resource module leaves it out
_LINE = b"Max file locks"
_BASE = 1 << 62


def new() -> int:
    """The first of SERVERS numbers that nobody else on this machine has."""
    return _BASE + secrets.randbits(40) * SERVERS


def of_server(first: int, generation: int) -> int:
    """The number of one server of the launcher that has `first`."""
    return first + 1 + generation % (SERVERS - 1)


def put(pid: int, number: int) -> None:
    """Give a process its number.

    Raises:
        OSError: it has ended, or the hard limit is lower than any number of ours.
    """
    try:
        _, hard = resource.prlimit(pid, _RLIMIT_LOCKS)
        resource.prlimit(pid, _RLIMIT_LOCKS, (number, hard))
    except ValueError as error:  # over the hard limit
        raise OSError(f"the hard limit of file locks is {hard}") from error


def of(pid: int) -> int | None:
    """The number of a process; None where it has none.

    Raises:
        OSError: there is no room to look.
    """
    try:
        with open(f"/proc/{pid}/limits", "rb") as stream:
            lines = stream.read(8192).splitlines()
    except OSError as error:
        if lacks_room(error):
            raise
        return None
    found = next((line for line in lines if line.startswith(_LINE)), _LINE).removeprefix(_LINE).split()
    return int(found[0]) if found and found[0].isdigit() else None


def bearers(first: int) -> list[Process]:
    """What lives and has a number of this launcher; not ourselves."""
    others = (each for each in table().values() if each.is_alive and each.pid != os.getpid())
    return [each for each in others if is_borne(each.pid, first)]


def is_borne(pid: int, first: int) -> bool:
    """Whether a process has a number of this launcher. Raises as `of`."""
    return first <= (of(pid) or 0) < first + SERVERS
