"""Starts, restarts and recreates an engine's containers, and follows them until it is known what became of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from docker.models.containers import Container

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor import last_words
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import Engines, Started, is_stopped, started
from weightkeeper.supervisor.follow import SECOND_NS, Outcome, follow, nanoseconds
from weightkeeper.supervisor.stop import Stop

ATTEMPTS = 3
"""To act on a container while Docker keeps being lost."""

ENDING = "the supervisor was told to end"


class Starting:
    """The containers of one project. Each method gives what became of them, one outcome each.

    All raise NotSupervisedError where a container does not carry the label, DockerLostError where Docker is mute, and
    ServiceError where there is no container or Docker refused.

    Attributes:
        followed: ids of the containers whose fate is being told here and now.
    """

    def __init__(
        self, engines: Engines, connection: Connection, stop: Stop, reason: Callable[[float], str]
    ) -> None:  # fmt: skip
        """`reason` is asked while a container starts, with the seconds waited; one that is not empty ends the wait."""
        self._engines = engines
        self._connection = connection
        self._stop = stop
        self._reason = reason
        self.followed: set[str] = set()

    def restart(self, service: str, is_start: bool) -> Iterator[Outcome]:
        """One after the other; those that are stopped only with `is_start`."""
        for container in self._engines.containers(service):
            if self._stop.is_set():
                yield Outcome("undecided", 0.0, ENDING, container.id, container.id)
            elif is_stopped(container.attrs) and not is_start:
                yield Outcome("skipped", 0.0, f"{container.name} is stopped", container.id, container.id)
            else:
                yield self.restart_one(container)

    def start(self, service: str) -> Iterator[Outcome]:
        """Those that are down; one that runs already is followed all the same."""
        for container in self._engines.containers(service):
            began = time.monotonic()
            self.followed.add(container.id)
            try:
                yield self._follow(container, self._engines.start(container), began, container.id)
            finally:
                self.followed.discard(container.id)

    def restart_one(self, container: Container) -> Outcome:
        """Restart a container that is there."""
        began = time.monotonic()
        self.followed.add(container.id)
        try:
            return self._follow(container, self._started_again(container), began, container.id)
        finally:
            self.followed.discard(container.id)

    def recreate(self, service: str, compose: Compose, resolved: Mapping[str, Any] | None) -> Iterator[Outcome]:
        """All of a service at once, by what the files say or a project resolved earlier; stopped ones stay."""
        began = time.monotonic()
        before = {container.id: container.attrs for container in self._engines.containers(service)}
        ids = " ".join(before)
        if self._stop.is_set():
            yield Outcome("undecided", 0.0, ENDING, ids, ids)
            return
        if all(map(is_stopped, before.values())):
            yield Outcome("skipped", 0.0, "it is stopped", ids, ids)
            return
        self.followed |= before.keys()
        try:
            containers = self._engines.recreate(service, compose, resolved)
            self.followed |= {container.id for container in containers}
            for container in containers:
                yield self._follow(container, started(container), began, ids)
        finally:
            self.followed.clear()

    def _started_again(self, container: Container) -> Started | None:
        """Restart, once: where the answer is lost, the container's start tells whether it was done."""
        before = started(container)
        for _ in range(ATTEMPTS):
            try:
                return self._engines.restart(container)
            except DockerLostError:
                self._connection.wait()
                if self._stop.is_set():
                    return None
                after = started(container)
                if after.at != before.at:
                    return after
        raise ServiceError(f"Docker gave no answer to {ATTEMPTS} requests to restart {container.name}")

    def _follow(self, container: Container, start: Started | None, began: float, before: str) -> Outcome:
        """Docker may be lost and come back meanwhile; then the container's latest start counts."""
        result, detail, since = "starting", ENDING, time.time()
        while start and not self._stop.is_set():
            since = nanoseconds(start.at) / SECOND_NS
            try:
                result, detail = follow(container, start, self._reason)
                break
            except DockerLostError:
                self._connection.wait()
                start = None if self._stop.is_set() else started(container)
        outcome = Outcome(result, time.monotonic() - began, detail, before, container.id)
        return last_words.added(outcome, container, since)
