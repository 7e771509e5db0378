"""The one way in which a supervisor is told to end."""

import signal
import time

STEP_SECONDS = 0.05


class Stop:
    """A flag that a signal handler may set.

    threading.Event is not used here: its `set` takes a lock, and a handler that runs in the thread that holds this
    lock would wait for ever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Sleep until `seconds` are over or the flag is set; whether it is."""
        end = time.monotonic() + seconds
        while not self._is_set and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, STEP_SECONDS))
        return self._is_set

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT set the flag."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
