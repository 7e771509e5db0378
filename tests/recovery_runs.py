"""What the tests of the recovery benchmark share: it and the stand-in server as processes, and agents to be killed."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from keepers import LOADER, wait_for

from weightkeeper.recovery import agent, result, wrong_agent

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
        deadline = time.monotonic() + 60
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


class Benchmark:
    """`weightkeeper recovery run` in a directory of its own, with a temporary directory of its own.

    Args:
        options: of the command.
        paths: where its Python and that of all it starts looks for modules first.
        standin: of the stand-in server.
    """

    def __init__(self, directory: Path, model: Path, *options: str, paths: Sequence[Path] = (), **standin: Any):
        self.file = directory / "run.json"
        self.out = directory / "out"
        self.temporary = short_directory()
        standin = {"token": 0.002, "start": 0.1} | standin
        command = [sys.executable, "-m", "weightkeeper.cli", "recovery", "run", "--model", str(model)]
        command += ["--server", f"{sys.executable} {STANDIN}", "--application", "standin_model"]
        command += ["--option", f"standin={json.dumps(standin)}", "--tokens", "8", "--steps", "6"]
        command += ["--out", str(self.out)]
        environment = ENVIRONMENT | {"WEIGHTKEEPER_LOADER": LOADER, "TMPDIR": str(self.temporary)}
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), environment["PYTHONPATH"], str(STANDIN.parent)])
        self.process = subprocess.Popen(
            [*command, "--json", str(self.file), *options], env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Its exit code, and what it printed."""
        try:
            out, log = self.process.communicate(timeout=200)
        finally:
            self.process.kill()
        return self.process.returncode, out, log

    def run(self) -> result.Run:
        return result.read(self.file)

    def left(self) -> list[str]:
        """Processes that it has started and that live."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if f"TMPDIR={self.temporary}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
        return found

    def assert_nothing_is_left(self) -> None:
        wait_for(lambda: not self.left(), "the end of every process", 10)
        assert list(self.temporary.iterdir()) == []
        self.temporary.rmdir()


def short_directory() -> Path:
    """For the sockets in it; it is left for a process that outlives its test."""
    while True:
        directory = Path("/tmp", secrets.token_hex(2))
        with suppress(FileExistsError):
            directory.mkdir()
            return directory


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
