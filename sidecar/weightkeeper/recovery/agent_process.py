"""The agent under test as a process: started, watched through its state file, killed, started again."""

import subprocess
import sys
import time
from collections.abc import Callable

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery import processes
from weightkeeper.recovery.agent_settings import LEDGER_FILE, STATE_FILE, Settings
from weightkeeper.recovery.check import Verdict, check
from weightkeeper.recovery.ledger import Effect, Ledger
from weightkeeper.recovery.state import Job, State

LOOK_SECONDS = 0.01


class AgentProcess:
    """`weightkeeper recovery agent` on one directory.

    Args:
        settings: of the agent.
        wrong: run the deliberately wrong one.
    """

    def __init__(self, settings: Settings, wrong: bool = False):
        settings.directory.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._log = settings.directory / "agent.log"
        self._command = [*command_of(settings), *(["--wrong"] if wrong else [])]
        self._state = State(settings.directory / STATE_FILE)
        self._ledger = Ledger(settings.directory / LEDGER_FILE)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            processes.kill_family(self._process.pid)
            self._process.wait()

    def job(self) -> Job | None:
        return self._state.job(self._settings.job)

    def effects(self) -> list[Effect]:
        return list(self._ledger.effects(self._settings.job))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait while it runs.

        Raises:
            ServerStartError: it ended in another way, or time is over.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None and not condition():
                raise ServerStartError(f"the agent ended with exit code {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the agent has not {what} after {seconds:.0f} s; a slow engine needs fewer --steps or --tokens"
                    f"\n{self._tail()}".rstrip()
                )
            time.sleep(LOOK_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait for its end, which has to be a good one.

        Raises:
            ServerStartError: it is none, or time is over.
        """
        self.wait_for(lambda: self._process.poll() == 0, f"finished its job of {self._settings.steps} steps", seconds)

    def check(self, reference: Job) -> Verdict:
        return check(self.job(), self.effects(), reference)

    def close(self) -> None:
        self.kill()
        self._state.close()
        self._ledger.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def command_of(settings: Settings) -> list[str]:
    command = [sys.executable, "-m", "weightkeeper.cli", "recovery", "agent", "--directory", str(settings.directory)]
    given = {
        "--url": settings.url, "--model": settings.model, "--job": settings.job, "--steps": settings.steps,
        "--tokens": settings.tokens, "--timeout": settings.timeout_s, "--patience": settings.patience_s,
    }  # fmt: skip
    return [*command, *(text for name, value in given.items() for text in (name, str(value)))]
