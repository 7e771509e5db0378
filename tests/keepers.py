"""Real keeper processes for tests, with the loader of `publishing_loader`."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightkeeper import client
from weightkeeper.errors import WeightkeeperError
from weightkeeper.frames import Channel, Limits
from weightkeeper.protocol import VERSION, FromKeeper, Hello, Status, StatusRequest, Welcome
from weightkeeper.sockets import control_path

DEADLINE_SECONDS = 60.0
LOADER = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('publishing_loader.py')))}"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return value


class KeeperProcess:
    """`weightkeeper serve` in a directory of its own."""

    def __init__(
        self, directory: Path, *options: str, program: tuple[str, ...] = ("-m", "weightkeeper.cli"), **plan: Any
    ):
        self.directory = directory
        self.socket_dir = str(directory / "run")
        self.config = directory / "engine.yaml"
        self.log = directory / "keeper.log"
        self.stopped = directory / "stopped"
        self.plan(**plan)
        self._command = [sys.executable, *program, "serve", "--socket-dir", self.socket_dir, *options]
        self.process: subprocess.Popen[bytes] | None = None

    def plan(self, **plan: Any) -> None:
        """What the next loader does, by way of the config file."""
        text = json.dumps({"model": str(self.directory / "model"), "plan": {"stopped": str(self.stopped), **plan}})
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.rename(self.config)

    def start(self, with_config: bool = True, loader: str = LOADER, **settings: Any) -> "KeeperProcess":
        config = ["--config", str(self.config)] if with_config else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, *config, "--loader", loader, "--poll-seconds", "0.2"],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                **settings,
            )
        return self

    def status(self) -> Status | None:
        """None while no keeper answers."""
        try:
            return client.status(self.socket_dir)
        except WeightkeeperError:
            return None

    def wait_for_state(self, state: str) -> Status:
        return wait_for(lambda: (now := self.status()) and now.state == state and now, f"state {state}; {self.text()}")

    def wait_for_text(self, text: str, count: int = 1) -> None:
        wait_for(lambda: self.text().count(text) >= count, f"{text!r} in the log:\n{self.text()}")

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def lines(self) -> list[str]:
        """Log messages without time and level."""
        return [line.split(": ", 1)[1] for line in self.text().splitlines() if "weightkeeper." in line and ": " in line]

    def stop(self) -> int:
        """End it as Docker does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def names(self) -> list[str]:
        """Names in the socket directory."""
        return sorted(os.listdir(self.socket_dir))


@contextmanager
def keeper(directory: Path, *options: str, with_config: bool = True, **plan: Any) -> Iterator[KeeperProcess]:
    """A started keeper that is gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    process = KeeperProcess(directory, *options, **plan).start(with_config)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.kill()


@contextmanager
def connected(path: str, role: str | None = None, name: str = "") -> Iterator[Channel]:
    """A channel to a socket, after the greeting if a role is given."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE_SECONDS)
    connection.connect(path)
    channel = Channel(connection, Limits(FromKeeper))
    try:
        if role is not None:
            channel.send(Hello(VERSION, role, name))
            assert channel.receive().message == Welcome(VERSION)
        yield channel
    finally:
        channel.close()


def links_of(pid: int) -> list[str]:
    """What a process's descriptors are, `/memfd:weightkeeper (deleted)`, say."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def inodes_of(pid: int, what: str = "memfd:weightkeeper") -> list[int]:
    """Of the files that a process's descriptors are whose names have `what` in them, one for each descriptor."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            if what in os.readlink(f"/proc/{pid}/fd/{name}"):
                found.append(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
    return sorted(found)


def descriptors_of(pid: int | str = "self") -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def settled_descriptors(pid: int, socket_dir: str | os.PathLike[str]) -> int:
    """How many descriptors a keeper has open when no loader runs, and every connection that was closed is gone."""

    def settled() -> int | None:
        with connected(control_path(socket_dir), "control") as channel:
            for _ in range(3):  # a round of its loop each: it sees what was closed before, and closes its own end
                channel.send(StatusRequest())
                channel.receive()
            links = links_of(pid)
        return None if any("pidfd" in link for link in links) else len(links) - 1

    return wait_for(settled, "no loader")


def as_user(uid: int, action: Callable[[], Any]) -> str:
    """Run `action` in a forked child as another user, which only root can; what it returns, or the error's text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "the child broke"
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            text = str(action())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        return stream.read()
