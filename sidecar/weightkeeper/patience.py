"""How long to go on asking a keeper that is still loading."""

import math
import time
from collections.abc import Callable

from weightkeeper.errors import WeightkeeperError

POLL_SECONDS = 0.2
"""Between two looks at a keeper that is still loading."""

SAY_SECONDS = 5.0
"""Between two lines about waiting."""


class Patience:
    """Time to wait that is used up bit by bit, with a line now and then.

    Args:
        seconds: in all.
        say: called with a line, at once and then every SAY_SECONDS; None where nobody is told.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None):
        self._deadline = time.monotonic() + seconds
        self._is_short = False
        self._say = say or (lambda _: None)
        self._said_at = -math.inf

    def shorten(self, seconds: float) -> None:
        """From the first call on, at most so long."""
        if not self._is_short:
            self._is_short = True
            self._deadline = min(self._deadline, time.monotonic() + seconds)

    def use(self, text: str, error: WeightkeeperError) -> None:
        """Sleep a moment, or raise `error` when the time is over."""
        now = time.monotonic()
        if now >= self._deadline:
            raise error
        if now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            self._say(f"{text} ({self._deadline - now:.0f} s left)")
        time.sleep(min(POLL_SECONDS, self._deadline - now))
