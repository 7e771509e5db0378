"""The process that ends what a killed launcher leaves, as the launcher sees it: started, replaced, dismissed."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

import anyio

from weightkeeper.launcher import stamp, sweeping
from weightkeeper.launcher.reaping import Reaper, Watched

RETRY_SECONDS = 1.0

SWEEP_SECONDS = 5.0
"""For the launcher itself at its end; what still lives then is left to the process."""

_MODULE = (sys.executable, "-m", "weightkeeper.launcher.sweeping")

logger = logging.getLogger(__name__)


class Warden:
    """Keeps a process of `sweeping`. Where the launcher is process 1 the kernel does the same, and there is none.

    Attributes:
        number: the first of this launcher's, see `stamp`.
        pid: of the process; 0 while there is none.
    """

    def __init__(self, reaper: Reaper):
        self.number = stamp.new()
        self.pid = 0
        self._reaper = reaper
        self._process: Watched | None = None
        self._input = -1
        self._is_wanted = False

    def start(self) -> None:
        """From now on all that this process starts goes with it."""
        try:
            stamp.put(os.getpid(), self.number)
            if stamp.of(os.getpid()) != self.number:
                raise OSError("/proc does not show it")
        except OSError as error:
            logger.warning(
                "no number can be given to the server's processes: %s; what leaves its session may outlive it, and all "
                "of them a launcher that is killed",
                error.strerror or error,
            )
            return
        self._is_wanted = os.getpid() != 1
        if self._is_wanted:
            self._renew()

    async def keep(self) -> None:
        """Replace the process where it ends, for ever."""
        while self._is_wanted:
            if self._process is not None:
                await self._process.ended.wait()
                logger.warning("the warden ended by itself, %s; starting a new one", self._process.exit)
                self.pid = 0
            await anyio.sleep(RETRY_SECONDS)
            self._renew()

    def close(self) -> None:
        """End all that was started and is still there, the process itself last, which else goes on with it."""
        try:
            left = sweeping.sweep(self.number, SWEEP_SECONDS, spared=self.pid).left
            if self.pid and not left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                sweeping.sweep(self.number, SWEEP_SECONDS)
        except OSError as error:
            logger.error("what is left of the server cannot be looked for: %s", error.strerror)
        if self._input >= 0:
            os.close(self._input)

    def _renew(self) -> None:
        try:
            reading, writing = os.pipe()
        except OSError as error:
            return self._failed(error)
        since = time.monotonic()
        try:
            process = subprocess.Popen([*_MODULE, str(self.number)], stdin=reading, start_new_session=True)
        except OSError as error:
            os.close(writing)
            return self._failed(error)
        finally:
            os.close(reading)
        process.returncode = 0  # the reaper waits for it; Popen is not to
        if self._input >= 0:
            os.close(self._input)
        self.pid, self._input = process.pid, writing
        self._process = self._reaper.watch(process.pid, since)

    def _failed(self, error: OSError) -> None:
        logger.warning("no warden, the next try is in %g s: %s", RETRY_SECONDS, error.strerror)
        self._process = None
