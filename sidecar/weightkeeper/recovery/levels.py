"""Memory over time: looked at by a thread while an engine goes and another one comes."""

import threading
import time
from collections.abc import Callable

from weightkeeper.recovery.result import Level

KEPT = 60
"""Levels of one sample that go into a result; the highest one always does."""


class Levels:
    """Begins to look when it is made, until `end`.

    Args:
        used: bytes in use now.
        every: seconds between two looks.
    """

    def __init__(self, used: Callable[[], int], every: float):
        self._used = used
        self._every = every
        self._found: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self._found.append((time.monotonic(), self._used()))
            if self._over.wait(self._every):
                return

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return max((nbytes for _, nbytes in list(self._found)), default=0)

    def since(self, start: float) -> tuple[Level, ...]:
        """Levels with their seconds from `start`, thinned out."""
        return tuple(Level(round(at - start, 3), nbytes) for at, nbytes in thinned(list(self._found), KEPT))


def thinned(found: list[tuple[float, int]], count: int) -> list[tuple[float, int]]:
    """At most `count` of them: of each stretch of equal length, the highest."""
    if len(found) <= count:
        return found
    first, last = found[0][0], found[-1][0]
    width = (last - first) / (count - 1) or 1.0
    highest: dict[int, tuple[float, int]] = {}
    for at, nbytes in found:
        place = int((at - first) / width)
        if place not in highest or nbytes > highest[place][1]:
            highest[place] = (at, nbytes)
    return list(highest.values())
