"""Follows a container from its start until it is known what became of it."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from docker.models.containers import Container

from weightkeeper.errors import ServiceError
from weightkeeper.quantities import one_line
from weightkeeper.supervisor.connection import docker_answers
from weightkeeper.supervisor.engines import Started, inspect

Result = Literal[
    "healthy", "running", "unhealthy", "exited", "starting", "gone", "failed", "skipped", "refused", "done", "undecided"
]
"""`running`: no health check, and it stays up. `starting`: not known yet when waiting ended. `refused`: nothing was
done, the engine goes on as it was. `done`: of what has no health. `undecided`: we were told to end before it was begun
or its answer came; it has to be begun again."""

LOOK_SECONDS = 0.25

STEADY_SECONDS = 3.0
"""A container without a health check has to stay up that long."""

MARGIN_SECONDS = 30.0
"""On top of the time after which Docker itself calls a container unhealthy."""

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action.

    Attributes:
        seconds: from the beginning of the action.
        detail: for people, empty where the result says it all.
        before: id of the container before the action.
        after: id of the container after it.
        phases: name → seconds, where they went.
    """

    result: Result
    seconds: float
    detail: str = ""
    before: str = ""
    after: str = ""
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.result in ("healthy", "running", "done")

    @property
    def is_open(self) -> bool:
        """It may still come up, or is not wanted up."""
        return self.result in ("starting", "skipped")


def follow(container: Container, start: Started, why_over: Callable[[float], str]) -> tuple[Result, str]:
    """Wait until the container is healthy, unhealthy or down, at most for `patience`.

    Args:
        start: the start to follow; any later one means that the container went down in between.
        why_over: called between looks with the seconds waited; a reason ends the wait with `starting`.

    Returns:
        The result, and for people why.
    """
    began = time.monotonic()
    limit: float | None = None
    while True:
        try:
            description = inspect(container)
        except ServiceError:
            return "gone", f"the container {start.name} was removed"
        waited = time.monotonic() - began
        verdict = judge(description, start.at, waited)
        if verdict == "exited":
            return verdict, f"with code {_exit_code(container, description, start)}"
        if verdict == "unhealthy":
            return verdict, _last_check(description)
        if verdict:
            return verdict, ""
        limit = patience(description["Config"].get("Healthcheck")) if limit is None else limit
        if waited > limit:
            return "starting", f"after {limit:.0f} s"
        if reason := why_over(waited):
            return "starting", reason
        time.sleep(LOOK_SECONDS)


def judge(description: Mapping[str, Any], started_at: str, waited: float) -> Result | None:
    """What Docker's description says of a start; None while that is open."""
    state = description["State"]
    if state["Status"] not in ("running", "paused") or state["StartedAt"] != started_at:
        return "exited"
    health = state.get("Health")
    if health is None or health["Status"] == "none":
        return "running" if waited >= STEADY_SECONDS else None
    return health["Status"] if health["Status"] in ("healthy", "unhealthy") else None


def patience(check: Mapping[str, Any] | None) -> float:
    """Seconds after which Docker has surely decided on a container with this health check (times in nanoseconds)."""
    if not check or check.get("Test") in (None, [], ["NONE"]):
        return STEADY_SECONDS + MARGIN_SECONDS
    interval = check.get("Interval") or 30 * SECOND_NS
    timeout = check.get("Timeout") or 30 * SECOND_NS
    tries = (check.get("Retries") or 3) + 1
    return ((check.get("StartPeriod") or 0) + tries * (interval + timeout)) / SECOND_NS + MARGIN_SECONDS


def nanoseconds(moment: str) -> int:
    """Docker's time (`2026-01-31T12:00:00.123456789Z`) in nanoseconds since the epoch."""
    whole, fraction = re.fullmatch(r"([^.Z]+)(?:\.(\d+))?Z", moment).groups(default="0")
    seconds = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp()
    return int(seconds) * SECOND_NS + int(fraction.ljust(9, "0"))


def _exit_code(container: Container, description: Mapping[str, Any], start: Started) -> str:
    """Of the first time that this start went down. Where it runs again by now, only Docker's events still know."""
    since = nanoseconds(start.at)
    with docker_answers():
        events = container.client.events(
            since=since // SECOND_NS,
            until=f"{time.time():.9f}",
            filters={"type": "container", "event": "die", "container": container.id},
            decode=True,
        )
        for event in events:
            if event["timeNano"] > since:
                return event["Actor"]["Attributes"].get("exitCode", "unknown")
    return str(description["State"]["ExitCode"])


def _last_check(description: Mapping[str, Any]) -> str:
    checks = description["State"]["Health"].get("Log") or [{}]
    return one_line(checks[-1].get("Output", ""))[-200:]
