"""One launcher with its server, whose replacements are measured: asked for by SIGHUP, or made by SIGKILL."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from server_run import ServerRun, StartError, free_port

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher import client
from weightkeeper.launcher.messages import EngineStatus

NAME = "bench"
STEP_SECONDS = 0.01

Way = Literal["reload", "crash", "core"]
"""SIGHUP to the launcher; SIGKILL to the server; SIGKILL to a process that the server has started."""


class LaunchedServer(ServerRun):
    """`weightkeeper engine`, for as long as the benchmark runs. `replace` makes the next server; times count from it.

    Args:
        config: vLLM's config file.
        log: file for everything that it prints.
        environment: variables besides our own.
    """

    def __init__(self, config: Path, log: Path, environment: dict[str, str] | None = None):
        self._sockets = tempfile.mkdtemp(prefix="wk")  # a short path: a socket's has at most 107 bytes
        port = free_port()
        command = [sys.executable, "-m", "weightkeeper.cli", "engine", "--name", NAME, "--socket-dir", self._sockets]
        command += ["--", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        super().__init__(config, log, environment, command, port)

    def status(self) -> EngineStatus:
        """What the launcher says.

        Raises:
            StartError: it does not answer.
        """
        try:
            return client.status(self._sockets, NAME)
        except WeightkeeperError as error:
            raise StartError(f"the launcher does not answer: {error}\n{self.tail()}") from error

    def replace(self, way: Way, limit: float) -> None:
        """Have the server replaced; returns when the next one has been forked.

        Raises:
            StartError: it is not, within `limit` seconds.
        """
        old = self.status()
        if old.state != "ready":
            raise StartError(f"the launcher is {old.state}: {old.cause}\n{self.tail()}")
        others = [pid for pid in old.processes if pid != old.pid]
        if way == "core" and not others:
            raise StartError("the server has started no process that could be killed")
        self.lines.clear()
        self.started = time.monotonic()
        if way == "reload":
            os.kill(self.process.pid, signal.SIGHUP)
        else:
            os.kill(old.pid if way == "crash" else others[0], signal.SIGKILL)
        while (now := self.status()).generation == old.generation or not now.pid:
            if now.state in ("broken", "stopped") or now.refusal:
                raise StartError(f"the launcher is {now.state}: {now.cause or now.refusal}\n{self.tail()}")
            if self.seconds() > limit:
                raise StartError(f"no new server after {limit:.0f} s ({now.state}):\n{self.tail()}")
            time.sleep(STEP_SECONDS)

    def launcher_phases(self, limit: float = 10.0) -> dict[str, float]:
        """The launcher's own account of the last start, once it has it."""
        deadline = time.monotonic() + limit
        while (now := self.status()).state != "ready":
            if time.monotonic() > deadline:
                raise StartError(f"the launcher is still {now.state}\n{self.tail()}")
            time.sleep(STEP_SECONDS)
        return {name: round(seconds, 3) for name, seconds in now.phases.items()}

    def kill(self) -> float:
        try:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
                with contextlib.suppress(Exception):
                    self.process.wait(20)
            return super().kill()
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)
