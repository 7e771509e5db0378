"""Where the seconds of one engine start went, up to the model being there."""

import os
import time
from pathlib import Path

STARTED = time.monotonic()
"""When this process first saw the plugin; what lies before it is Python's start and vLLM's imports."""


class Phases:
    """Named stretches of time, one behind the other. Made when vLLM asks for the model."""

    def __init__(self) -> None:
        now = time.monotonic()
        age = process_age()
        setup = min(now - STARTED, age)  # a process forked after the imports is younger than they are
        self.seconds: dict[str, float] = {"python and imports": age - setup, "engine setup": setup}
        self._last = now

    def end(self, name: str) -> None:
        """Give everything since the last end this name."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def milliseconds(self, *names: str) -> float:
        """Sum of the named phases."""
        return sum(self.seconds.get(name, 0.0) for name in names) * 1000

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in self.seconds.items())


def process_age() -> float:
    """Seconds since this process was started, by the kernel's account."""
    # proc_pid_stat(5): field 22 is the start in clock ticks since boot; the command before it may contain blanks
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
