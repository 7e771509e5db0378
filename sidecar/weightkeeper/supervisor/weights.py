"""New weights for an engine, without touching the sidecar's container: its keeper is asked to load them."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from docker.models.containers import Container

from weightkeeper.errors import ServiceError
from weightkeeper.protocol import Status
from weightkeeper.quantities import bytes_text
from weightkeeper.supervisor import inside, keepers
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.engines import Engines, is_stopped
from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.keepers import Keeper
from weightkeeper.supervisor.plan import Action
from weightkeeper.supervisor.project import Service
from weightkeeper.supervisor.say import tell
from weightkeeper.supervisor.starting import ENDING
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)

ASK_SECONDS = 60.0
"""For an answer about headers and memory; headers may lie on a network file system."""

LOAD_SECONDS = 6 * 3600.0
"""For a load. The keeper itself sets no limit."""

LOOK_SECONDS = 0.5

Supply = Literal["held", "started", "refused", "failed", "undecided"]
"""The keeper holds the new weights; so it does, and the engine was stopped for it and started again; nothing was done;
the engine was stopped, and started again without them; we were told to end before it was known, or the config file
changed while it was read."""


class Room(msgspec.Struct, frozen=True):
    """What `weightkeeper room` says, in bytes; `free` is None where it cannot be known."""

    needed: int
    free: int | None
    bound: str = ""

    @property
    def is_enough(self) -> bool:
        return self.free is not None and self.needed <= self.free


@dataclass(slots=True)
class Weights:
    """Asks the keepers of one project for new weights."""

    engines: Engines
    actor: Actor
    history: History
    stop: Stop

    def supply(self, action: Action, service: Service, sharing: Iterable[Service]) -> Supply:
        """Have the keeper hold what the engine's config file asks for now.

        Args:
            action: that needs the weights.
            service: the engine, as it is to become.
            sharing: all engines on the same keeper, this one too.

        Raises:
            DockerLostError: Docker does not answer.
        """
        keeper = service.keeper
        try:
            container = self.engines.running(keeper.service)
            room = self._room(container, keeper)
            if room is None:
                return self._undecided(action)
            if room.is_enough:
                return self._load(action, service, container)
            text = _too_little(room)
            if keepers.policy(service.definition) != "swap":
                remedy = f"label {keepers.POLICY_LABEL}: swap lets the engine be stopped meanwhile"
                self._tell(action, "load", Outcome("refused", 0.0, f"{text}; {remedy}"))
                return "refused"
            log.warning("swap the weights of %s: %s", action.service, text)
            return self._swap(action, service, container, [each.name for each in sharing])
        except ServiceError as error:
            if self.stop.is_set():  # the keeper may be ending with all of the project
                return self._undecided(action)
            self._tell(action, "load", Outcome("refused", 0.0, f"the keeper cannot be asked: {error}"))
            return "refused"

    def _room(self, container: Container, keeper: Keeper) -> Room | None:
        config = keeper.program.option("--config")
        command = keeper.program.alone("room", *(("--config", config) if config else ()))
        done = inside.run(container, command, ASK_SECONDS, self.stop)
        if done is None:
            return None
        if done.code:
            raise ServiceError(done.reason)
        return msgspec.json.decode(done.output, type=Room)

    def _load(self, action: Action, service: Service, container: Container) -> Supply:
        keeper, began = service.keeper, time.monotonic()
        self._wait_for_quiet(container, keeper)
        done = self._run(container, keeper, LOAD_SECONDS, "load", "--wait")
        seconds = time.monotonic() - began
        if done is None or (done.code and self.stop.is_set()):
            return self._undecided(action)
        if done.code:
            detail = f"the new weights cannot be loaded: {done.reason}"
            self._tell(action, "load", Outcome("refused", seconds, detail))
            return "refused"
        said = done.output.strip().rpartition("\n")[2]
        if _is_changed(service):  # the keeper may have read either
            detail = f"{service.config.path.name} changed meanwhile, and is looked at again; the keeper says: {said}"
            self._tell(action, "load", Outcome("undecided", seconds, detail, container.id, container.id))
            return "undecided"
        self._tell(action, "load", Outcome("done", seconds, said, container.id, container.id))
        return "held"

    def _wait_for_quiet(self, container: Container, keeper: Keeper) -> None:
        """A load that runs may have read the file of before."""
        while not self.stop.is_set():
            done = self._run(container, keeper, ASK_SECONDS, "status", "--json")
            if done is None or done.code or msgspec.json.decode(done.output, type=Status).loading is None:
                return
            self.stop.wait(LOOK_SECONDS)

    def _swap(self, action: Action, service: Service, container: Container, services: list[str]) -> Supply:
        keeper, stopped = service.keeper, self._stop_engines(services)
        try:
            done = self._run(container, keeper, ASK_SECONDS, "release", "--force")
            if done is not None and done.code:
                raise ServiceError(done.reason)
            supply = self._load(action, service, container) if done else self._undecided(action)
            if supply == "held":
                return "started" if action.service in stopped else "held"
            if supply == "undecided":
                return supply
            return "failed" if action.service in stopped else "refused"
        finally:
            for name in stopped:
                self.actor.start(Action(name, f"the weights of {keeper.service} were swapped"))

    def _stop_engines(self, services: list[str]) -> list[str]:
        stopped = []
        for name in services:
            for container in self.engines.existing(name):
                if not is_stopped(container.attrs):
                    self.engines.stop(container)
                    stopped.append(name)
        return list(dict.fromkeys(stopped))

    def _run(self, container: Container, keeper: Keeper, limit_s: float, *command: str) -> inside.Done | None:
        return inside.run(container, keeper.program.command(*command), limit_s, self.stop)

    def _undecided(self, action: Action) -> Supply:
        self._tell(action, "load", Outcome("undecided", 0.0, ENDING))
        return "undecided"

    def _tell(self, action: Action, verb: str, outcome: Outcome) -> None:
        tell(self.history, verb, action, outcome)


def _too_little(room: Room) -> str:
    if room.free is None:
        return f"old and new weights may not fit beside each other: {room.bound}"
    needed, free = bytes_text(room.needed), bytes_text(room.free)
    return f"the new weights need {needed} beside the old ones, {free} are free ({room.bound})"


def _is_changed(service: Service) -> bool:
    """Whether the config file is another one than when the action was decided. One that is gone is the next plan's."""
    try:
        return service.config.path.read_bytes() != service.config.text
    except OSError:
        return False
