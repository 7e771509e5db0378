"""How children of ours ended. All are reaped, so that no zombie stays; the ends of those that are watched are kept."""

import os
import signal
import time
from dataclasses import dataclass

import anyio

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; one of both is there."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, status: int) -> "Exit":
        """From a status as waitpid gives it."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(code=os.WEXITSTATUS(status))

    @property
    def status(self) -> int:
        """As a shell shows it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


class Watched:
    """A child of ours that somebody waits for.

    Attributes:
        ended: set when it has been reaped; `exit` is there then.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.ended = anyio.Event()
        self.exit: Exit | None = None


class Reaper:
    """Reaps every child, so that no zombie stays, and keeps the exits of those that are watched."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._strangers: dict[int, tuple[float, Exit]] = {}

    def watch(self, pid: int, since: float) -> Watched:
        """Wait for a child, which may have ended already.

        Args:
            since: by time.monotonic(), before it was made: what ended earlier under this number is another.
        """
        watched = Watched(pid)
        at, ended = self._strangers.pop(pid, (0.0, None))
        if ended is not None and at >= since:
            self._settle(watched, ended)
        else:
            self._watched[pid] = watched
        return watched

    def ended(self, pid: int, since: float) -> Exit | None:
        """How an orphan ended that lived at `since`, by time.monotonic(); None where that is not known."""
        at, ended = self._strangers.get(pid, (0.0, None))
        return ended if at >= since else None

    def reap(self) -> None:
        """Take in all that have ended. To be called at SIGCHLD."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if info is None:
                return
            is_exit = info.si_code == os.CLD_EXITED
            ended = Exit(code=info.si_status) if is_exit else Exit(signal=info.si_status)
            if (watched := self._watched.pop(info.si_pid, None)) is not None:
                self._settle(watched, ended)
            else:  # forked by the template and not yet known to us, or an orphan
                self._strangers[info.si_pid] = time.monotonic(), ended
                while len(self._strangers) > _REMEMBERED:
                    del self._strangers[next(iter(self._strangers))]

    @staticmethod
    def _settle(watched: Watched, ended: Exit) -> None:
        watched.exit = ended
        watched.ended.set()
