"""The next configuration: read, its template warmed, checked, and only then offered. A refused one changes nothing."""

import itertools
import logging
from collections.abc import Callable

import anyio

from weightkeeper.errors import TemplateError, WeightkeeperError
from weightkeeper.launcher import arguments, environment
from weightkeeper.launcher.arguments import Configuration
from weightkeeper.launcher.forking import Template
from weightkeeper.launcher.listener import Address, Listener
from weightkeeper.launcher.private import PrivateDirectory
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.templates import Templates
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
        taken: list[Reload] = []
        plan = await self._prepare("start", taken, is_first=True)
        _decide(taken)
        return plan

    def settle(self, *needed: Plan | None) -> None:
        """Let go of the copies and the listening sockets of all other plans."""
        copies = {each.copy for each in needed if each is not None}
        gone = [each for each in self._plans if each.copy not in copies]
        self._plans = [each for each in self._plans if each.copy in copies]
        kept = [each.listener for each in self._plans]
        for each in gone:
            self._directory.remove(each.copy)
            if each.listener not in kept:
                each.listener.close()

    async def run(self) -> None:
        """Answer requests for ever."""
        while True:
            while not self._wishes.reloads:
                await self._wishes.changed()
            await anyio.sleep(SETTLE_SECONDS)
            taken = self._wishes.take_reloads()
            try:
                plan = await self._prepare(taken[0].cause, taken)
            except WeightkeeperError as error:
                logger.error("reload refused, the server goes on as it is: %s", error)
                self._refused(str(error))
                _decide(taken, str(error))
            else:
                self._refused("")
                self._wishes.offer(plan)
                _decide(taken)

    async def _prepare(self, cause: str, taken: list[Reload], is_first: bool = False) -> Plan:
        """Read until what was checked is still what is there, so that later requests are answered, too."""
        read = self._read()
        while True:
            plan = await self._checked(read, cause, is_first)
            if not self._wishes.reloads:
                return plan
            taken += self._wishes.take_reloads()
            again = self._read()
            if again == read:
                return plan
            read = again

    def _read(self) -> Configuration:
        given = self._settings.arguments
        read = arguments.read(given, environment.read(self._settings.env_files))
        if arguments.is_unread(given):
            logger.warning("--config=FILE: vLLM itself does not read a file in this spelling; the launcher has it read")
        grace, drain = self._settings.stop_grace, read.shutdown_timeout
        if drain and grace <= drain:
            logger.warning(
                "--stop-grace %g is not longer than vLLM's --shutdown-timeout %g: requests are cut", grace, drain
            )
        return read

    async def _checked(self, read: Configuration, cause: str, is_first: bool) -> Plan:
        for left in reversed(range(TRIES)):
            source = await self._templates.candidate(read.arguments, read.environment)
            copy = self._directory.configuration(next(self._numbers))
            try:
                words = read.write(copy)
                if not is_first or isinstance(source, Template):
                    await source.check(words, read.environment)
                listener = self._listener(read.address)
            except TemplateError as error:
                self._directory.remove(copy)
                self._templates.discard(source)
                if not left:
                    raise
                logger.warning("check: %s; once more", error)
                await anyio.sleep(RETRY_SECONDS)  # until its end is known
            except BaseException:
                self._directory.remove(copy)
                self._templates.discard(source)
                raise
            else:
                self._templates.adopt(source, read.arguments, read.environment)
                self._plans.append(Plan(read, words, copy, listener, cause))
                return self._plans[-1]
        raise AssertionError("the last try returns or raises")

    def _listener(self, address: Address) -> Listener:
        """The one that is open at this address, or a new one."""
        return next((each.listener for each in self._plans if each.listener.address == address), None) or Listener(
            address
        )


def _decide(taken: list[Reload], refusal: str = "") -> None:
    for each in taken:
        each.decide(refusal)
