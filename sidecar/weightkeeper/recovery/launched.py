"""An engine behind `weightkeeper engine`, which starts servers anew by itself."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from weightkeeper.errors import ServerStartError, WeightkeeperError
from weightkeeper.launcher import client
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.recovery.engine import LONGER, Engine

NAME = "recovery"
LOOK_SECONDS = 0.005
HEALTHY_SECONDS = 1.0
"""After which a server counts as good, so that one which is killed then is replaced with no delay."""

GONE_SECONDS = 120.0
"""For the old server to be gone after whatever happened to it, with its grace."""


class Launched(Engine):
    """A launcher in a session of its own.

    Args:
        directory: for its control socket and what it leaves behind when it is killed; its path has to be short.
        config: vLLM's config file.
        port: on which its server will answer.
        log: file for everything that both print.
        application: module in place of vLLM's server.
    """

    def __init__(self, directory: Path, config: Path, port: int, log: Path, application: str = ""):
        self._sockets = str(directory / "l")
        command = [sys.executable, "-m", "weightkeeper.cli", "engine", "--name", NAME, "--socket-dir", self._sockets]
        command += ["--healthy-seconds", str(HEALTHY_SECONDS)]
        command += ["--application", application] if application else []
        command += ["--", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        super().__init__(command, port, log, {"TMPDIR": str(directory)})

    def status(self) -> EngineStatus:
        return client.status(self._sockets, NAME)

    def reload(self) -> float:
        """Have it read its configuration again; when the old server was gone."""
        before = self.status()
        client.reload(self._sockets, NAME, "recovery benchmark")
        return self._gone(before)

    def crash_server(self) -> float:
        """SIGKILL to the server; when it was gone."""
        before = self.status()
        os.kill(before.pid, signal.SIGKILL)
        return self._gone(before)

    def crash_core(self) -> float:
        """SIGKILL to vLLM's engine core; when its server was gone."""
        before = self.status()
        os.kill(self.engine_core(), signal.SIGKILL)
        return self._gone(before)

    def wait_for_health(self, seconds: float) -> float:
        """When the launcher's newest server answered 200.

        Raises:
            ServerStartError: the launcher ended or gave up, or there was none within `seconds` from now.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.1, deadline - time.monotonic())
            healthy = super().wait_for_health(left)
            with contextlib.suppress(WeightkeeperError):
                status = self.status()
                if status.state == "broken":
                    raise ServerStartError(f"the launcher has given up: {status.cause}\n{self.tail()}")
                if status.state == "ready":
                    return healthy
            if time.monotonic() > deadline:
                raise ServerStartError(f"the launcher is not ready after {seconds:.0f} s; {LONGER}:\n{self.tail()}")
            time.sleep(LOOK_SECONDS)

    def wait_until_good(self) -> None:
        """Return when its server, which is healthy, has been so for `HEALTHY_SECONDS`."""
        passed = time.time() - self.status().since
        time.sleep(max(0.0, HEALTHY_SECONDS + LOOK_SECONDS - passed))

    def phases(self, since: float, healthy: float) -> dict[str, float]:
        """As the launcher tells them, without `stop`, which lies before; what it does not tell is `launcher`."""
        told: dict[str, float] = {}
        with contextlib.suppress(WeightkeeperError):
            told = {name: seconds for name, seconds in self.status().phases.items() if name != "stop"}
        rest = healthy - since - sum(told.values())
        return {"launcher": rest} | told if rest > 0 else shortened(told, -rest)

    def _gone(self, before: EngineStatus) -> float:
        deadline = time.monotonic() + GONE_SECONDS
        while Path(f"/proc/{before.pid}").exists() and self._is_same(before):
            if time.monotonic() > deadline:
                raise ServerStartError(f"the server pid {before.pid} is not gone after {GONE_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)
        return time.monotonic()

    def _is_same(self, before: EngineStatus) -> bool:
        with contextlib.suppress(WeightkeeperError):
            return self.status().generation == before.generation
        return True


def shortened(phases: dict[str, float], seconds: float) -> dict[str, float]:
    """Phases without `seconds` of them, taken from the longest first.

    Ours and the launcher's looks at the same moments are not made at the same time, which adds that much.
    """
    left = dict(phases)
    for name in sorted(phases, key=phases.__getitem__, reverse=True):
        cut = min(left[name], seconds)
        left[name] -= cut
        seconds -= cut
    return left
