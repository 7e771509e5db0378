"""Runs a program of ours inside a container: from a container and from the host alike, no socket has to be shared."""

import contextlib
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import requests
import urllib3
from docker.errors import create_api_error_from_http_exception
from docker.models.containers import Container
from docker.utils.socket import STDERR, STDOUT

from weightkeeper.errors import ServiceError, WeightkeeperError
from weightkeeper.quantities import one_line
from weightkeeper.supervisor.connection import docker_answers
from weightkeeper.supervisor.stop import STEP_SECONDS, Stop

PREFIX = "weightkeeper: "
"""Of the line in which our programs say why they failed."""

MAX_OUTPUT_BYTES = 1024 * 1024
"""On both streams together. A status is some kilobytes."""

HEADER = struct.Struct(">BxxxL")
"""Of a part of what a program printed: its stream, and its bytes."""

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
    def is_unknown(self) -> bool:
        """Our program does not know this verb or option: it is of another release."""
        return self.code == CONFIG_CODE and not self.is_refusal and "Error: No such " in self.errors

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
                results.append(_run(container, list(command), limit_s))
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


def _run(container: Container, command: list[str], limit_s: float) -> Done:
    api = container.client.api
    number = api.exec_create(container.id, command)["Id"]
    shown = " ".join(command)
    said = {STDOUT: bytearray(), STDERR: bytearray()}
    # Not the SDK's exec_start: it reads from the bare socket and loses what came together with the headers.
    url = f"{api.base_url}/v{api.api_version}/exec/{number}/start"
    answer = api.post(url, json={"Detach": False, "Tty": False}, stream=True, timeout=limit_s)
    with contextlib.closing(answer):
        _check(answer)
        while head := _read(answer, HEADER.size, may_end=True):
            stream, length = HEADER.unpack(head)
            if stream not in said:
                raise ServiceError(f"{container.name}: Docker's answer to `{shown}` cannot be read: stream {stream}")
            if sum(map(len, said.values())) + length > MAX_OUTPUT_BYTES:
                raise ServiceError(
                    f"{container.name}: `{shown}` printed over {MAX_OUTPUT_BYTES} bytes; "
                    "does the container hold another program under this name?"
                )
            said[stream] += _read(answer, length)
    code = api.exec_inspect(number)["ExitCode"]
    texts = [part.decode("utf-8", "replace") for part in said.values()]
    return Done(126 if code is None else code, *texts)


def _check(answer: requests.Response) -> None:
    try:
        answer.raise_for_status()
    except requests.HTTPError as error:
        raise create_api_error_from_http_exception(error) from error


def _read(answer: requests.Response, size: int, *, may_end: bool = False) -> bytes:
    """So many bytes of an answer, or none where it may end here."""
    data = answer.raw.read(size)
    if len(data) < size and not (may_end and not data):
        raise urllib3.exceptions.IncompleteRead(len(data), size - len(data))
    return data
