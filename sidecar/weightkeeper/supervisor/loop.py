"""The supervisor: changes that came to rest go in, decisions come out, one log line each."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weightkeeper.errors import ComposeError, DockerLostError, NotSupervisedError, ServiceError
from weightkeeper.supervisor import place, project, sources
from weightkeeper.supervisor.act import Actor, put
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.deaths import Death, Deaths, Recovery
from weightkeeper.supervisor.engines import Engines, policy
from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.plan import Action, Nothing, Recreate, applied, plan
from weightkeeper.supervisor.project import Snapshot, one_line
from weightkeeper.supervisor.stop import Stop
from weightkeeper.supervisor.watch import Timing, Watch

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long an engine that still starts is followed while another change waits."""

READS = 5
"""A read that finds files nobody watched yet is repeated; a project that names others each time is given up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a supervisor is told."""

    compose: Compose
    state_dir: Path
    timing: Timing


class Supervisor:
    """Keeps the engines of one compose project at what its files say."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._settings = settings
        self._stop = stop
        self._connection = Connection(stop)
        self._history = History(settings.state_dir)
        self._watch = Watch(settings.timing, stop)
        self._compose = settings.compose
        self._applied: Snapshot | None = None
        self._actor: Actor | None = None
        self._said: dict[str, object] = {}
        self._noticed: set[str] = set()

    def run(self) -> None:
        """Supervise until told to end.

        Raises:
            ConfigError: the state directory cannot be written, or the project lies elsewhere on the host.
        """
        self._history.check()
        self._compose = place.here(self._settings.compose, self._connection)
        self._begin()
        for changed in self._watch.changes():
            if self._applied is None:
                self._begin()
            else:
                self._handle(changed)
        log.info("ended")

    def _begin(self) -> None:
        """Take the project as it is for applied; where it cannot be read yet, that waits for another change."""
        snapshot = self._read()
        if snapshot is None:
            return
        engines = Engines(snapshot.name, self._connection, self._stop)
        self._applied = snapshot
        self._actor = Actor(engines, self._connection, self._history, self._stop, self._why_over)
        Deaths(snapshot.name, self._connection, self._tell, self._stop).begin()
        for engine in snapshot.engines:
            if engine.config and engine.config.fault:
                self._say(Nothing(engine.name, engine.config.fault), [engine.config.path])
            try:
                if any(policy(container.attrs) == "no" for container in engines.containers(engine.name)):
                    log.warning("%s has no restart policy; after a crash nobody starts it", engine.name)
            except (ServiceError, DockerLostError) as error:
                log.warning("%s", error)
        if not snapshot.engines:
            log.warning("no service carries the label %s: true; there is nothing to supervise", project.LABEL)
        named = [f"{one.name} ({one.config.path if one.config else 'no config file'})" for one in snapshot.engines]
        log.info("supervising %s in %s: %s", snapshot.name, self._compose.directory, ", ".join(named) or "no engine")

    def _handle(self, changed: Iterable[Path]) -> None:
        """Plan and act until nothing is left to do; what comes meanwhile goes into the next plan."""
        while not self._stop.is_set():
            snapshot = self._read()
            if snapshot is None:
                return
            actions = plan(self._applied, snapshot)
            told = [self._tell_nothing(action, snapshot) for action in actions if isinstance(action, Nothing)]
            rest = [action for action in actions if not isinstance(action, Nothing)]
            if not rest and not any(told):
                names = ", ".join(sorted(path.name for path in changed))
                log.info("nothing to do: %s changed, no value did", names)
            try:
                if self._act(rest, snapshot):
                    return
            except DockerLostError:
                self._connection.wait()
            changed = self._watch.settle() | frozenset(changed)

    def _act(self, actions: list[Action], snapshot: Snapshot) -> bool:
        """Carry out the actions one by one; whether all were, before the files changed again."""
        waiting = {action.service for action in actions}
        self._applied = applied(self._applied, snapshot, waiting)
        for action in actions:
            log.info("%s", action)
            try:
                if isinstance(action, Recreate):
                    self._actor.recreate(action.service, action.cause, self._compose)
                else:
                    self._actor.restart(action.service, action.cause)
            except NotSupervisedError as error:
                log.error("%s", error)
            waiting.discard(action.service)
            self._applied = applied(self._applied, snapshot, waiting)
            if self._stop.is_set() or (waiting and self._watch.has_changed()):
                break
        return not waiting

    def _read(self) -> Snapshot | None:
        """The project of now, every file of it watched before it was read. None, and said, where Compose refuses it."""
        configs = self._applied.config_files if self._applied else frozenset()
        for _ in range(READS):
            found = sources.find(self._compose)
            self._watch.take_part(found.files | configs)
            try:
                snapshot = project.read(self._compose)
            except ComposeError as error:
                self._say(Nothing("every engine", one_line(str(error))), self._watch.files)
                return None
            configs = snapshot.config_files
            if configs <= self._watch.files:
                break
        self._watch.take_part(found.files | configs)
        self._say_notices([*snapshot.notices, *found.notices])
        if self._applied and snapshot.name != self._applied.name:
            cause = f"the project is now called {snapshot.name}; start the supervisor again for it"
            self._say(Nothing("every engine", cause), self._watch.files)
            return None
        self._said.pop("every engine", None)
        return snapshot

    def _tell_nothing(self, action: Nothing, snapshot: Snapshot) -> bool:
        """Say why nothing is done; whether that had not been said yet. Only a fault stays in the plan after that."""
        service = snapshot.services.get(action.service)
        if service and service.config and service.config.fault:
            return self._say(action, [service.config.path])
        log.warning("%s", action)
        return True

    def _say(self, action: Nothing, paths: Iterable[Path]) -> bool:
        """Log a line, unless it was said for the same content of these files."""
        content = (str(action), self._watch.digest(sorted(paths)))
        if self._said.get(action.service) == content:
            return False
        self._said[action.service] = content
        log.warning("%s", action)
        return True

    def _say_notices(self, notices: list[str]) -> None:
        for path in place.single_mounts(self._watch.files):
            notices.append(
                f"{path} is a mount of its own: a save by rename is never seen here; mount its directory."
                f" Its content is looked at every {self._settings.timing.poll} s"
            )
        for notice in notices:
            if notice not in self._noticed:
                log.warning("%s", notice)
        self._noticed = set(notices)

    def _why_over(self, waited: float) -> str:
        return "another change waits" if waited > PATIENCE_SECONDS and self._watch.has_changed() else ""

    def _tell(self, fact: Death | Recovery) -> None:
        """Say and record what happened to an engine without anybody asking; what we follow, the action tells."""
        container = fact.death.container if isinstance(fact, Recovery) else fact.container
        if container in self._actor.followed:
            return
        if isinstance(fact, Recovery):
            log.info("%s healthy %.1f s after it went down", fact.death.service, fact.seconds)
            outcome = Outcome("healthy", fact.seconds, "", container, container)
            put(self._history, "start", fact.death.service, fact.death.cause, outcome)
        elif fact.is_told:
            log.error("%s went down by itself: %s", fact.service, fact.cause)
            outcome = Outcome("exited", 0.0, "", container, container)
            put(self._history, "crash", fact.service, fact.cause, outcome)
