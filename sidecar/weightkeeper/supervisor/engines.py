"""The engines' containers: find, restart, recreate. Docker's SDK does it, but for recreating, which is Compose's."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from docker.models.containers import Container

from weightkeeper.errors import ComposeError, DockerLostError, NotSupervisedError, ServiceError, WeightkeeperError
from weightkeeper.quantities import one_line
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection, docker_answers
from weightkeeper.supervisor.project import LABEL
from weightkeeper.supervisor.stop import Stop

PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
ONE_OFF_LABEL = "com.docker.compose.oneoff"
"""`True` on what `docker compose run` made."""

STOP_SECONDS = 10
"""Docker's grace where a container has none of its own."""

ASK_SECONDS = 1.0
"""For a request to reach Docker: an engine that was stopped for other weights is started again as we end."""

STOPPED_CODES = (0, 130, 137, 143)
"""Exit codes of a container that was most likely stopped on purpose."""


@dataclass(frozen=True, slots=True)
class Started:
    """One start of one container; `at` is Docker's text for the moment."""

    container: str
    name: str
    at: str


class Engines:
    """The containers of one compose project."""

    def __init__(self, project: str, connection: Connection, stop: Stop) -> None:
        self._project = project
        self._connection = connection
        self._stop = stop

    def containers(self, service: str) -> list[Container]:
        """As `existing`, at least one.

        Raises:
            ServiceError: there is none.
            NotSupervisedError: there is one without the label.
            DockerLostError: Docker does not answer.
        """
        found = self.existing(service)
        if not found:
            raise ServiceError(
                f"{service} has no container in the project {self._project};"
                f" make it with `docker compose up -d {service}`"
            )
        return found

    def existing(self, service: str) -> list[Container]:
        """The containers of a service, running or not; refused where one does not carry the label. Raises likewise."""
        labels = [f"{PROJECT_LABEL}={self._project}", f"{SERVICE_LABEL}={service}"]
        with docker_answers():
            found = self._connection.client().containers.list(all=True, filters={"label": labels})
        found = [one for one in found if one.labels.get(ONE_OFF_LABEL) != "True"]
        if any(one.labels.get(LABEL, "").lower() != "true" for one in found):
            raise NotSupervisedError(
                f"the container of {service} does not carry the label {LABEL}: true, so it is not touched;"
                f" if it is an engine, add the label and run `docker compose up -d {service}`"
            )
        return sorted(found, key=lambda one: one.name)

    def restart(self, container: Container) -> Started | None:
        """Restart a container with its own stop grace; return when it was started again.

        None where we are told to end before that: Docker finishes by itself.

        Raises:
            ServiceError: Docker refused; its words are in the message.
            DockerLostError: Docker does not answer.
        """
        grace = container.attrs["Config"].get("StopTimeout")
        is_done = self._call(lambda: container.restart(timeout=STOP_SECONDS if grace is None else grace))
        return started(container) if is_done else None

    def recreate(self, service: str, compose: Compose, resolved: Mapping[str, Any] | None = None) -> list[Container]:
        """Make a service's containers what the files say, or a project resolved earlier, and start them.

        Raises:
            ServiceError: Compose could not.
            DockerLostError: Docker does not answer.
        """
        try:
            compose.up(service, self._stop, resolved)
        except ComposeError as error:
            with docker_answers():
                self._connection.client().ping()  # lost is another thing than refused
            raise ServiceError(one_line(str(error))) from error
        return self.containers(service)

    def stop(self, container: Container) -> None:
        """Stop a container with its own grace; return when it is down. Raises as `restart`."""
        grace = container.attrs["Config"].get("StopTimeout")
        self._call(lambda: container.stop(timeout=STOP_SECONDS if grace is None else grace))

    def start(self, container: Container) -> Started | None:
        """Start a container. As `restart`."""
        return started(container) if self._call(container.start) else None

    def orphans(self, services: Collection[str]) -> list[str]:
        """Names of labelled containers of the project whose service is none of these; none where Docker is silent."""
        labels = [f"{PROJECT_LABEL}={self._project}", f"{LABEL}=true"]
        try:
            with docker_answers():
                found = self._connection.client().containers.list(all=True, filters={"label": labels})
        except (ServiceError, DockerLostError):
            return []
        return sorted(
            one.name
            for one in found
            if one.labels.get(SERVICE_LABEL) not in services and one.labels.get(ONE_OFF_LABEL) != "True"
        )

    def running(self, service: str) -> Container:
        """The first running container of any service, labelled or not: to talk to what runs in it.

        Raises:
            ServiceError: none runs.
            DockerLostError: Docker does not answer.
        """
        labels = [f"{PROJECT_LABEL}={self._project}", f"{SERVICE_LABEL}={service}"]
        with docker_answers():
            found = self._connection.client().containers.list(filters={"label": labels})
        found = [one for one in found if one.labels.get(ONE_OFF_LABEL) != "True"]
        if not found:
            raise ServiceError(f"{service} does not run; start it with `docker compose up -d {service}`")
        return min(found, key=lambda one: one.name)

    def _call(self, work: Callable[[], object]) -> bool:
        """Wait for Docker's answer, but when we are told to end only until it surely was asked; whether it came."""
        errors: list[WeightkeeperError] = []

        def run() -> None:
            try:
                with docker_answers():
                    work()
            except WeightkeeperError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        began = time.monotonic()
        while thread.is_alive() and not (self._stop.is_set() and time.monotonic() - began > ASK_SECONDS):
            thread.join(0.05)
        if errors:
            raise errors[0]
        return not thread.is_alive()


def started(container: Container) -> Started:
    """The container's latest start.

    Raises:
        ServiceError: it is gone.
        DockerLostError: Docker does not answer.
    """
    return Started(container.id, container.name, inspect(container)["State"]["StartedAt"])


def inspect(container: Container) -> dict[str, Any]:
    """Docker's description of the container at this moment.

    Raises:
        ServiceError: it is gone.
        DockerLostError: Docker does not answer.
    """
    with docker_answers():
        container.reload()
    return container.attrs


def policy(description: dict[str, Any]) -> str:
    """The name of a container's restart policy; `no` where it has none."""
    return (description["HostConfig"].get("RestartPolicy") or {}).get("Name") or "no"


def is_stopped(description: dict[str, Any]) -> bool:
    """Whether a container is down because somebody wanted it so: Docker's policy would have brought it back."""
    state = description["State"]
    if state["Status"] not in ("created", "exited", "dead") or state.get("Error") or state.get("OOMKilled"):
        return False
    return policy(description) in ("always", "unless-stopped") or state["ExitCode"] in STOPPED_CODES
