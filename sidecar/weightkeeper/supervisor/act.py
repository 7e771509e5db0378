"""Carries out an action on a service, follows its containers, says what became of them and puts it on record."""

import logging
import time
from collections.abc import Callable, Iterator

from docker.models.containers import Container

from weightkeeper.errors import DockerLostError, NotSupervisedError, ServiceError
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import Engines, Started, is_stopped, started
from weightkeeper.supervisor.follow import Outcome, follow
from weightkeeper.supervisor.history import History, Record, now
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""To restart a container while Docker keeps being lost."""

LEVELS = {"healthy": logging.INFO, "running": logging.INFO, "skipped": logging.WARNING, "starting": logging.WARNING}
"""Of the line about a result; the others are errors."""

ENDING = "the supervisor was told to end"


class Actor:
    """Restarts and recreates the engines of one project.

    Attributes:
        followed: ids of the containers whose fate is being told here and now.
    """

    def __init__(
        self,
        engines: Engines,
        connection: Connection,
        history: History,
        stop: Stop,
        why_over: Callable[[float], str] = lambda _: "",
    ) -> None:
        """`why_over` is asked while a container starts, with the seconds waited; a reason ends the waiting."""
        self._engines = engines
        self._connection = connection
        self._history = history
        self._stop = stop
        self._why_over = why_over
        self.followed: set[str] = set()

    def restart(self, service: str, cause: str, is_start: bool = False) -> bool:
        """Restart a service's containers, one after the other; whether all of them came up.

        Args:
            is_start: start also those that are stopped; without it they are left down.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; nothing was done.
        """
        return self._tell("restart", service, cause, self._restart(service, is_start))

    def recreate(self, service: str, cause: str, compose: Compose) -> bool:
        """Give a service containers of the present definition; whether all of them came up. Stopped ones stay.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; it can be done again, what is done by then counts.
        """
        return self._tell("recreate", service, cause, self._recreate(service, compose))

    def _tell(self, action: str, service: str, cause: str, outcomes: Iterator[Outcome]) -> bool:
        is_good = True
        try:
            for outcome in outcomes:
                is_good = is_good and outcome.is_good
                log.log(LEVELS.get(outcome.result, logging.ERROR), "%s", said(action, service, outcome))
                put(self._history, action, service, cause, outcome)
        except NotSupervisedError:
            raise
        except ServiceError as error:
            is_good = False
            log.error("%s %s failed: %s", service, action, error)
            put(self._history, action, service, cause, Outcome("failed", 0.0, str(error)))
        return is_good

    def _restart(self, service: str, is_start: bool) -> Iterator[Outcome]:
        for container in self._engines.containers(service):
            if self._stop.is_set():
                return
            if is_stopped(container.attrs) and not is_start:
                yield Outcome("skipped", 0.0, f"{container.name} is stopped", container.id, container.id)
                continue
            began = time.monotonic()
            self.followed.add(container.id)
            try:
                start = self._started_again(container)
                yield self._follow(container, start, began, container.id)
            finally:
                self.followed.discard(container.id)

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

    def _recreate(self, service: str, compose: Compose) -> Iterator[Outcome]:
        began = time.monotonic()
        before = {container.id: container.attrs for container in self._engines.containers(service)}
        ids = " ".join(before)
        if all(map(is_stopped, before.values())):
            yield Outcome("skipped", 0.0, "it is stopped", ids, ids)
            return
        self.followed |= before.keys()
        try:
            containers = self._engines.recreate(service, compose)
            self.followed |= {container.id for container in containers}
            for container in containers:
                yield self._follow(container, started(container), began, ids)
        finally:
            self.followed.clear()

    def _follow(self, container: Container, start: Started | None, began: float, before: str) -> Outcome:
        """Docker may be lost and come back meanwhile; then the container's latest start counts."""
        result, detail = "starting", ENDING
        while start and not self._stop.is_set():
            try:
                result, detail = follow(
                    container, start, lambda s: ENDING if self._stop.is_set() else self._why_over(s)
                )
                break
            except DockerLostError:
                self._connection.wait()
                start = None if self._stop.is_set() else started(container)
        return Outcome(result, time.monotonic() - began, detail, before, container.id)

    def _reason(self, waited: float) -> str:
        return ENDING if self._stop.is_set() else self._why_over(waited)


def put(history: History, action: str, service: str, cause: str, outcome: Outcome) -> None:
    """Append to the history. A full disk is said, and keeps no engine from being restarted."""
    record = Record(
        time=now(),
        service=service,
        action=action,
        cause=cause,
        result=outcome.result,
        seconds=round(outcome.seconds, 3),
        before=outcome.before,
        after=outcome.after,
        detail=outcome.detail,
    )
    try:
        history.append(record)
    except OSError as error:
        log.error("the history cannot be written: %s", error)


def said(action: str, service: str, outcome: Outcome) -> str:
    """One line about what became of an action."""
    after = f"{outcome.seconds:.1f} s after {action}"
    detail = f" ({outcome.detail})" if outcome.detail else ""
    match outcome.result:
        case "healthy":
            return f"{service} healthy {after}"
        case "running":
            return f"{service} running {after} (it has no health check)"
        case "exited":
            return f"{service} exited {outcome.detail} {after}: see docker logs {outcome.after[:12]}"
        case "unhealthy":
            return f"{service} unhealthy {after}{detail}: see docker logs {outcome.after[:12]}"
        case "starting":
            return f"{service} still starting {after}{detail}"
        case "skipped":
            return f"{service} left down: {outcome.detail}; the change counts when it is started by hand"
        case _:
            return f"{service} {action} failed: {outcome.detail}"
