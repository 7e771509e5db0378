"""Carries out an action on a service, follows its containers, says what became of them and puts it on record."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from docker.models.containers import Container

from weightkeeper.errors import ConfigError, DockerLostError, NotSupervisedError, ServiceError
from weightkeeper.supervisor import last_words
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import Engines, Started, is_stopped, started
from weightkeeper.supervisor.follow import Outcome, follow
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.launched import Launched, Replaced, newest_before
from weightkeeper.supervisor.plan import Action
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.say import tell
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""To act on a container while Docker keeps being lost."""

ENDING = "the supervisor was told to end"

Ended = Literal["good", "kept", "bad"]
"""What was asked for serves, or may still come to serve; what served before serves on, or again; nothing serves."""


class Actor:
    """Reloads, restarts and recreates the engines of one project.

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

    def reload(self, action: Action, program: Program, is_rolled_back: bool = True) -> Ended:
        """Have a launcher check the config file and replace its server.

        Args:
            is_rolled_back: a configuration that does not come up is replaced by the last good one, once.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; nothing was done.
        """
        ended = self._tell(action, self._reload(action, program))
        if ended != "bad" or not is_rolled_back or self._stop.is_set():
            return ended
        log.warning(
            "roll back %s to the last configuration that was healthy: the new one did not come up", action.service
        )
        back = Action(action.service, "the new configuration did not come up")
        ended = self._tell(back, self._reload(back, program, "--last-good"), "rollback")
        return "kept" if ended == "good" else "bad"

    def is_passed(self, action: Action, program: Program) -> bool:
        """Whether every launcher lets the config file pass. A refusal is told, no more is done. Raises as `reload`."""
        return self._tell(action, self._refusals(action, program)) == "good"

    def restart(self, action: Action, is_start: bool = False) -> Ended:
        """Restart a service's containers, one after the other. Raises as `reload`.

        Args:
            is_start: start also those that are stopped; without it they are left down.
        """
        return self._tell(action, self._restart(action.service, is_start))

    def start(self, action: Action) -> Ended:
        """Start a service's containers and follow them. Raises as `reload`."""
        return self._tell(action, self._start(action.service), "start")

    def recreate(self, action: Action, compose: Compose, good: Mapping[str, Any] | None) -> Ended:
        """Give a service containers of the present definition, or again of the last good one. Stopped ones stay.

        Args:
            good: the whole project as it was when this service was healthy last.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; it can be done again, what is done by then counts.
        """
        ended = self._tell(action, self._recreate(action.service, compose, None))
        if ended != "bad" or good is None or self._stop.is_set():
            return ended
        log.warning("roll back %s to the last definition that was healthy: the new one did not come up", action.service)
        back = Action(action.service, "the new definition did not come up")
        ended = self._tell(back, self._recreate(action.service, compose, good), "rollback")
        return "kept" if ended == "good" else "bad"

    def reloads(self, service: str, program: Program) -> int | None:
        """How often the launchers of a service have read their files again; None where that is not known.

        Raises:
            DockerLostError: Docker does not answer.
        """
        count = 0
        try:
            for container in self._engines.containers(service):
                status = Launched(container, program, self._stop).status()
                if status is None:
                    return None
                count += status.restarts.get("reload", 0)
        except ServiceError:
            return None
        return count

    def _tell(self, action: Action, outcomes: Iterator[Outcome], verb: str = "") -> Ended:
        """Say and record each outcome; the worst of them."""
        verb = verb or action.verb
        found: set[Ended] = set()
        try:
            for outcome in outcomes:
                tell(self._history, verb, action, outcome)
                kept = outcome.result in ("refused", "failed")
                found.add("kept" if kept else "good" if outcome.is_good or outcome.is_open else "bad")
        except NotSupervisedError:
            raise
        except ServiceError as error:
            found.add("bad")
            tell(self._history, verb, action, Outcome("failed", 0.0, str(error)))
        return "bad" if "bad" in found else "kept" if "kept" in found else "good"

    def _reload(self, action: Action, program: Program, *options: str) -> Iterator[Outcome]:
        for container in self._engines.containers(action.service):
            if self._stop.is_set():
                return
            if is_stopped(container.attrs):
                yield Outcome("skipped", 0.0, f"{container.name} is stopped", container.id, container.id)
            elif container.attrs["State"]["Status"] != "running":
                # It reads its file when it starts, and nobody is in there to be asked.
                yield from self._restart_one(container)
            else:
                began = time.monotonic()
                try:
                    replaced = self._replaced(container, program, action.cause, options)
                except ConfigError as error:
                    replaced = Replaced("refused", str(error))
                except ServiceError as error:  # the launcher does not answer, so nothing is known to have changed
                    replaced = Replaced("failed", str(error))
                yield _outcome(replaced, began, container, container.id)

    def _refusals(self, action: Action, program: Program) -> Iterator[Outcome]:
        for container in self._engines.containers(action.service):
            if container.attrs["State"]["Status"] != "running":
                continue  # nobody is in there to be asked
            began = time.monotonic()
            try:
                Launched(container, program, self._stop).ask_to_check(action.cause)
            except ConfigError as error:
                yield Outcome("refused", time.monotonic() - began, str(error), container.id, container.id)
            except ServiceError as error:
                log.warning("%s cannot be asked to check its configuration first: %s", container.name, error)

    def _replaced(self, container: Container, program: Program, cause: str, options: tuple[str, ...]) -> Replaced:
        """Ask once: where Docker's answer is lost, the container's start and the launcher's generation tell."""
        launched = Launched(container, program, self._stop)
        start, before, is_asked = started(container), None, False
        for _ in range(ATTEMPTS):
            try:
                status = launched.status()
                before = status if before is None else before
                if status is None or before is None:
                    return Replaced("starting", ENDING)
                if not (is_asked and status.generation > newest_before(before, status)):
                    is_asked = True
                    if not launched.ask_to_reload(cause, *options):
                        return Replaced("starting", ENDING)
                return launched.follow(before, self._reason)
            except DockerLostError:
                self._connection.wait()
                if self._stop.is_set():
                    return Replaced("starting", ENDING)
                after = started(container)
                if after.at != start.at:
                    return Replaced(*follow(container, after, self._reason))
        raise ServiceError(f"Docker gave no answer to {ATTEMPTS} requests about {container.name}")

    def _restart(self, service: str, is_start: bool) -> Iterator[Outcome]:
        for container in self._engines.containers(service):
            if self._stop.is_set():
                return
            if is_stopped(container.attrs) and not is_start:
                yield Outcome("skipped", 0.0, f"{container.name} is stopped", container.id, container.id)
                continue
            yield from self._restart_one(container)

    def _start(self, service: str) -> Iterator[Outcome]:
        for container in self._engines.containers(service):
            began = time.monotonic()
            self.followed.add(container.id)
            try:
                yield self._follow(container, self._engines.start(container), began, container.id)
            finally:
                self.followed.discard(container.id)

    def _restart_one(self, container: Container) -> Iterator[Outcome]:
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

    def _recreate(self, service: str, compose: Compose, resolved: Mapping[str, Any] | None) -> Iterator[Outcome]:
        began = time.monotonic()
        before = {container.id: container.attrs for container in self._engines.containers(service)}
        ids = " ".join(before)
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

    def _follow(self, container: Container, start: Started | None, began: float, before: str) -> Outcome:
        """Docker may be lost and come back meanwhile; then the container's latest start counts."""
        result, detail = "starting", ENDING
        while start and not self._stop.is_set():
            try:
                result, detail = follow(container, start, self._reason)
                break
            except DockerLostError:
                self._connection.wait()
                start = None if self._stop.is_set() else started(container)
        return _outcome(Replaced(result, detail), began, container, before)

    def _reason(self, waited: float) -> str:
        return ENDING if self._stop.is_set() else self._why_over(waited)


def _outcome(replaced: Replaced, began: float, container: Container, before: str) -> Outcome:
    """Of an action that began at that monotonic time, with what the server said of its start or its end."""
    seconds, detail = time.monotonic() - began, replaced.detail
    if replaced.result in ("exited", "unhealthy"):
        words = last_words.error_in(last_words.lines_of(container, seconds))
        detail = f"{detail} ({words})" if detail and words else detail or words
    elif replaced.result in ("healthy", "running"):
        why = last_words.fallback_in(last_words.lines_of(container, seconds))
        detail = f"weights from disk, {why}" if why else detail
    return Outcome(replaced.result, seconds, detail, before, container.id, replaced.phases)
