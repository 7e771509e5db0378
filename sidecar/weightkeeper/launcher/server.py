"""One generation: a server from its start to the moment in which nothing is left of it."""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from weightkeeper.errors import TemplateError
from weightkeeper.launcher import health, timeline
from weightkeeper.launcher.plain import MARKS
from weightkeeper.launcher.reaping import Exit, Reaper, Watched
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.templates import Source
from weightkeeper.launcher.timeline import Mark, Timeline
from weightkeeper.launcher.tree import Tree
from weightkeeper.launcher.wishes import Plan, Wishes

SERVING = "server"
"""Mark of a server that is about to accept its first client."""

LAST_WORDS_SECONDS = 5.0
"""For a starting server to say why one of its processes ended, and to end by itself, before it is ended."""

ORDERLY_SECONDS = 1.0
"""For a server that knows of the end of one of its processes to end by itself."""

ANSWERS_SECONDS = 0.2
"""For a server that says it is broken to answer what it was asked before, with an error."""

SAY_SECONDS = 60.0
"""Between two words about a server that does not become healthy."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a server is to go: a kind of wish, or `crash`, or `unhealthy`; and the cause in words."""

    kind: str
    cause: str

    @property
    def was_asked(self) -> bool:
        return self.kind in ("stop", "reload", "restart")


