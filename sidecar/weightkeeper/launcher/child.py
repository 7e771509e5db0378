"""What a forked child does before it is a server: take its place below the launcher, and look like a fresh process."""

import contextlib
import os
import signal
import tempfile
import time

from weightkeeper.launcher.processes import die_with_parent

_ADOPTION_SECONDS = 10.0
_CANNOT = 70
"""Exit code of a child that cannot take its place: EX_SOFTWARE of sysexits(3)."""


def become(environment: dict[str, str]) -> None:
    """Turn a forked child into a process as the user would have started it, in a session of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python starts
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def await_go(pipe: int) -> None:
    """Wait until the launcher knows of us. It never will where the template ended before it could tell."""
    go = os.read(pipe, 1)
    os.close(pipe)
    if not go:
        os._exit(_CANNOT)


def await_parent(launcher: int) -> None:
    """Wait until the process between is gone and the launcher our parent; then end with the launcher."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os.write(2, b"the launcher did not become this server's parent; it ends\n")
            os._exit(_CANNOT)
        time.sleep(0.0005)
    end_with(launcher)


def end_with(launcher: int) -> None:
    """End when the launcher does, however it ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(_CANNOT)
