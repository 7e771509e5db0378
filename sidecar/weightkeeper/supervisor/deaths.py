"""Sees engines that went down by themselves, and that Docker's restart policy brought back."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor.connection import Connection, docker_answers
from weightkeeper.supervisor.engines import PROJECT_LABEL, SERVICE_LABEL
from weightkeeper.supervisor.follow import SECOND_NS
from weightkeeper.supervisor.project import LABEL
from weightkeeper.supervisor.stop import STEP_SECONDS, Stop

log = logging.getLogger(__name__)

HARMLESS = ("1", "10", "12", "18", "23", "28", "HUP", "SIGHUP", "USR1", "SIGUSR1", "USR2", "SIGUSR2")
"""Signals that do not end an engine: they reload it, or make it say something."""

BEGIN_SECONDS = 10.0
"""For the first stream of events to begin."""

PAUSE_SECONDS = 0.2
"""Between the end of a stream of events and the next one."""


@dataclass(frozen=True, slots=True)
class Death:
    """An engine went down without anybody having asked Docker for it. `count` is of those in a row."""

    service: str
    container: str
    exit_code: str
    is_out_of_memory: bool = False
    count: int = 1

    @property
    def cause(self) -> str:
        killed = " (SIGKILL)" if self.exit_code == "137" else ""
        memory = ", out of memory" if self.is_out_of_memory else ""
        times = f", {self.count} times without being healthy" if self.count > 1 else ""
        return f"exit code {self.exit_code}{killed}{memory}{times}"

    @property
    def is_told(self) -> bool:
        """The 1st, 2nd, 4th, 8th … one in a row: a crash loop may go on for days."""
        return self.count & (self.count - 1) == 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """An engine is healthy again after a death."""

    death: Death
    seconds: float


class Reader:
    """Turns Docker's events about engines into facts."""

    def __init__(self) -> None:
        self.last_ns = 0
        self._killed: set[str] = set()
        self._out_of_memory: set[str] = set()
        self._dead: dict[str, tuple[Death, int]] = {}

    def feed(self, event: Mapping[str, Any]) -> Death | Recovery | None:
        """Take the next event; events that were seen already count for nothing."""
        moment = event["timeNano"]
        if moment <= self.last_ns:
            return None
        self.last_ns = moment
        container, attributes = event["Actor"]["ID"], event["Actor"]["Attributes"]
        what = event["Action"]
        if what == "kill" and attributes.get("signal") not in HARMLESS:
            self._killed.add(container)
        elif what == "oom":
            self._out_of_memory.add(container)
        elif what in ("start", "destroy"):
            self._killed.discard(container)
            self._out_of_memory.discard(container)
        elif what == "die":
            if container in self._killed:
                self._killed.discard(container)
                self._dead.pop(container, None)
                return None
            code = attributes.get("exitCode", "unknown")
            count = self._dead[container][0].count + 1 if container in self._dead else 1
            death = Death(attributes[SERVICE_LABEL], container, code, container in self._out_of_memory, count)
            self._dead[container] = death, moment
            return death
        elif what == "health_status: healthy" and container in self._dead:
            death, began = self._dead.pop(container)
            return Recovery(death, (moment - began) / SECOND_NS)
        return None


class Deaths:
    """A thread that reads Docker's events, for as long as the process lives."""

    def __init__(
        self, project: str, connection: Connection, tell: Callable[[Death | Recovery], None], stop: Stop
    ) -> None:
        self._labels = [f"{PROJECT_LABEL}={project}", f"{LABEL}=true"]
        self._connection = connection
        self._tell = tell
        self._stop = stop
        self._reader = Reader()
        self._began_ns = 0
        self._starts: dict[str, str] = {}
        self._is_listening = False

    def begin(self) -> None:
        """Start listening; returns when no later event can be missed, or Docker does not answer for now."""
        threading.Thread(target=self._run, name="deaths", daemon=True).start()
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self._is_listening and time.monotonic() < deadline and not self._stop.wait(STEP_SECONDS):
            pass

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with docker_answers():
                    self._listen()
            except (DockerLostError, ServiceError) as error:
                log.debug("events ended: %s", error)
            except Exception:
                log.exception("an event about an engine could not be handled; going on with the next")
            if not self._stop.wait(PAUSE_SECONDS):
                self._connection.wait()

    def _listen(self) -> None:
        """Read events until the connection ends."""
        began = self._began_ns = self._began_ns or time.time_ns()
        events = self._events(since=_text(self._reader.last_ns or began))
        self._is_listening = True
        # What happened while nobody listened is told first; the stream repeats it, and that counts for nothing.
        told = {
            self._feed(event)
            for event in self._events(since=_text(self._reader.last_ns or began), until=_text(time.time_ns()))
        }
        self._reconcile(told)
        for event in events:
            self._feed(event)

    def _events(self, **limits: str) -> Iterable[Mapping[str, Any]]:
        return self._connection.client().events(
            filters={"type": "container", "label": self._labels}, decode=True, **limits
        )

    def _feed(self, event: Mapping[str, Any]) -> str:
        """The container of an event, where the event was told; else nothing."""
        fact = self._reader.feed(event)
        if fact is None:
            return ""
        self._tell(fact)
        return event["Actor"]["ID"]

    def _reconcile(self, told: Collection[str]) -> None:
        """Say what became of engines while nobody listened, where no event told it: Docker forgets when it ends."""
        before, self._starts = self._starts, {}
        for container in self._connection.client().containers.list(all=True, filters={"label": self._labels}):
            state, service = container.attrs["State"], container.labels[SERVICE_LABEL]
            self._starts[container.id] = state["StartedAt"]
            if container.id not in before or container.id in told:
                continue
            if state["Status"] not in ("running", "restarting"):
                log.warning("%s is %s (exit code %s)", service, state["Status"], state["ExitCode"])
            elif before[container.id] != state["StartedAt"]:
                log.warning("%s was started again while Docker did not answer", service)


def _text(moment_ns: int) -> str:
    """A time as Docker takes it."""
    return f"{moment_ns // SECOND_NS}.{moment_ns % SECOND_NS:09d}"
