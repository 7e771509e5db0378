"""Docker Compose as a program: it alone reads compose files, and it alone recreates containers."""

import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper.errors import ComposeError, ConfigError
from weightkeeper.supervisor.stop import Stop

CONFIG_SECONDS = 30.0
"""For reading the project; it takes about 0.1 s."""

UP_SECONDS = 1800.0
"""For recreating a service: its stop grace and, where an image is missing, a pull of tens of gigabytes."""

LEAVE_SECONDS = 8.0
"""For a recreation under way when the supervisor is told to end; Docker's own patience is 10 s."""

ENDING = "not done when the supervisor had to end"

LOOK_SECONDS = 0.2

INHERITED = ("PATH", "HOME", "DOCKER_HOST")
"""All that Compose sees of our environment, so that only `.env` counts when it interpolates."""


@dataclass(frozen=True, slots=True)
class Compose:
    """One compose project as its files describe it.

    Attributes:
        directory: of the project, absolute; the same inside and outside of the supervisor's container.
        files: compose files instead of those that Compose finds itself.
        env_files: environment files instead of `.env`.
        name: of the project, instead of the one that Compose derives.
    """

    directory: Path
    files: tuple[Path, ...] = ()
    env_files: tuple[Path, ...] = ()
    name: str | None = None

    def command(self, *arguments: str) -> list[str]:
        """The whole command line, as a person could repeat it."""
        options = ["--project-directory", str(self.directory)]
        for file in self.files:
            options += ["--file", str(file)]
        for file in self.env_files:
            options += ["--env-file", str(file)]
        if self.name:
            options += ["--project-name", self.name]
        return [*_program(), *options, *arguments]

    def config(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The project as Compose resolves it, and the warnings that Compose had about it.

        Raises:
            ComposeError: Compose refuses the project, or did not end in time.
        """
        output, warnings = self._run(["config", "--format", "json"], CONFIG_SECONDS, None)
        try:
            return msgspec.json.decode(output), tuple(_messages(warnings))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{_program()[0]} does not print JSON; Docker Compose 2 is needed") from error

    def hashes(self, resolved: Mapping[str, Any]) -> dict[str, str]:
        """Service → the hash that Compose writes on the label of a container made from this project.

        It is taken of the resolved project: of the files themselves Compose leaves out what `env_file` brings.

        Raises:
            ComposeError: Compose refuses the project, or did not end in time.
        """
        output, _ = self._resolved(resolved)._run(["config", "--hash", "*"], CONFIG_SECONDS, None, resolved)
        return dict(line.split(maxsplit=1) for line in output.splitlines() if line.strip())

    def up(self, service: str, stop: Stop, resolved: Mapping[str, Any] | None = None) -> None:
        """Make the containers of one service what the files say, or a project resolved earlier, and start them.

        Raises:
            ComposeError: Compose could not; what it had done by then stays.
        """
        source = self if resolved is None else self._resolved(resolved)
        source._run(["up", "--detach", "--no-deps", "--no-build", service], UP_SECONDS, stop, resolved)

    def _resolved(self, resolved: Mapping[str, Any]) -> "Compose":
        """The same project read from standard input, where `resolved` has to be given."""
        return Compose(self.directory, (Path("-"),), (Path(os.devnull),), resolved["name"])

    def _run(
        self, arguments: list[str], limit_s: float, stop: Stop | None, resolved: Mapping[str, Any] | None = None
    ) -> tuple[str, str]:
        command = self.command(*arguments)
        given = None if resolved is None else msgspec.json.encode(resolved).decode()
        process = subprocess.Popen(
            command,
            cwd=self.directory if self.directory.is_dir() else "/",
            env={name: os.environ[name] for name in INHERITED if name in os.environ},
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C in our terminal must not end a recreation between the old container and the new one.
            start_new_session=True,
        )
        with process:
            deadline = time.monotonic() + limit_s
            late = f"not done in {limit_s:.0f} s"
            while True:
                try:
                    output, errors = process.communicate(given, timeout=LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    given = None  # it is on its way
                    if stop and stop.is_set() and late != ENDING:
                        deadline, late = time.monotonic() + LEAVE_SECONDS, ENDING
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)  # the docker program and its Compose plugin
                    output, errors = process.communicate()
                    raise ComposeError(command, None, output, errors, late)
        if process.returncode:
            raise ComposeError(command, process.returncode, output, errors, "; ".join(_messages(errors)))
        return output, errors


@functools.cache
def _program() -> tuple[str, ...]:
    """`docker compose`, else the standalone program."""
    if shutil.which("docker"):
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False, timeout=30)
        if found.returncode == 0:
            return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise ConfigError("neither `docker compose` nor `docker-compose` is here; install Docker's CLI and Compose")


def _messages(stream: str) -> Sequence[str]:
    """The messages in what Compose wrote to standard error, each once, without its time stamps."""
    found = []
    for line in stream.splitlines():
        match = re.search(r'\bmsg="((?:[^"\\]|\\.)*)"', line)
        text = match[1].replace('\\"', '"') if match else line.strip()
        if text and text not in found:
            found.append(text)
    return found
