"""Where the seconds of one engine start went, up to the model being there; with a launcher, up to its first answer."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

CHANNEL = "WEIGHTKEEPER_PHASES"
"""Variable with where a launcher takes marks: the number of an inherited datagram socket, or the path of one."""

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


def mark(process: str, name: str, at: float | None = None) -> None:
    """Tell the launcher, where there is one, that the phase `name` is over.

    It began with the mark before it in time, of any process of the start; so the phases of a start add up. Nothing
    that goes wrong here reaches the caller: a start is worth more than its times.

    Args:
        process: `server`, `engine core`, `worker 0`.
        name: of the phase that ended.
        at: when, in seconds of `time.monotonic`; now by default.
    """
    channel = os.environ.get(CHANNEL)
    if not channel:
        return
    said = {"process": process, "pid": os.getpid(), "name": name, "at": time.monotonic() if at is None else at}
    with contextlib.suppress(OSError, ValueError), _socket(channel) as sending:
        sending.send(json.dumps(said).encode(), socket.MSG_DONTWAIT)


def _socket(channel: str) -> socket.socket:
    if not channel.isdecimal():
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            connected.connect(channel)
        except OSError:
            connected.close()
            raise
        return connected
    inherited = socket.socket(fileno=os.dup(int(channel)))
    if (inherited.family, inherited.type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
        # the number means another file by now: a process that was started anew does not inherit ours
        inherited.close()
        raise ValueError(channel)
    return inherited
