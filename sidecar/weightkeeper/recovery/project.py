"""The user's compose project: Docker and Compose as programs, and what runs in its containers."""

import json
import os
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from weightkeeper.errors import ServerStartError

COMMAND_SECONDS = 60.0
UP_SECONDS = 600.0
INHERITED = ("PATH", "HOME", "DOCKER_HOST")
"""All that Compose sees of our environment, so that only `.env` counts when it interpolates."""

ENGINE, SIDECAR, SUPERVISOR = "engine", "sidecar", "supervisor"
"""Services of the project."""


class Project:
    """The project in a directory.

    Raises:
        ServerStartError: Compose or Docker refuses; the message has their words.
    """

    def __init__(self, directory: Path):
        self.directory = directory.resolve()
        self.resolved: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))

    def compose(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        """Output of `docker compose ARGUMENTS`."""
        return self._run(["docker", "compose", *arguments], seconds)

    def inside(self, service: str, *command: str) -> str:
        """Output of a command in a service's container."""
        return self.compose("exec", "-T", service, *command)

    def is_running(self, service: str) -> bool:
        return bool(self.compose("ps", "-q", "--status", "running", service).strip())

    def pid(self, service: str) -> int:
        """Of the first process of its container, as the host sees it; 0 where none runs."""
        found = self.compose("ps", "-q", "--status", "running", service).split()
        return int(self._run(["docker", "inspect", "-f", "{{.State.Pid}}", found[0]], COMMAND_SECONDS)) if found else 0

    def begin_to_recreate(
        self, service: str, command: list[str] | None, variables: dict[str, str], file: Path
    ) -> "subprocess.Popen[str]":
        """Have a service's container replaced, with another command where one is given; it goes on meanwhile.

        Args:
            variables: that it has besides, or otherwise.
            file: for the project as it is then.
        """
        project = json.loads(json.dumps(self.resolved))
        changed = project["services"][service]
        if command is not None:
            changed["command"] = command
        if variables:
            changed["environment"] = (changed.get("environment") or {}) | variables
        file.write_text(json.dumps(project))
        arguments = ["docker", "compose", "--project-directory", str(self.directory), "-p", project["name"]]
        arguments += ["-f", str(file), "up", "-d", "--no-deps", "--no-build", "--force-recreate", service]
        return subprocess.Popen(
            arguments, cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def lines(self, service: str, since: float) -> list[tuple[float, str]]:
        """Moment, in seconds of `time.monotonic`, and text of each line of a service's log since such a moment."""
        shift = time.time() - time.monotonic()
        text = self.compose("logs", "--no-log-prefix", "--timestamps", "--since", f"{since + shift:.3f}", service)
        found = []
        for line in text.splitlines():
            stamp, _, rest = line.partition(" ")
            try:
                at = datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00").timestamp()
            except ValueError:
                continue
            found.append((at - shift, rest + "\n"))
        return found

    def _run(self, command: list[str], seconds: float) -> str:
        try:
            done = subprocess.run(
                command, cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=seconds, check=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            if not self.directory.is_dir():
                raise ServerStartError(f"--project {self.directory}: there is no such directory") from error
            raise ServerStartError("there is no `docker` program here; leave --project out") from error
        except NotADirectoryError as error:
            raise ServerStartError(f"{self.directory}: no directory") from error
        except subprocess.TimeoutExpired as error:
            raise ServerStartError(f"`{' '.join(command)}` did not end within {seconds:.0f} s") from error
        if done.returncode:
            words = (done.stderr or done.stdout).strip()[-1000:]
            raise ServerStartError(f"`{' '.join(command)}` ended with exit code {done.returncode}: {words}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in INHERITED if name in os.environ}
