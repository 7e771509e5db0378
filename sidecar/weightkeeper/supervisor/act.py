"""Carries out an action on a service, says what became of it and puts it on record; takes back what did not come up."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from weightkeeper.errors import NotSupervisedError, ServiceError
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import Engines
from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.plan import Action
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.reloading import Reloading
from weightkeeper.supervisor.say import tell
from weightkeeper.supervisor.starting import ENDING, Starting
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)

Ended = Literal["good", "kept", "bad", "undecided"]
"""What was asked for serves, or may still come to serve; what served before serves on, or again; nothing serves; we
were told to end before one of these was known, and the next supervisor has to begin again."""


class Actor:
    """Reloads, restarts and recreates the engines of one project."""

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
        self._history = history
        self._stop = stop
        self._why_over = why_over
        self._starting = Starting(engines, connection, stop, self._reason)
        self._reloading = Reloading(engines, connection, stop, self._starting, self._reason)

    @property
    def followed(self) -> set[str]:
        """Ids of the containers whose fate is being told here and now."""
        return self._starting.followed

    def reload(self, action: Action, program: Program, is_rolled_back: bool = True) -> Ended:
        """Have a launcher check the config file and replace its server.

        Args:
            is_rolled_back: a configuration that does not come up is replaced by the last good one, once.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; nothing was done.
        """
        ended = self._tell(action, self._reloading.reload(action, program))
        if ended != "bad" or not is_rolled_back:
            return ended
        back = Action(action.service, "the new configuration did not come up")
        return self._roll_back(back, "configuration", self._reloading.reload(back, program, "--last-good"))

    def check(self, action: Action, program: Program) -> Ended:
        """`kept` where a launcher refuses the config file, which is told; else nothing is. Raises as `reload`."""
        return self._tell(action, self._reloading.refusals(action, program), "check")

    def restart(self, action: Action, is_start: bool = False) -> Ended:
        """Restart a service's containers, one after the other. Raises as `reload`.

        Args:
            is_start: start also those that are stopped; without it they are left down.
        """
        return self._tell(action, self._starting.restart(action.service, is_start))

    def start(self, action: Action) -> Ended:
        """Start a service's containers and follow them. Raises as `reload`."""
        return self._tell(action, self._starting.start(action.service), "start")

    def recreate(self, action: Action, compose: Compose, good: Mapping[str, Any] | None) -> Ended:
        """Give a service containers of the present definition, or again of the last good one. Stopped ones stay.

        Args:
            good: the whole project as it was when this service was healthy last.

        Raises:
            NotSupervisedError: a container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; it can be done again, what is done by then counts.
        """
        ended = self._tell(action, self._starting.recreate(action.service, compose, None))
        if ended != "bad" or good is None:
            return ended
        back = Action(action.service, "the new definition did not come up")
        return self._roll_back(back, "definition", self._starting.recreate(action.service, compose, good))

    def reloads(self, service: str, program: Program) -> int | None:
        """How often the launchers of a service have read their files again; None where that is not known.

        Raises:
            DockerLostError: Docker does not answer.
        """
        return self._reloading.count(service, program)

    def _roll_back(self, back: Action, what: str, outcomes: Iterator[Outcome]) -> Ended:
        """Of something that is bad. Where there is no container, nothing can be brought back."""
        if not self._engines.existing(back.service):
            return "bad"
        log.warning("roll back %s to the last %s that was healthy: the new one did not come up", back.service, what)
        ended = self._tell(back, outcomes, "rollback")
        if ended == "bad" and not self._engines.existing(back.service):
            return "bad"
        # Otherwise it is the last good one that is there, also where that one did not come up at once.
        return "undecided" if ended == "undecided" else "kept"

    def _tell(self, action: Action, outcomes: Iterator[Outcome], verb: str = "") -> Ended:
        """Say and record each outcome; the worst of them."""
        verb = verb or action.verb
        found: set[Ended] = set()
        try:
            for outcome in outcomes:
                tell(self._history, verb, action, outcome)
                found.add(_ended(outcome))
        except NotSupervisedError:
            raise
        except ServiceError as error:
            found.add("bad")
            tell(self._history, verb, action, Outcome("failed", 0.0, str(error)))
        if "bad" in found and self._stop.is_set():
            return "undecided"  # it may be bad because all of the project ends, and nothing is rolled back any more
        return next((ended for ended in ("undecided", "bad", "kept") if ended in found), "good")

    def _reason(self, waited: float) -> str:
        return ENDING if self._stop.is_set() else self._why_over(waited)


def _ended(outcome: Outcome) -> Ended:
    """What an outcome means for the edit that it comes from."""
    if outcome.result == "undecided" or outcome.detail == ENDING:  # nobody saw what became of it
        return "undecided"
    if outcome.result in ("refused", "failed"):
        return "kept"
    return "good" if outcome.is_good or outcome.is_open else "bad"
