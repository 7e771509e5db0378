"""An engine behind our launcher: has its configuration read again, and follows the new server until it is known."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from docker.models.containers import Container

from weightkeeper.errors import ConfigError, ServiceError
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.supervisor import inside
from weightkeeper.supervisor.follow import Result
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.stop import Stop

STATUS_SECONDS = 30.0
"""For a status on a busy machine; it takes 0.3 s, most of it for a Python process to start."""

CHECK_SECONDS = 930.0
"""For a check: where a variable changed, the imports of a new template come first."""

FOLLOW_SECONDS = 3600.0
"""For a server to become healthy or to end."""

LOOK_SECONDS = 0.2

OLDER = (
    "the weightkeeper in its image is older than this one; make it anew with `make images` and recreate the container"
)

DEATHS = 2
"""Servers of a new configuration that may end before one is ready. The first may have died of something else."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """What became of a request for another server.

    Attributes:
        result: `healthy`; `exited`, then the new ones ended; `starting` when waiting ended before it was known.
        phases: name → seconds of the new server's start.
        generation: of the new server that it is about; 0 where that is not known.
    """

    result: Result
    detail: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    generation: int = 0


def newest_before(before: EngineStatus, status: EngineStatus) -> int:
    """Generation in `status` after which servers are new since `before`: 0 in a launcher that was started anew."""
    is_same = (before.launcher, before.started_at) == (status.launcher, status.started_at)
    return before.generation if is_same else 0


class Launched:
    """The launcher in one container. All methods raise ServiceError where it, DockerLostError where Docker is mute."""

    def __init__(self, container: Container, program: Program, stop: Stop) -> None:
        self._container = container
        self._program = program
        self._stop = stop

    def status(self) -> EngineStatus | None:
        """Everything the launcher knows; None where we are told to end."""
        done = self._run(STATUS_SECONDS, "engine-status", "--json")
        if done is None:
            return None
        try:
            if done.code == 0:
                return msgspec.json.decode(done.output, type=EngineStatus)
        except msgspec.DecodeError as error:
            raise ServiceError(f"{self._container.name}: its launcher's status cannot be read: {error}") from error
        raise ServiceError(f"{self._container.name}: {done.reason}")

    def ask_to_reload(self, cause: str, *options: str) -> bool:
        """Have the configuration read again; False where we are told to end before it is checked.

        Args:
            options: more, of `engine-reload`.

        Raises:
            ConfigError: it is refused; the old server goes on.
        """
        return self._ask(CHECK_SECONDS, "engine-reload", "--cause", cause, *options)

    def ask_to_check(self, cause: str) -> bool:
        """Have the configuration checked, and nothing else done. As `ask_to_reload`."""
        return self._ask(CHECK_SECONDS, "engine-reload", "--check", "--cause", cause)

    def follow(self, before: EngineStatus, why_over: Callable[[float], str]) -> Replaced:
        """Wait until a server after the one of `before` is ready, or the new ones end.

        Args:
            before: what the launcher told before it was asked for another server.
            why_over: called between looks with the seconds waited; a reason ends the wait with `starting`.
        """
        began = time.monotonic()
        dead: set[int] = set()
        while not (reason := why_over(waited := time.monotonic() - began)):
            if waited > FOLLOW_SECONDS:
                reason = f"after {waited:.0f} s"
                break
            status = self.status()
            if status is None:
                continue
            old = newest_before(before, status)
            if status.state == "ready" and status.generation > old:
                return Replaced("healthy", "", status.phases, status.generation)
            last = status.last_exit
            if last and last.generation > old and not last.was_asked:
                dead.add(last.generation)
            if status.state == "broken" or len(dead) >= DEATHS:
                cause = last.cause if last else status.cause
                died = last.generation if last and last.generation > old else 0
                return Replaced("exited", f"with {cause.removeprefix('crash: ')}", generation=died)
            self._stop.wait(LOOK_SECONDS)
        return Replaced("starting", reason)

    def _ask(self, limit_s: float, verb: str, *arguments: str) -> bool:
        done = self._run(limit_s, verb, *arguments)
        if done is None:
            return False
        if done.is_refusal:
            raise ConfigError(done.reason)
        if done.code:
            older = f" ({OLDER})" if done.is_unknown else ""
            raise ServiceError(f"{self._container.name}: {done.reason}{older}")
        return True

    def _run(self, limit_s: float, verb: str, *arguments: str) -> inside.Done | None:
        return inside.run(self._container, self._program.command(verb, *arguments), limit_s, self._stop)
