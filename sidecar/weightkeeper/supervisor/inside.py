"""Runs a program of ours inside a container: from a container and from the host alike, no socket has to be shared."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from docker.models.containers import Container

from weightkeeper.errors import ServiceError, WeightkeeperError
from weightkeeper.supervisor.connection import docker_answers
from weightkeeper.supervisor.project import one_line
from weightkeeper.supervisor.stop import STEP_SECONDS, Stop

PREFIX = "weightkeeper: "
"""Of the line in which our programs say why they failed."""

CONFIG_CODE = 2
"""Exit code of our programs for a setting that cannot be used."""


@dataclass(frozen=True, slots=True)
class Done:
    """A program that ended. `code` is its exit code; 126 and 127 mean that it could not be started."""

    code: int
    output: str
    errors: str

    @property
    def is_refusal(self) -> bool:
        """Our program cannot use a setting; the same code without its line is an option that it does not know."""
        return self.code == CONFIG_CODE and PREFIX in self.errors

    @property
    def reason(self) -> str:
        """Why it failed, in one line: from our program's own line on, else the last one."""
        text = (self.errors or self.output).strip()
        place = text.rfind(f"\n{PREFIX}") + 1 if not text.startswith(PREFIX) else 0
        said = text[place:]
        if said.startswith(PREFIX):
            return one_line(said.removeprefix(PREFIX))
        return one_line(text.rpartition("\n")[2]) or f"exit code {self.code}"


def run(container: Container, command: Sequence[str], limit_s: float, stop: Stop) -> Done | None:
    """Run a command in a container; None where we are told to end before it has ended. It then ends by itself.

    Raises:
        ServiceError: Docker refused (the container does not run), or the command did not end in time.
        DockerLostError: Docker does not answer.
    """
    results: list[Done] = []
    errors: list[WeightkeeperError] = []

    def work() -> None:
        try:
            with docker_answers():
                results.append(_run(container, list(command)))
        except WeightkeeperError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while thread.is_alive() and not stop.is_set():
        thread.join(STEP_SECONDS)
        if time.monotonic() > deadline:
            raise ServiceError(f"{container.name}: `{' '.join(command)}` did not end in {limit_s:.0f} s")
    if errors:
        raise errors[0]
    return results[0] if results else None


def _run(container: Container, command: list[str]) -> Done:
    api = container.client.api
    created = api.exec_create(container.id, command)
    output, errors = api.exec_start(created["Id"], demux=True)
    code = api.exec_inspect(created["Id"])["ExitCode"]
    texts = [(part or b"").decode("utf-8", "replace") for part in (output, errors)]
    return Done(126 if code is None else code, *texts)
