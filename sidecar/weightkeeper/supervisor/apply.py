"""What is applied to the engines, and how an action of a plan is carried out."""

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from docker.models.containers import Container

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor import options, origin
from weightkeeper.supervisor.act import Actor, Ended
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.engines import Engines
from weightkeeper.supervisor.follow import Outcome, nanoseconds
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.plan import Action, Recreate, Refuse, Reload, applied
from weightkeeper.supervisor.project import ConfigFile, Service, Snapshot
from weightkeeper.supervisor.say import tell
from weightkeeper.supervisor.state import Applied, State, of_service
from weightkeeper.supervisor.tried import Tried, start_of
from weightkeeper.supervisor.variables import EnvFile
from weightkeeper.supervisor.weights import Weights

log = logging.getLogger(__name__)

UNKNOWN: Mapping[str, Any] = {"": None}
"""Shaping options of weights of which only the keeper knows: equal to those of no engine."""


class Applier:
    """The engines of one project.

    Attributes:
        now: the project as far as it is applied; to be read after `begin`, as all else is to be called after it.
    """

    now: Snapshot
    _tried: Tried

    def __init__(
        self, engines: Engines, actor: Actor, weights: Weights, state: State, history: History
    ) -> None:  # fmt: skip
        self._engines = engines
        self._actor = actor
        self._weights = weights
        self._state = state
        self._history = history
        self._noted: dict[str, tuple[str, int]] = {}
        self._good: dict[str, Mapping[str, Any]] = {}
        self._supplied: dict[str, Mapping[str, Any]] = {}

    def begin(self, snapshot: Snapshot) -> None:
        """Find out what is applied: by what was written down last, and by the containers that run.

        Raises:
            DockerLostError: Docker does not answer.
        """
        written = self._state.read()
        services, failed = dict(snapshot.services), {}
        for engine in snapshot.engines:
            before = written.get(engine.name)
            if before and before.failed:
                failed[engine.name] = before.failed
            if before and before.good:
                self._good[engine.name] = before.good
            services[engine.name] = self._found(engine, before)
        self.now = replace(snapshot, services=services)
        self._tried = Tried(self._engines, self._actor, failed)
        for engine in snapshot.engines:
            if services[engine.name].hash == engine.hash:
                self._good.setdefault(engine.name, snapshot.resolved)

    def note(self, snapshot: Snapshot) -> None:
        """Remember since when each engine is as in this snapshot, which was read before."""
        for engine in snapshot.engines:
            if self._noted.get(engine.name, ("", 0))[0] != engine.key:
                self._noted[engine.name] = engine.key, time.time_ns()

    def untried(self, actions: list[Action], snapshot: Snapshot) -> list[Action]:
        """Without what was tried for the same files already, and did not come up."""
        return self._tried.untried(actions, snapshot)

    def settle(self) -> None:
        """Count what was tried in vain as applied where its file was read since: the container was started, or somebody
        had the launcher reload.

        Raises:
            DockerLostError: Docker does not answer.
        """
        for service in self._tried.take_read():
            log.info("%s: what was tried in vain was read since, and counts as applied", service.name)
            read = replace(self.now.services[service.name], config=service.config, env_files=service.env_files)
            self.now = replace(self.now, services={**self.now.services, service.name: read})

    def is_started_anew(self) -> bool:
        """Whether something that was tried in vain was read since, because its containers were started."""
        with contextlib.suppress(DockerLostError):
            return self._tried.is_started()
        return False

    def take(self, snapshot: Snapshot, waiting: Collection[str]) -> None:
        """Count a snapshot as applied, but for what waits and what was tried in vain."""
        vain = {name for name in snapshot.services if name in self._tried}
        self.now = applied(self.now, snapshot, {*waiting, *vain})
        self._write()

    def apply(self, action: Action, snapshot: Snapshot, compose: Compose) -> Ended:
        """Carry out one action. One that is `undecided` is neither applied nor tried: it is there to be begun again.

        Raises:
            NotSupervisedError: its container does not carry the label; nothing was done.
            DockerLostError: Docker does not answer; the same action can be begun again.
        """
        service = snapshot.services[action.service]
        before = start_of(self._engines, service.name)
        ended = self._ended(action, service, snapshot, compose)
        if ended == "undecided":
            return ended
        if ended == "kept":
            self._tried.add(service, before if isinstance(action, Reload) else self._start_of(service))
        else:
            self.now = replace(self.now, services={**self.now.services, service.name: service})
            self._supplied.pop(service.name, None)
        if ended == "good":
            self._good[service.name] = snapshot.resolved
        self._write()
        return ended

    def restore_weights(self, snapshot: Snapshot, acted: Collection[str]) -> bool:
        """Have keepers load again what engines go on with, where they hold what was tried in vain; whether any did."""
        has_asked = False
        for name, supplied in list(self._supplied.items()):
            service = snapshot.services.get(name)
            if name in acted or service is None or service.config is None or service.config.values is None:
                continue
            if (wanted := _shaping(service)) != supplied:
                has_asked = True
                action = Action(name, f"{service.config.path.name} asks for the weights of before again")
                if self._weights.supply(action, service, self._sharing(service, snapshot)) in ("held", "started"):
                    self._supplied[name] = wanted
        return has_asked

    def _ended(self, action: Action, service: Service, snapshot: Snapshot, compose: Compose) -> Ended:
        if isinstance(action, Recreate) and (ended := self._is_ours(action, service)):
            return ended
        if action.keeper and self._supplied.get(service.name) != (wanted := _shaping(service)):
            # Before weights are loaded for it, or an engine is stopped: it may be an error of typing.
            is_asked = isinstance(action, Reload) and not self._is_read(service)
            if is_asked and (ended := self._actor.check(action, service.launcher)) != "good":
                return ended
            supply = self._weights.supply(action, service, self._sharing(service, snapshot))
            if supply == "refused":
                return "kept"
            for each in self._sharing(service, snapshot):
                self._supplied[each.name] = wanted if supply != "undecided" else UNKNOWN
            if supply == "undecided":
                return "undecided"
            if supply in ("started", "failed") and not isinstance(action, Recreate):
                return "good" if supply == "started" else "bad"
        if isinstance(action, Recreate):
            return self._actor.recreate(action, compose, self._good.get(service.name))
        if self._is_read(service):
            return self._actor.start(action)
        if isinstance(action, Reload):
            return self._actor.reload(action, service.launcher)
        return self._actor.restart(action)

    def _is_ours(self, action: Action, service: Service) -> Ended | None:
        """How a recreation ended before it began: it was done already, or the container is not made from our files."""
        before = self.now.services[service.name]
        for container in self._engines.existing(service.name):
            if origin.is_made_from(container, before):
                continue
            if origin.is_made_from(container, service):
                log.info("%s: its container is made from these files already", service.name)
                return "good"
            detail = _foreign(container, before)
            refused = Refuse(action.service, action.cause, action.changes)
            tell(self._history, action.verb, refused, Outcome("refused", 0.0, detail, container.id, container.id))
            return "kept"
        return None

    def _is_read(self, service: Service) -> bool:
        """Whether its containers were all started after it was noted: what Docker, lost and back, starts reads anew."""
        key, moment = self._noted.get(service.name, ("", 0))
        starts = [one.attrs["State"]["StartedAt"] for one in self._engines.existing(service.name)]
        return bool(starts) and key == service.key and all(nanoseconds(start) > moment for start in starts)

    def _start_of(self, service: Service) -> str | None:
        with contextlib.suppress(DockerLostError):
            return start_of(self._engines, service.name)
        return None

    def _found(self, engine: Service, before: Applied | None) -> Service:
        """An engine as its containers have it, as far as that can be known."""
        try:
            containers = self._engines.containers(engine.name)
        except ServiceError:
            return engine
        for container in containers:
            if before and before.hash and container.labels.get(origin.HASH_LABEL) == before.hash != engine.hash:
                engine = replace(engine, definition=before.definition, hash=before.hash)
            elif not origin.is_made_from(container, engine):
                log.warning("%s: %s", engine.name, _foreign(container, engine))
            at = container.attrs["State"]["StartedAt"]
            if before:
                engine = _as_read(engine, before, at)
        return engine

    @staticmethod
    def _sharing(service: Service, snapshot: Snapshot) -> list[Service]:
        return [each for each in snapshot.engines if each.keeper == service.keeper and each.config == service.config]

    def _write(self) -> None:
        written = {}
        for engine in self.now.engines:
            try:
                started = start_of(self._engines, engine.name)
            except DockerLostError:
                return  # what is there is nearer to the truth
            good = self._good.get(engine.name, {})
            written[engine.name] = of_service(engine, started, self._tried.key(engine.name), good)
        self._state.write(written)


