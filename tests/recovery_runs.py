"""What the tests of the recovery benchmark share: the stand-in server as a process, and agents that can be killed."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from weightkeeper.recovery import agent, wrong_agent

STANDIN = Path(__file__).with_name("standin_model.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Standin:
    """The stand-in server at one address; it can be killed and started again."""

    def __init__(self, directory: Path, **standin: Any):
        self.directory = directory
        self.trouble_file = directory / "trouble"
        self.asked_file = directory / "asked"
        self.standin = {"trouble": str(self.trouble_file), "asked": str(self.asked_file)} | standin
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Standin":
        config = self.directory / "standin.yaml"
        config.write_text(yaml.safe_dump({"standin": self.standin}))
        command = [sys.executable, str(STANDIN), "serve", "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 20
        while not self.is_healthy():
            assert time.monotonic() < deadline, "the stand-in does not answer"
            time.sleep(0.02)
        return self

    def is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def trouble(self, *lines: str) -> None:
        """For the next requests, one each."""
        self.trouble_file.write_text("\n".join(lines) + "\n")

    def asked(self) -> list[str]:
        return self.asked_file.read_text().splitlines() if self.asked_file.exists() else []

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def standin(directory: Path, **options: Any) -> Iterator[Standin]:
    directory.mkdir(parents=True, exist_ok=True)
    server = Standin(directory, **options).start()
    try:
        yield server
    finally:
        server.kill()


class ForkedAgent:
    """An agent in a fork of this process, which has its imports: it starts in no time, and can be killed."""

    def __init__(self, settings: agent.Settings, wrong: bool = False, before: Callable[[], None] | None = None):
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                if before is not None:
                    before()
                (wrong_agent if wrong else agent).run(settings)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def kill(self) -> int:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code, -N for a signal."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"the agent is not done after {seconds:g} s")
            time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
