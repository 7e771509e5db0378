"""Where the seconds of one start went: marks of many processes → phases that add up."""

import contextlib
import socket
import time
from collections.abc import Callable

import anyio
import msgspec

from weightkeeper.quantities import printable

MAX_MARK_BYTES = 4096
MAX_MARKS = 1000
"""In one start. A start makes some twenty for each process."""


class Mark(msgspec.Struct, frozen=True):
    """A phase is over.

    Attributes:
        at: by time.monotonic(), which all processes of a host share.
    """

    process: str
    pid: int
    name: str
    at: float


_decoder = msgspec.json.Decoder(Mark)


class Timeline:
    """The marks of one start. Each gives the time since the one before it, whoever made that, to its own name.

    Attributes:
        begun: by time.monotonic().
    """

    def __init__(self, begun: float):
        self.begun = begun
        self._marks: list[tuple[float, str]] = []

    def add(self, name: str, at: float | None = None) -> None:
        """A phase of this name ended at this moment, or now."""
        if len(self._marks) < MAX_MARKS:
            now = time.monotonic()
            self._marks.append((now if at is None else min(max(at, self.begun), now), printable(name, 64)))

    @property
    def phases(self) -> dict[str, float]:
        """Name → seconds, in the order in which they first ended."""
        found: dict[str, float] = {}
        before = self.begun
        for at, name in sorted(self._marks, key=lambda mark: mark[0]):
            found[name] = found.get(name, 0.0) + at - before
            before = at
        return found

    @property
    def seconds(self) -> float:
        """From the beginning to the last mark."""
        return max((at for at, _ in self._marks), default=self.begun) - self.begun


def text(phases: dict[str, float]) -> str:
    """`stop 0.02 s, fork 0.01 s`; what is under a millisecond is left out."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items() if seconds >= 0.001)


async def collect(receiver: socket.socket, take: Callable[[Mark], None]) -> None:
    """Hand on the marks that arrive, for ever."""
    while True:
        await anyio.wait_readable(receiver)
        drain(receiver, take)


def drain(receiver: socket.socket, take: Callable[[Mark], None]) -> None:
    """Hand on the marks that have arrived. What is none is left out."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data = receiver.recv(MAX_MARK_BYTES)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                take(_decoder.decode(data))
