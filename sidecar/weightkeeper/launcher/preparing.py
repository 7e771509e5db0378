"""The next configuration: read, its template warmed, checked, and only then offered. A refused one changes nothing."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio

from weightkeeper.errors import ConfigError, TemplateError, WeightkeeperError
from weightkeeper.launcher import arguments, environment
from weightkeeper.launcher.address import Address
from weightkeeper.launcher.arguments import Configuration
from weightkeeper.launcher.aside import aside
from weightkeeper.launcher.checking import cut
from weightkeeper.launcher.forking import Template
from weightkeeper.launcher.listener import Listener
from weightkeeper.launcher.private import PrivateDirectory
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.templates import Source, Templates
from weightkeeper.launcher.wishes import Plan, Reload, Wishes

SETTLE_SECONDS = 0.05
"""Requests that come this close behind each other are one."""

RETRY_SECONDS = 0.1

TRIES = 3
"""Templates that may be lost while one configuration is being checked."""

logger = logging.getLogger(__name__)


class Preparer:
    """Answers requests for a reload, one batch after the other, while a server runs, starts, ends or waits.

    Args:
        refused: called with the reason at each refusal, and with "" when a configuration passes.
    """

    def __init__(
        self,
        settings: Settings,
        templates: Templates,
        directory: PrivateDirectory,
        wishes: Wishes,
        refused: Callable[[str], None],
    ):
        self._settings = settings
        self._templates = templates
        self._directory = directory
        self._wishes = wishes
        self._refused = refused
        self._numbers = itertools.count(1)
        self._plans: list[Plan] = []

    async def first(self) -> Plan:
        """What the first server is started with. Its arguments are checked where that costs no second import.

        Raises:
            ConfigError: it cannot be started.
        """
        plan = self._kept(await self._checked(await self._read(), "start", is_first=True))
        while self._wishes.reloads:
            taken = self._wishes.take_reloads()
            try:
                plan = await self._newer(plan, taken)
            except Exception as error:  # the plan that passed is still good
                self._refuse(taken, error)
            else:
                _decide(taken)
        return plan

    def settle(self, plan: Plan | None = None, next_plan: Plan | None = None, good: Plan | None = None) -> None:
        """Let go of the copies and the listening sockets of all other plans.

        Args:
            plan: that is served. Nothing else listens on its port, so that clients reach it by each of its addresses.
            next_plan: that is served next.
            good: that was served before, and may be again.
        """
        copies = {each.copy for each in (plan, next_plan, good) if each is not None}
        self._drop(*(each for each in self._plans if each.copy not in copies))
        served = [each.listener for each in (plan, next_plan) if each is not None]
        for each in self._plans:
            if plan is not None and each.listener not in served and each.listener.has_port(plan.listener.at.port):
                each.listener.close()

    async def run(self) -> None:
        """Answer requests for ever."""
        while True:
            while not self._wishes.reloads:
                await self._wishes.changed()
            await anyio.sleep(SETTLE_SECONDS)
            taken = self._wishes.take_reloads()
            try:
                plan = await self._answer(taken)
            except Exception as error:
                self._refuse(taken, error)
            else:
                self._refused("")
                if plan is not None:
                    self._wishes.offer(plan)
                _decide(taken)

    async def _answer(self, taken: list[Reload]) -> Plan | None:
        """What is to be served for these; None where they wanted to know only whether it could be."""
        if taken[0].wanted == "last good":
            return await self._last_good(taken[0].cause)
        if taken[0].wanted == "check":
            source, copy, *_ = await self._passed(await self._read())
            self._forget(source, copy)
            return None
        return await self._prepare(taken[0].cause, taken)

    def _refuse(self, taken: list[Reload], error: Exception) -> None:
        """A fault of ours refuses the reload, too: it is no reason to end a good server."""
        is_ours = not isinstance(error, WeightkeeperError)
        reason = cut(f"{type(error).__name__}: {error}" if is_ours else str(error))
        logger.error("reload refused, the server goes on as it is: %s", reason, exc_info=error if is_ours else None)
        self._refused(reason)
        _decide(taken, reason)

    def _drop(self, *gone: Plan) -> None:
        self._plans = [each for each in self._plans if each not in gone]
        kept = [each.listener for each in self._plans]
        for each in gone:
            self._directory.remove(each.copy)
            if each.listener not in kept:
                each.listener.close()

    async def _last_good(self, cause: str) -> Plan:
        """What was healthy last, once there is a template of its variables. Nothing is read or checked."""
        while (good := self._wishes.good) is not None:
            read = good.configuration
            source = await self._templates.candidate(read.arguments, read.environment)
            if self._wishes.good is good:
                try:
                    plan = replace(good, cause=cause, listener=self._listener(good.listener.address))
                except BaseException:
                    self._templates.discard(source)
                    raise
                self._plans = [plan if each.copy == good.copy else each for each in self._plans]
                self._templates.adopt(source, read.arguments, read.environment)
                return plan
            self._templates.discard(source)  # another became healthy meanwhile
        raise ConfigError("no server was healthy yet, so there is no last good configuration")

    async def _newer(self, plan: Plan, taken: list[Reload]) -> Plan:
        """What requests during the first warming lead to."""
        if taken[0].wanted != "serve":
            return await self._answer(taken) or plan
        read = await self._read()
        if read == plan.configuration:
            return plan
        return self._kept(await self._checked(read, "start", is_first=True))

    async def _prepare(self, cause: str, taken: list[Reload]) -> Plan:
        """Read until what was checked is still what is there, so that later requests are answered, too.

        Until then the plan is ours alone: `settle` would let go of it when the server that runs becomes healthy.
        """
        read = await self._read()
        while True:
            plan = await self._checked(read, cause)
            if not self._wishes.has_reading:
                return self._kept(plan)
            taken += self._wishes.take_reloads()
            try:
                again = await self._read()
            except BaseException:
                self._drop(plan)
                raise
            if again == read:
                return self._kept(plan)
            self._drop(plan)
            read = again

    async def _read(self) -> Configuration:
        given, env_files = self._settings.arguments, self._settings.env_files
        read = await aside(lambda: arguments.read(given, environment.read(env_files)))
        if arguments.is_unread(given):
            logger.warning("--config=FILE: vLLM itself does not read a file in this spelling; the launcher has it read")
        grace, drain = self._settings.stop_grace, read.shutdown_timeout
        if drain and grace <= drain:
            logger.warning(
                "--stop-grace %g is not longer than vLLM's --shutdown-timeout %g: requests are cut", grace, drain
            )
        return read

    async def _checked(self, read: Configuration, cause: str, is_first: bool = False) -> Plan:
        source, copy, words, address = await self._passed(read, is_first)
        try:
            listener = self._listener(address)
        except BaseException:
            self._forget(source, copy)
            raise
        self._templates.adopt(source, read.arguments, read.environment)
        return Plan(read, words, copy, listener, cause)

    def _kept(self, plan: Plan) -> Plan:
        self._plans.append(plan)
        return plan

    async def _passed(
        self, read: Configuration, is_first: bool = False
    ) -> tuple[Source, Path, list[str], Address]:  # fmt: skip
        """What a server of this configuration starts from, once it has passed its check: neither in use nor kept yet.

        The copy's directory, the arguments that name the copy, and the address come with it.
        """
        for left in reversed(range(TRIES)):
            source = await self._templates.candidate(read.arguments, read.environment)
            copy = self._directory.configuration(next(self._numbers))
            try:
                address = await aside(read.address.resolved)
                words = read.write(copy)
                if not is_first or isinstance(source, Template):
                    await source.check(words, read.environment)
            except TemplateError as error:
                self._forget(source, copy)
                if not left:
                    raise
                logger.warning("check: %s; once more", error)
                await anyio.sleep(RETRY_SECONDS)  # until its end is known
            except BaseException:
                self._forget(source, copy)
                raise
            else:
                return source, copy, words, address
        raise AssertionError("the last try returns or raises")

    def _forget(self, source: Source, copy: Path) -> None:
        self._directory.remove(copy)
        self._templates.discard(source)

    def _listener(self, address: Address) -> Listener:
        """The one that is open at this address, or a new one."""
        ours = [each.listener for each in self._plans if each.listener.is_open]
        return next((each for each in ours if each.is_at(address)), None) or Listener(address, ours)


def _decide(taken: list[Reload], refusal: str = "") -> None:
    for each in taken:
        each.decide(refusal)
