"""What the launchers of an engine are asked: to read its configuration again, to check it, how often they have."""

import logging
import time
from collections.abc import Callable, Iterator

from docker.models.containers import Container

from weightkeeper.errors import ConfigError, DockerLostError, ServiceError
from weightkeeper.supervisor import last_words
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import Engines, is_stopped, started
from weightkeeper.supervisor.follow import Outcome, follow
from weightkeeper.supervisor.launched import Launched, Replaced, newest_before
from weightkeeper.supervisor.plan import Action
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.starting import ATTEMPTS, ENDING, Starting
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)


class Reloading:
    """The launchers of one project. Methods raise as those of `Starting`."""

    def __init__(
        self,
        engines: Engines,
        connection: Connection,
        stop: Stop,
        starting: Starting,
        reason: Callable[[float], str],
    ) -> None:
        """`reason` as for `Starting`, of a server that starts."""
        self._engines = engines
        self._connection = connection
        self._stop = stop
        self._starting = starting
        self._reason = reason

    def reload(self, action: Action, program: Program, *options: str) -> Iterator[Outcome]:
        """Have each launcher of a service read its files again, check them and replace its server.

        Args:
            options: more, of `engine-reload`.
        """
        for container in self._engines.containers(action.service):
            if self._stop.is_set():
                yield Outcome("undecided", 0.0, ENDING, container.id, container.id)
            elif is_stopped(container.attrs):
                yield Outcome("skipped", 0.0, f"{container.name} is stopped", container.id, container.id)
            elif container.attrs["State"]["Status"] != "running":
                # It reads its file when it starts, and nobody is in there to be asked.
                yield self._starting.restart_one(container)
            else:
                yield self._reloaded(container, program, action.cause, options)

    def refusals(self, action: Action, program: Program) -> Iterator[Outcome]:
        """Have each launcher that runs check its files, and nothing else done; one that cannot be asked is said."""
        for container in self._engines.existing(action.service):
            if container.attrs["State"]["Status"] != "running":
                continue  # nobody is in there to be asked
            began = time.monotonic()
            try:
                if Launched(container, program, self._stop).ask_to_check(action.cause):
                    continue
                result, detail = "undecided", ENDING
            except ConfigError as error:
                result, detail = "refused", str(error)
            except ServiceError as error:
                log.warning("%s cannot be asked to check its configuration first: %s", container.name, error)
                continue
            yield Outcome(result, time.monotonic() - began, detail, container.id, container.id)

    def count(self, service: str, program: Program) -> int | None:
        """How often the launchers of a service have read their files again; None where that is not known."""
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

    def _reloaded(self, container: Container, program: Program, cause: str, options: tuple[str, ...]) -> Outcome:
        began, since = time.monotonic(), time.time()
        try:
            replaced = self._replaced(container, program, cause, options)
        except ConfigError as error:
            replaced = Replaced("refused", str(error))
        except ServiceError as error:  # the launcher does not answer, so nothing is known to have changed
            replaced = Replaced("failed", str(error))
        seconds = time.monotonic() - began
        outcome = Outcome(replaced.result, seconds, replaced.detail, container.id, container.id, replaced.phases)
        return last_words.added(outcome, container, since, replaced.generation)

    def _replaced(self, container: Container, program: Program, cause: str, options: tuple[str, ...]) -> Replaced:
        """Ask once: where Docker's answer is lost, the container's start and the launcher's generation tell."""
        launched = Launched(container, program, self._stop)
        start, before, is_asked = started(container), None, False
        for _ in range(ATTEMPTS):
            try:
                status = launched.status()
                before = status if before is None else before
                if status is None or before is None:
                    return Replaced("undecided", ENDING)
                if not (is_asked and status.generation > newest_before(before, status)):
                    is_asked = True
                    if not launched.ask_to_reload(cause, *options):
                        return Replaced("undecided", ENDING)
                return launched.follow(before, self._reason)
            except DockerLostError:
                self._connection.wait()
                if self._stop.is_set():
                    return Replaced("undecided", ENDING)
                after = started(container)
                if after.at != start.at:
                    return Replaced(*follow(container, after, self._reason), generation=1)
        raise ServiceError(f"Docker gave no answer to {ATTEMPTS} requests about {container.name}")
