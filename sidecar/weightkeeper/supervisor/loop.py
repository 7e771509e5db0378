"""The supervisor: changes that came to rest go in, decisions come out, one log line each."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weightkeeper.errors import ComposeError, DockerLostError, ServiceError
from weightkeeper.quantities import one_line
from weightkeeper.supervisor import images, place, project, sources
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.alone import Alone
from weightkeeper.supervisor.apply import Applier
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.deaths import Death, Deaths, Recovery
from weightkeeper.supervisor.engines import Engines, policy
from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.measure import Measure
from weightkeeper.supervisor.plan import Action, Nothing, Refuse, plan
from weightkeeper.supervisor.project import Snapshot
from weightkeeper.supervisor.say import put
from weightkeeper.supervisor.state import State
from weightkeeper.supervisor.stop import Stop
from weightkeeper.supervisor.watch import Timing, Watch
from weightkeeper.supervisor.weights import Weights

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long an engine that still starts is followed while another change waits."""

READS = 5
"""A read that finds files nobody watched yet is repeated; a project that names others each time is given up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a supervisor is told.

    Attributes:
        metrics: host and port at which metrics are answered; None for nowhere.
    """

    compose: Compose
    state_dir: Path
    timing: Timing
    metrics: tuple[str, int] | None = None


class Supervisor:
    """Keeps the engines of one compose project at what its files say."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._settings = settings
        self._stop = stop
        self._connection = Connection(stop)
        measure = Measure(*settings.metrics) if settings.metrics else None
        if measure:
            log.info("metrics on port %d", measure.port)
        self._history = History(settings.state_dir, observe=measure.count if measure else lambda _: None)
        self._watch = Watch(settings.timing, stop, self._is_read_since)
        self._compose = settings.compose
        self._applier: Applier | None = None
        self._actor: Actor | None = None
        self._alone: Alone | None = None
        self._said: dict[str, object] = {}
        self._interrupted: Action | None = None
        self._noticed: set[str] = set()

    def run(self) -> None:
        """Supervise until told to end.

        Raises:
            ConfigError: the state directory cannot be written, the project lies elsewhere on the host, or another
                supervisor is at work on it.
        """
        self._history.check()
        self._compose = place.here(self._settings.compose, self._connection)
        self._begin()
        for changed in self._watch.changes():
            if self._applier is None:
                self._begin()
            else:
                self._handle(changed)
        log.info("ended")

    def _begin(self) -> None:
        """Find out what is applied, and apply the rest. Where the project cannot be read, that waits for a change."""
        snapshot = self._read(None)
        if snapshot is None:
            return
        while not self._stop.is_set():
            try:
                self._take_over(snapshot)
                break
            except DockerLostError:
                self._connection.wait()
        if self._applier:
            self._handle((), snapshot)

    def _take_over(self, snapshot: Snapshot) -> None:
        self._alone = self._alone or Alone(
            self._settings.state_dir, self._compose, snapshot.name, self._connection
        )  # fmt: skip
        engines = Engines(snapshot.name, self._connection, self._stop)
        self._actor = Actor(engines, self._connection, self._history, self._stop, self._why_over)
        weights = Weights(engines, self._actor, self._history, self._stop)
        state = State(self._settings.state_dir, snapshot.name)
        applier = Applier(engines, self._actor, weights, state, self._history)
        applier.begin(snapshot)
        Deaths(snapshot.name, self._connection, self._tell, self._stop).begin()
        for engine in snapshot.engines:
            try:
                if any(policy(container.attrs) == "no" for container in engines.containers(engine.name)):
                    log.warning("%s has no restart policy; after a crash nobody starts it", engine.name)
            except (ServiceError, DockerLostError) as error:
                log.warning("%s", error)
        if not snapshot.engines:
            log.warning("no service carries the label %s: true; there is nothing to supervise", project.LABEL)
        for orphan in engines.orphans(snapshot.services):
            log.warning("%s is no service of the project any more; end it with `docker rm -f %s`", orphan, orphan)
        named = [f"{one.name} ({one.config.path if one.config else 'no config file'})" for one in snapshot.engines]
        log.info("supervising %s in %s: %s", snapshot.name, self._compose.directory, ", ".join(named) or "no engine")
        self._applier = applier

    def _handle(self, changed: Iterable[Path], snapshot: Snapshot | None = None) -> None:
        """Plan and act until nothing is left to do; what comes meanwhile goes into the next plan.

        Args:
            snapshot: the project as it was just read, where it was.
        """
        while not self._stop.is_set():
            snapshot = snapshot or self._read(self._applier.now)
            if snapshot is None:
                return
            try:
                if self._apply(snapshot, changed):
                    return
            except DockerLostError:
                self._connection.wait()
            snapshot = None
            changed = self._watch.settle() | frozenset(changed)

    def _apply(self, snapshot: Snapshot, changed: Iterable[Path]) -> bool:
        """Plan, say what is kept, and carry out the rest; whether all was, before the files changed again."""
        self._applier.note(snapshot)
        self._applier.settle()
        pairs = images.pairs(self._applier.now, snapshot, self._connection)
        planned = self._applier.untried(plan(self._applier.now, snapshot, pairs), snapshot)
        told = [self._tell_kept(one, snapshot) for one in planned if isinstance(one, Nothing | Refuse)]
        actions = [action for action in planned if not isinstance(action, Nothing | Refuse)]
        waiting = {action.service for action in actions}
        self._applier.take(snapshot, waiting | {one.service for one in planned if isinstance(one, Refuse)})
        is_restored = self._applier.restore_weights(snapshot, waiting)
        if changed and not (actions or is_restored or any(told)):
            log.info("nothing to do: %s changed, no value did", ", ".join(sorted(path.name for path in changed)))
        return self._act(actions, waiting, snapshot)

    def _act(self, actions: list[Action], waiting: set[str], snapshot: Snapshot) -> bool:
        """Carry out the actions one by one; whether all were, before the files changed again."""
        for action in actions:
            if action != self._interrupted:
                log.info("%s", action)
            self._interrupted = action  # and stays so where Docker is lost on the way: it is not said twice
            try:
                self._applier.apply(action, snapshot, self._compose)
            except ServiceError as error:  # not ours to touch, or Docker refuses to say what is there
                log.error("%s", error)
            self._interrupted = None
            waiting.discard(action.service)
            if self._stop.is_set() or (waiting and self._watch.has_changed()):
                break
        return not waiting

    def _read(self, applied: Snapshot | None) -> Snapshot | None:
        """The project of now, every file of it watched before it was read. None, and said, where Compose refuses it."""
        configs = applied.config_files if applied else frozenset()
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
        if applied and snapshot.name != applied.name:
            cause = f"the project is now called {snapshot.name}; start the supervisor again for it"
            self._say(Nothing("every engine", cause), self._watch.files)
            return None
        self._said.pop("every engine", None)
        return snapshot

    def _tell_kept(self, action: Nothing | Refuse, snapshot: Snapshot) -> bool:
        """Say why nothing is done; whether that had not been said yet. A fault and a refusal stay in the plan."""
        service = snapshot.services.get(action.service)
        if service and (service.fault or isinstance(action, Refuse)):
            return self._say(action, [file.path for file in service.files])
        log.warning("%s", action)
        return True

    def _say(self, action: Action, paths: Iterable[Path]) -> bool:
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

    def _is_read_since(self) -> bool:
        return self._applier is not None and self._applier.is_started_anew()

    def _tell(self, fact: Death | Recovery) -> None:
        """Say and record what happened to an engine without anybody asking; what we follow, the action tells."""
        container = fact.death.container if isinstance(fact, Recovery) else fact.container
        if container in self._actor.followed:
            return
        if isinstance(fact, Recovery):
            outcome = Outcome("healthy", fact.seconds, "", container, container)
            put(self._history, "start", Action(fact.death.service, fact.death.cause), outcome)
            log.info("%s healthy %.1f s after it went down", fact.death.service, fact.seconds)
        elif fact.is_told:
            outcome = Outcome("exited", 0.0, "", container, container)
            put(self._history, "crash", Action(fact.service, fact.cause), outcome)
            log.error("%s went down by itself: %s", fact.service, fact.cause)
