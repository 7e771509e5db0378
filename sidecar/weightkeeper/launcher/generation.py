"""One generation: a server from its fork until nothing is left of it, told to state, log and history."""

import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from weightkeeper.errors import ConfigError, TemplateError
from weightkeeper.launcher import stamp, timeline
from weightkeeper.launcher.forking import UnusableTemplateError
from weightkeeper.launcher.gpu_memory import GpuMemory
from weightkeeper.launcher.history import EngineHistory
from weightkeeper.launcher.messages import Ended
from weightkeeper.launcher.private import PrivateDirectory
from weightkeeper.launcher.reaping import Exit, Reaper, Watched
from weightkeeper.launcher.server import Server, Verdict, start_server
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.state import EngineState
from weightkeeper.launcher.templates import Templates
from weightkeeper.launcher.timeline import Timeline
from weightkeeper.launcher.wishes import Plan, Wishes

RETRY_SECONDS = 0.1

START_TRIES = 3
"""Templates that may be lost while one server is being forked."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation went.

    Attributes:
        verdict: why it ended.
        exit: how its server's process ended, by SIGTERM where it had to before it served; None where there was none.
        healthy_seconds: None where it never was.
        ending_since: by time.monotonic(), when the verdict fell.
    """

    verdict: Verdict
    exit: Exit | None
    healthy_seconds: float | None
    ending_since: float


class Generations:
    """What all servers of one launcher have in common."""

    def __init__(
        self,
        settings: Settings,
        reaper: Reaper,
        templates: Templates,
        directory: PrivateDirectory,
        wishes: Wishes,
        state: EngineState,
        history: EngineHistory,
        number: int,
    ):
        self._number = number
        self._settings = settings
        self._reaper = reaper
        self._templates = templates
        self._directory = directory
        self._wishes = wishes
        self._state = state
        self._history = history
        self._memory = GpuMemory()
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._memory.close()

    async def serve(self, plan: Plan, cause: str, marks: Timeline, good: Callable[[], None]) -> Outcome:
        """Start a server, watch it, end it.

        Args:
            cause: why it is started, in words.
            marks: of its start, which may have begun with the end of the one before.
            good: called when it is healthy.
        """
        number = self._state.generation = next(self._numbers)
        self._state.configuration, self._state.address = plan.configuration, str(plan.listener.at)
        self._state.enter("starting", cause)
        self._memory.note(plan.configuration.environment)
        directory = self._directory.generation(number)
        logger.info("generation %d: starts (%s)", number, cause)  # before all that its server says
        try:
            mine = stamp.of_server(self._number, number)
            started = await self._started(plan, directory, mine)
            if isinstance(started, Verdict):
                if not started.was_asked:
                    logger.error("generation %d: %s", number, started.cause)
                return Outcome(started, None, None, time.monotonic())
            process, receiver = started
            with receiver, contextlib.ExitStack() as undo:
                try:
                    server = Server(process, number, mine, plan, marks, self._settings, self._reaper)
                except OSError as error:
                    return await self._unwatched(process, error)
                undo.callback(server.close)
                self._state.pid, self._state.tree = server.pid, server.tree
                logger.info("generation %d: pid %d", number, server.pid)
                return await self._follow(server, receiver, cause, good)
        finally:
            self._state.pid, self._state.tree = 0, None
            self._directory.remove(directory)

    async def _started(self, plan: Plan, directory: Path, number: int) -> tuple[Watched, socket.socket] | Verdict:
        """A new server's process and the receiver of its marks; a verdict where there is none."""

        async def start() -> tuple[Watched, socket.socket]:
            for left in reversed(range(START_TRIES)):
                source = await self._templates.source()
                plan.listener.renew()
                try:
                    return await start_server(source, plan, directory, number)
                except UnusableTemplateError as error:
                    self._templates.give_up(source, str(error))
                except TemplateError as error:
                    if not left:
                        raise
                    logger.warning("start: %s", error)
                    await anyio.sleep(RETRY_SECONDS)  # until its end is known
            raise TemplateError(f"{START_TRIES} templates in a row were unusable")

        try:
            started = await self._wishes.unless_stopped(start)
        except (ConfigError, TemplateError) as error:
            return Verdict("crash", f"the server cannot be started: {error}")
        return Verdict("stop", self._wishes.stop) if started is None else started

    async def _unwatched(self, process: Watched, error: OSError) -> Outcome:
        """There is no room to watch a server that was just forked, so it goes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.ended.wait()
        verdict = Verdict("crash", f"the server cannot be watched: {error.strerror or error}")
        logger.error("generation %d: %s", self._state.generation, verdict.cause)
        return Outcome(verdict, process.exit, None, time.monotonic())

    async def _follow(self, server: Server, receiver: socket.socket, cause: str, good: Callable[[], None]) -> Outcome:
        def ready() -> None:
            self._ready(server, cause)
            good()

        verdict = await server.watch(receiver, self._wishes, ready)
        healthy_seconds, since = server.healthy_seconds, time.monotonic()
        self._state.enter("draining" if verdict.kind == "stop" else "reloading", verdict.cause)
        level = logging.INFO if verdict.was_asked else logging.ERROR
        logger.log(level, "generation %d: ends (%s: %s)", server.generation, verdict.kind, verdict.cause)
        await server.end(verdict, self._wishes)
        await self._memory.settled(server.plan.configuration.environment)
        self._ended(server, verdict, time.monotonic() - since)
        ended = Exit(signal=signal.SIGTERM) if verdict.was_asked and not server.serves else server.exit
        return Outcome(verdict, ended, healthy_seconds, since)

    def _ready(self, server: Server, cause: str) -> None:
        phases, seconds = server.timeline.phases, server.timeline.seconds
        self._state.phases, self._state.start_seconds = phases, seconds
        self._state.enter("ready")
        self._wishes.good = server.plan
        self._history.append("ready", server.generation, server.pid, cause, seconds=seconds, phases=phases)
        text = timeline.text(phases)
        logger.info("generation %d: ready after %.2f s: %s", server.generation, seconds, text)

    def _ended(self, server: Server, verdict: Verdict, seconds: float) -> None:
        ended = server.exit or Exit()
        logger.info("generation %d: ended with %s, nothing of it left after %.2f s", server.generation, ended, seconds)
        cause = f"{verdict.kind}: {verdict.cause}"
        self._state.last_exit = Ended(
            server.generation, server.pid, time.time(), cause, verdict.was_asked, ended.code, ended.signal
        )
        self._history.append("ended", server.generation, server.pid, cause, code=ended.code, signal=ended.signal)
