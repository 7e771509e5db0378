"""What the launcher was asked for and has not done yet: by signals, by the control socket, by a checked reload."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import anyio

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher.arguments import Configuration
from weightkeeper.launcher.listener import Listener

T = TypeVar("T")

Wanted = Literal["serve", "check", "last good"]


@dataclass(slots=True)
class Reload:
    """One request to read the configuration again.

    Attributes:
        cause: who asked, for people.
        wanted: `serve` what the files say now, only `check` it, or serve the `last good` whatever they say.
        decided: set when it is accepted or refused.
        refusal: why not; "" where it is accepted.
    """

    cause: str
    wanted: Wanted = "serve"
    decided: anyio.Event = field(default_factory=anyio.Event)
    refusal: str = ""

    def decide(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.decided.set()


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that was checked, with what a server of it needs.

    Attributes:
        arguments: that name the copy of the config file.
        copy: directory of that copy.
        listener: at the configuration's address.
        cause: who asked for it, for people.
    """

    configuration: Configuration
    arguments: list[str]
    copy: Path
    listener: Listener
    cause: str


class Wishes:
    """Set by whoever asks, taken by whoever acts.

    Attributes:
        stop: name of the signal that asks for the end; "" for none.
        is_hasty: it was asked for twice: no grace.
        restart: cause of a restart; "" for none.
        plan: what is to be served from now on; None where that is being served.
        good: what a server became healthy with last.
        reloads: requests that nobody has begun to answer.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.is_hasty = False
        self.restart = ""
        self.plan: Plan | None = None
        self.good: Plan | None = None
        self.reloads: list[Reload] = []
        self._changed = anyio.Event()

    @property
    def kind(self) -> str:
        """The most urgent of them, for the server that runs: `stop`, `reload`, `restart`, or ""."""
        if self.stop:
            return "stop"
        if self.plan is not None:
            return "reload"
        return "restart" if self.restart else ""

    @property
    def cause(self) -> str:
        return self.stop or (self.plan.cause if self.plan else self.restart)

    def ask_to_stop(self, signal_name: str) -> None:
        self.is_hasty = bool(self.stop)
        self.stop = self.stop or signal_name
        self.touch()

    def ask_to_restart(self, cause: str) -> None:
        self.restart = cause
        self.touch()

    def ask_to_reload(self, cause: str, wanted: Wanted = "serve") -> Reload:
        wish = Reload(cause, wanted)
        self.reloads.append(wish)
        self.touch()
        return wish

    def offer(self, plan: Plan) -> None:
        self.plan = plan
        self.touch()

    def take_reloads(self) -> list[Reload]:
        """The first requests, as far as they want the same."""
        same = itertools.takewhile(lambda each: each.wanted == self.reloads[0].wanted, self.reloads)
        taken = list(same)
        self.reloads = self.reloads[len(taken) :]
        return taken

    @property
    def has_reading(self) -> bool:
        """Whether the next request is to serve what the files say."""
        return bool(self.reloads) and self.reloads[0].wanted == "serve"

    def take_for_start(self) -> Plan | None:
        """A start is about to be made: the new plan, if any; a start answers a wish for a restart, too."""
        taken, self.plan, self.restart = self.plan, None, ""
        return taken

    def touch(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def urgent(self) -> str:
        """Wait for something that concerns the server, or the delay before it; its kind."""
        while not (kind := self.kind):
            await self.changed()
        return kind

    async def unless_stopped(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """What `action` returns, or None where somebody asks for the end first. Raises what it raises of ours."""
        results: list[T] = []
        errors: list[WeightkeeperError] = []

        async def act() -> None:
            try:
                results.append(await action())
            except WeightkeeperError as error:  # so that it leaves the task group as what it is
                errors.append(error)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            while not self.stop:
                await self.changed()
            tasks.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return results[0] if results else None

    async def hasty(self) -> None:
        """Wait until there is to be no grace."""
        while not self.is_hasty:
            await self.changed()
