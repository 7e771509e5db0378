"""The launcher: one server after the other, for as long as nobody asks for the end."""

import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterable, Iterator, Sequence
from functools import partial

import anyio
import anyio.abc

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher import processes
from weightkeeper.launcher.backoff import Backoff
from weightkeeper.launcher.control import Control
from weightkeeper.launcher.generation import Generations, Outcome
from weightkeeper.launcher.history import EngineHistory
from weightkeeper.launcher.preparing import Preparer
from weightkeeper.launcher.private import PrivateDirectory
from weightkeeper.launcher.reaping import Exit, Reaper
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.state import EngineState
from weightkeeper.launcher.templates import Templates
from weightkeeper.launcher.timeline import Timeline
from weightkeeper.launcher.unavailable import refuse_clients
from weightkeeper.launcher.warden import Warden
from weightkeeper.launcher.wishes import Plan, Wishes

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALS = (*ENDING, signal.SIGCHLD)

logger = logging.getLogger(__name__)


class Launcher:
    """One engine.

    Args:
        early: signals that came before this, and come until `run` hears them itself.

    Raises:
        ConfigError: a directory that it needs cannot be used.
        SocketPathError: so with the control socket's.
        SocketInUseError: a live launcher has this name.
    """

    def __init__(self, settings: Settings, early: Sequence[int] = ()):
        self._settings = settings
        self._early = early
        self._reaper = Reaper()
        self._wishes = Wishes()
        self._state = EngineState(settings.name)
        self._templates = Templates(settings, self._reaper)
        self._backoff = Backoff(settings.delay, settings.delay_max, settings.healthy_seconds)
        self._warden = Warden(self._reaper)
        with contextlib.ExitStack() as undo:
            self._history = EngineHistory(settings.state_dir, settings.name)
            self._directory = PrivateDirectory()
            undo.callback(self._directory.close)
            undo.callback(self._warden.close)
            self._control = Control(settings, self._wishes, lambda: self._state.status(self._templates, self._warden))
            undo.callback(self._control.close)
            self._preparer = Preparer(settings, self._templates, self._directory, self._wishes, self._refused)
            undo.callback(self._preparer.settle)
            undo.callback(self._templates.close)
            self._generations = Generations(
                settings,
                self._reaper,
                self._templates,
                self._directory,
                self._wishes,
                self._state,
                self._history,
                self._warden.number,
            )
            undo.callback(self._generations.close)
            self._undo = undo.pop_all()

    async def run(self) -> Exit:
        """Serve until SIGTERM or SIGINT; without restarts, until the server ends. How the launcher is to end.

        Raises:
            ConfigError: the first server cannot be started with this configuration.
        """
        processes.become_subreaper()
        ended: Exit | WeightkeeperError
        with self._undo, deaf_afterwards(), anyio.open_signal_receiver(*SIGNALS) as signals:
            self._warden.start()
            for number in self._early:
                self._take(signal.Signals(number))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hear, signals)
                tasks.start_soon(self._control.run)
                tasks.start_soon(self._warden.keep)
                try:
                    ended = await self._live(tasks)
                except WeightkeeperError as error:  # so that it leaves the task group as what it is
                    ended = error
                self._state.enter("stopped")
                tasks.cancel_scope.cancel()
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        if isinstance(ended, WeightkeeperError):
            raise ended
        return Exit(code=130) if self._wishes.stop == "SIGINT" else ended

    async def _hear(self, signals: AsyncIterable[signal.Signals]) -> None:
        async for number in signals:
            self._take(number)

    def _take(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._reaper.reap()
        elif number == signal.SIGHUP:
            self._wishes.ask_to_reload("SIGHUP")
        else:
            logger.info("%s: ending%s", number.name, " at once" if self._wishes.stop else "")
            self._wishes.ask_to_stop(number.name)

    async def _live(self, tasks: anyio.abc.TaskGroup) -> Exit:
        logger.info("warming: importing the server")
        plan = await self._wishes.unless_stopped(self._preparer.first)
        if plan is None:
            return Exit(code=0)
        tasks.start_soon(self._templates.keep)
        tasks.start_soon(self._preparer.run)
        cause, marks = "start", Timeline(time.monotonic())
        while True:
            plan = self._wishes.take_for_start() or plan
            self._settle(plan)
            outcome = await self._generations.serve(plan, cause, marks, partial(self._settle, plan))
            verdict = outcome.verdict
            if verdict.kind == "stop" or not (verdict.was_asked or self._settings.restarts):
                return outcome.exit or Exit(code=0 if verdict.was_asked else 1)
            self._state.count(verdict.kind)
            if verdict.was_asked:
                self._backoff.forgive()
            cause, marks = f"{verdict.kind}: {verdict.cause}", Timeline(outcome.ending_since)
            marks.add("stop")
            if not verdict.was_asked and await self._pause(outcome, plan, marks):
                cause, marks = f"{self._wishes.kind}: {self._wishes.cause}", Timeline(time.monotonic())
                self._backoff.forgive()
            if self._wishes.stop:
                return Exit(code=0)

    def _settle(self, plan: Plan) -> None:
        self._preparer.settle(plan, self._wishes.plan, self._wishes.good)

    async def _pause(self, outcome: Outcome, plan: Plan, marks: Timeline) -> bool:
        """After a death, wait as long as is due, or until somebody asks for something; whether somebody did."""
        cause = outcome.verdict.cause
        delay = self._backoff.died(outcome.healthy_seconds)
        if delay is None:
            logger.error("broken: %s; no server became healthy, SIGHUP or engine-restart tries again", cause)
            self._state.enter("broken", cause)
            self._history.append("broken", self._state.generation, 0, cause)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refuse_clients, plan.listener, plan.configuration.tls != "none", cause)
                await self._wishes.urgent()
                tasks.cancel_scope.cancel()
        elif delay:
            logger.info("next start in %g s", delay)
            self._state.enter("waiting", cause, delay)
            with anyio.move_on_after(delay):
                await self._wishes.urgent()
            marks.add("wait")
        return bool(self._wishes.kind)

    def _refused(self, reason: str) -> None:
        self._state.refuse(reason)
        if reason:
            self._history.append("refused", self._state.generation, self._state.pid, reason)


@contextlib.contextmanager
def deaf_afterwards() -> Iterator[None]:
    """Ignore further signals from here to the end of the process: how it ends is decided."""
    try:
        yield
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
