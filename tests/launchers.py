"""Real launchers for tests, with the application of `standin_server`."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from keepers import DEADLINE_SECONDS, wait_for

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher import client
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.launcher.processes import Process, process

OPTIONS = ("--stop-grace", "5", "--health-interval", "1", "--restart-delay", "0.05", "--restart-delay-max", "0.2")
MARKER = "LAUNCHER_TEST"


class LauncherProcess:
    """`weightkeeper engine` in a directory of its own, which is short enough for sockets in it."""

    def __init__(self, *options: str, prefix: tuple[str, ...] = (), **config: Any):
        self.directory = Path(tempfile.mkdtemp(prefix="wk"))
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        self.socket_dir = str(self.directory / "run")
        self.state_dir = self.directory / "state"
        self.config = self.directory / "engine.yaml"
        self.log = self.directory / "log"
        self.port = free_port()
        self.environment = {MARKER: self.directory.name, "TMPDIR": str(self.temporary)}
        self.options = options
        self.arguments = ("--config", str(self.config))
        self.prefix = prefix
        self.process: subprocess.Popen[bytes] | None = None
        self.edit(**config)

    def edit(self, **config: Any) -> None:
        """Write the config file; a new port only where one is given."""
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump({"model": "m", "port": self.port, **config}))
        new.rename(self.config)

    def start(self) -> "LauncherProcess":
        path = os.pathsep.join([str(Path(__file__).parent), *(each for each in sys.path if each)])
        command = [
            *self.prefix, sys.executable, "-m", "weightkeeper.cli", "engine", "--application", "standin_server",
            "--name", "e", "--socket-dir", self.socket_dir, "--state-dir", str(self.state_dir), *OPTIONS,
            *self.options, "--", *self.arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path} | self.environment,
                start_new_session=True,
            )
        return self

    def status(self) -> EngineStatus | None:
        """None while no launcher answers."""
        with suppress(WeightkeeperError):
            return client.status(self.socket_dir, "e")
        return None

    def wait_for_state(self, state: str, generation: int | None = None) -> EngineStatus:
        def reached() -> EngineStatus | None:
            now = self.status()
            is_there = now and now.state == state and generation in (None, now.generation)
            return now if is_there else None

        return wait_for(reached, f"{state} {generation or ''}")

    def ready(self, generation: int = 1) -> dict[str, Any]:
        """Wait until this generation is ready; what its server says of itself."""
        status = self.wait_for_state("ready", generation)
        facts = self.facts()
        assert facts["pid"] == status.pid
        return facts

    def facts(self, path: str = "/") -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=DEADLINE_SECONDS) as answer:
            return json.loads(answer.read())

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the return code as subprocess has it, negative for a signal."""
        self.send(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_text(self, text: str, count: int = 1) -> None:
        wait_for(lambda: self.text().count(text) >= count, f"{text!r} in the log:\n{self.text()}")

    def wait_until_it_warms(self) -> None:
        """The template, with STANDIN_WARM: the configuration has been read by then, of which no state tells."""
        self.wait_for_text("the stand-in warms")

    def history(self) -> list[dict[str, Any]]:
        path = self.state_dir / "engine-e.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def left(self) -> list[Process]:
        """Living processes that this launcher or anything below it has started."""
        mine = f"{MARKER}={self.directory.name}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with suppress(OSError):
                    if mine in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(process(int(name)))
        return [each for each in found if each is not None and each.is_alive]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for each in self.left():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def launcher(*options: str, variables: dict[str, str] | None = None, **config: Any) -> Iterator[LauncherProcess]:
    """A started launcher that is gone afterwards, and after a proper end has left nothing."""
    launched = LauncherProcess(*options, **config)
    launched.environment |= variables or {}
    try:
        launched.start()
        yield launched
        if launched.process.poll() is None:
            launched.end()
        assert_nothing_left(launched)
    finally:
        launched.close()


def assert_nothing_left(launched: LauncherProcess) -> None:
    assert not launched.left(), launched.text()
    assert not list(launched.temporary.iterdir())
    assert not list(Path(launched.socket_dir).rglob("*.sock"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_gone(*pids: int) -> Callable[[], bool]:
    return lambda: all(process(pid) is None for pid in pids)


def has_ended(pid: int) -> bool:
    """Whether a process lives no more, reaped or not."""
    found = process(pid)
    return found is None or not found.is_alive


def age(pid: int) -> float:
    """Seconds since a process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process(pid).started / os.sysconf("SC_CLK_TCK")
