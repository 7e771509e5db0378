"""The end of all that a launcher has started.

    python -m weightkeeper.launcher.sweeping NUMBER

A process of this outlives the launcher, however that ends: it waits for the end of its standard input, which only the
launcher holds open, and then ends whatever has one of the launcher's numbers, see `stamp`.
"""

import contextlib
import errno
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass

from weightkeeper.launcher import processes, stamp
from weightkeeper.launcher.processes import Process

END_SECONDS = 60.0
"""After which what cannot be killed is left behind; a process in the GPU driver can take long."""

_NO_PIDFD = (errno.ENOSYS, errno.EPERM)
"""Linux before 5.3, and a seccomp filter that does not know of it; the kernel itself forbids pidfd_open to nobody."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swept:
    """Names of the processes that were killed, and of those that live all the same."""

    killed: list[str]
    left: list[str]


def sweep(first: int, seconds: float = END_SECONDS, spared: int = 0) -> Swept:
    """Kill what has a number of this launcher until nothing does.

    Args:
        seconds: after which what still lives is left, and named in the log.
        spared: pid of one that is left alone.

    Raises:
        OSError: there is no room to look.
    """
    killed: dict[str, None] = {}
    left: list[str] = []
    began = time.monotonic()
    quiet = 0
    while quiet < 2:  # twice, since one may be forked while the table is being read
        found = [each for each in stamp.bearers(first) if each.pid != spared]
        quiet, passed = 0 if found else quiet + 1, time.monotonic() - began
        for each in found:
            if passed < processes.TRACKER_SECONDS and processes.is_tracker(each.pid):
                continue
            if _kill(each, first):
                killed[str(each)] = None
        if found and passed > seconds:
            left = [str(each) for each in found]
            logger.error("left behind after %g s: %s", seconds, ", ".join(left))
            break
        if found:
            time.sleep(0.005 if passed < 0.5 else 0.05)  # what we may not kill is there to the end
    return Swept(list(killed), left)


def _kill(process: Process, first: int) -> bool:
    """Kill it, where it is the one that was seen: its pid can be another's by now. Raises as `stamp.of`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            if processes.lacks_room(error):
                raise
            if error.errno not in _NO_PIDFD:
                return False  # it has ended, and its pid is a thread's at most
            if not _is_same(process, first):
                return False
            os.kill(process.pid, signal.SIGKILL)  # by number, since nothing better is implemented here
            return True
        try:
            if _is_same(process, first):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


def _is_same(process: Process, first: int) -> bool:
    now = processes.process(process.pid)
    return now is not None and now.key == process.key and stamp.is_borne(process.pid, first)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, whose end is waited for
    while os.read(sys.stdin.fileno(), 4096):
        pass
    if killed := sweep(int(sys.argv[1])).killed:
        logger.warning("the launcher was killed, and so was what it has left: %s", ", ".join(killed))


if __name__ == "__main__":
    main()