def _as_read(engine: Service, before: Applied, started: str) -> Service:
    """An engine with its files as a container that was started then has read them, by the record where that is newer.

    Args:
        engine: with its files as they are now.
    """
    was = before.service(engine)
    if before.started == started:
        return replace(engine, config=was.config or engine.config, env_files=was.env_files)
    config = was.config if was.config and not _is_read_at(engine.config, started) else engine.config
    texts = {file.path: file for file in was.env_files}
    env_files = (file if _is_read_at(file, started) else texts.get(file.path, file) for file in engine.env_files)
    return replace(engine, config=config, env_files=tuple(env_files))


def _is_read_at(file: ConfigFile | EnvFile | None, started: str) -> bool:
    """Whether a container that was started then has read the file as it is now."""
    if file is None:
        return True
    try:
        status = file.path.stat()
    except OSError:
        return False
    return max(status.st_mtime_ns, status.st_ctime_ns) < nanoseconds(started)


def _shaping(service: Service) -> Mapping[str, Any]:
    """The options of an engine that shape its weights."""
    values = service.config.values if service.config and service.config.values else {}
    return {name: value for name, value in values.items() if options.effect(name).kind == "weights"}


def _foreign(container: Container, service: Service) -> str:
    return (
        f"its container {container.name} was made with other values than Compose resolves here"
        f" ({origin.differences(container, service)}); put them into .env, or run"
        f" `docker compose up -d {service.name}` yourself"
    )