class Server:
    """A started server. `async with` collects its marks; nothing of it is left after `end`.

    Attributes:
        healthy_at: by time.monotonic(), of its first answer; None before.
        timeline: of its start.
    """

    def __init__(
        self,
        process: Watched,
        generation: int,
        number: int,
        plan: Plan,
        marks: Timeline,
        settings: Settings,
        reaper: Reaper,
    ):
        self.pid = process.pid
        self.generation = generation
        self.plan = plan
        self.timeline = marks
        self.healthy_at: float | None = None
        self.process = process
        self.tree = Tree(process.pid, number, reaper)
        self._settings = settings
        self._serves = False

    @property
    def exit(self) -> Exit | None:
        """How its process ended; None while it lives."""
        return self.process.exit

    @property
    def serves(self) -> bool:
        """Whether clients may have been accepted by it."""
        return self._serves or self.healthy_at is not None

    @property
    def healthy_seconds(self) -> float | None:
        """For how long it has been healthy; None where it never was."""
        return None if self.healthy_at is None else time.monotonic() - self.healthy_at

    async def watch(self, receiver: socket.socket, wishes: Wishes, ready: Callable[[], None]) -> Verdict:
        """Wait until there is a reason for its end.

        Args:
            receiver: of its marks.
            ready: called at its first answer.
        """
        found: list[Verdict] = []

        async with anyio.create_task_group() as tasks:

            async def judge(reason: Callable[[], Awaitable[Verdict]]) -> None:
                verdict = await reason()
                found.append(verdict)
                tasks.cancel_scope.cancel()

            async def unhealthy() -> Verdict:
                await health.first(self.plan.listener, self.plan.configuration.tls)
                self.healthy_at = time.monotonic()
                timeline.drain(receiver, self._take)
                self.timeline.add("first health", self.healthy_at)
                ready()
                return await self._stays_dead()

            async def wished() -> Verdict:
                kind = await wishes.urgent()
                return Verdict(kind, wishes.cause)

            tasks.start_soon(timeline.collect, receiver, self._take)
            for each in (self._ended, self._lost, self._late, unhealthy, wished):
                tasks.start_soon(judge, each)
        timeline.drain(receiver, self._take)
        return found[0]

    async def end(self, verdict: Verdict, wishes: Wishes) -> None:
        """End it and all that descends from it: after a grace where it was asked to go, at once where it died.

        At once also where it serves nobody yet: vLLM loses a SIGTERM while it waits for its engine core to start, which
        raises an error where pyzmq drops it, and would go on to serve and be killed with its clients.
        """
        if verdict.was_asked and self.serves and not self.process.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._grace, tasks.cancel_scope)
                tasks.start_soon(_haste, wishes, tasks.cancel_scope)
                await self.process.ended.wait()
                tasks.cancel_scope.cancel()
        await self.tree.end()
        with anyio.move_on_after(1):  # its own end, where it was killed a moment ago
            await self.process.ended.wait()

    def close(self) -> None:
        self.tree.close()

    def _take(self, mark: Mark) -> None:
        self.timeline.add(mark.name, mark.at)
        self._serves = self._serves or mark.name == SERVING
        self.tree.mark(mark.pid)

    async def _ended(self) -> Verdict:
        await self.process.ended.wait()
        return Verdict("crash", str(self.exit))

    async def _lost(self) -> Verdict:
        who, how = await self.tree.death()
        cause = f"{who} ended" + (f" by {how}" if how is not None else "")
        if self.healthy_at is None or not self._settings.restarts:
            # vLLM says why when it starts, and its exit code is what Docker is to see where nobody restarts it.
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await self.process.ended.wait()
        elif how is None and (broken := await self._ends_or_breaks()):  # its parent has reaped it
            cause += f", and {broken}"
        return Verdict("crash", cause)

    async def _ends_or_breaks(self) -> str:
        """Wait for its own end: it may be ending in good order. What it says of itself where it is not."""
        broken = ""

        async def ask(waiting: anyio.CancelScope) -> None:
            nonlocal broken
            broken = await health.breaks(self.plan.listener, self.plan.configuration.tls)
            await anyio.sleep(ANSWERS_SECONDS)
            waiting.cancel()

        with anyio.move_on_after(ORDERLY_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, tasks.cancel_scope)
                await self.process.ended.wait()
                tasks.cancel_scope.cancel()
        return broken

    async def _late(self) -> Verdict:
        """Say each minute that it is not healthy yet; after the time for a start that counts as its death."""
        limit, began = self._settings.start_timeout, time.monotonic()
        while True:
            passed = time.monotonic() - began
            await anyio.sleep(max(0.0, min(SAY_SECONDS, limit - passed)))
            if self.healthy_at is not None:
                await anyio.sleep_forever()
            passed = time.monotonic() - began
            if passed >= limit:
                return Verdict("crash", f"/health did not answer 200 within {limit:g} s of the start")
            logger.warning("generation %d: not healthy %.0f s after its start", self.generation, passed)

    async def _stays_dead(self) -> Verdict:
        failures = 0
        while True:
            began = time.monotonic()
            reason = await health.fails(self.plan.listener, self.plan.configuration.tls, self._settings.health_interval)
            failures = failures + 1 if reason else 0
            if reason:
                logger.warning("unhealthy (%d of %d): %s", failures, self._settings.health_failures, reason)
            if failures >= self._settings.health_failures:
                return Verdict("unhealthy", f"{reason}, {failures} times in a row")
            await anyio.sleep(max(0.0, began + self._settings.health_interval - time.monotonic()))

    async def _grace(self, scope: anyio.CancelScope) -> None:
        await anyio.sleep(self._settings.stop_grace)
        logger.warning("pid %d did not end within %g s of SIGTERM; it is killed", self.pid, self._settings.stop_grace)
        scope.cancel()


async def _haste(wishes: Wishes, scope: anyio.CancelScope) -> None:
    await wishes.hasty()
    scope.cancel()


async def start_server(source: Source, plan: Plan, directory: Path, number: int) -> tuple[Watched, socket.socket]:
    """Start a server; its process, and the receiver of its marks.

    Args:
        directory: for its temporary files; made here.
        number: for it and all that it starts, see `stamp`.

    Raises:
        TemplateError: it cannot be started.
    """
    with contextlib.ExitStack() as undo:
        try:
            receiver = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            directory.mkdir(mode=0o700, exist_ok=True)
            marks = str(directory / MARKS)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(marks)
            receiver.bind(marks)
            receiver.setblocking(False)
            sender = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            sender.connect(marks)
        except OSError as error:
            raise TemplateError(f"{directory}: {error.strerror or error}") from error
        with sender:
            descriptors = [plan.listener.socket.fileno(), sender.fileno()]
            environment = plan.configuration.environment
            process = await source.start(plan.arguments, environment, str(directory), descriptors, number)
        undo.pop_all()
        return process, receiver
