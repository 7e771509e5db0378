"""The one template that is in use: kept alive, replaced when a variable changes, given up where it cannot serve."""

import logging
from collections.abc import Mapping, Sequence

import anyio

from weightkeeper.errors import TemplateError
from weightkeeper.launcher import environment as variables
from weightkeeper.launcher.forking import Template, UnusableTemplateError
from weightkeeper.launcher.plain import Plain
from weightkeeper.launcher.reaping import Reaper
from weightkeeper.launcher.settings import Settings

TRIES = 3
"""Templates in a row that may end while they warm; then servers are started plainly."""

_RETRY_SECONDS = 0.5
_RETRY_SECONDS_MOST = 60.0

logger = logging.getLogger(__name__)

Source = Template | Plain
"""What a server can be started from, and what can check its arguments."""


class Templates:
    """Gives out what to start servers from.

    Attributes:
        current: None until the first one is adopted.
        why_plain: why servers are started plainly; "" where they are forked.
    """

    def __init__(self, settings: Settings, reaper: Reaper):
        self.current: Source | None = None
        self.why_plain = "" if settings.prefork else "--no-prefork"
        self._settings = settings
        self._reaper = reaper
        self._environment: Mapping[str, str] = {}
        self._arguments: Sequence[str] = ()
        self._changed = anyio.Event()

    async def candidate(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Source:
        """What a server with this environment is to be started from: the current source, or a new one, ready.

        It comes into use by `adopt`, and goes by `discard` where it is not to.

        Raises:
            TemplateError: there is no room for a new one.
        """
        if self.current is not None and environment == self._environment:
            return await self.source()
        if self.current is not None:
            names = ", ".join(variables.changed(self._environment, environment))
            logger.info("environment: %s changed; warming a template that has it", names)
        return await self._warmed(arguments, environment)

    def adopt(self, candidate: Source, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Use it from now on; the one before goes. Not one that has been replaced since it was given out."""
        if self.current not in (None, candidate) and environment == self._environment:
            self.discard(candidate)
            return
        self._environment, self._arguments = environment, arguments
        self._use(candidate)

    def discard(self, candidate: Source) -> None:
        """Do without a candidate, unless it is what is in use."""
        if candidate is not self.current and isinstance(candidate, Template):
            candidate.close()

    async def source(self) -> Source:
        """What is in use; waits while a template that ended is being replaced."""
        while self.current is None or (isinstance(self.current, Template) and self.current.process.ended.is_set()):
            await self._changed.wait()
        return self.current

    async def keep(self) -> None:
        """Replace a template that ends, for ever. Where there is no room for one the server goes on without."""
        while True:
            current = self.current
            if not isinstance(current, Template):
                await self._changed.wait()
                continue
            await current.process.ended.wait()
            if current is not self.current:
                continue
            logger.warning("the template ended by itself, %s; warming a new one", current.process.exit)
            renewed = await self._renewed(current)
            if current is self.current:
                self._use(renewed)
            else:
                self.discard(renewed)

    def give_up(self, template: Template, why: str) -> None:
        """Start servers plainly from now on."""
        template.close()
        if template is self.current:
            self._use(self._plain(why))

    def close(self) -> None:
        if isinstance(self.current, Template):
            self.current.close()

    def _use(self, candidate: Source) -> None:
        old, self.current = self.current, candidate
        if old is not candidate and isinstance(old, Template):
            old.close()
        self._changed.set()
        self._changed = anyio.Event()

    async def _renewed(self, lost: Template) -> Source:
        """A new source in place of `lost`, as soon as one can be had."""
        delay = _RETRY_SECONDS
        while True:
            try:
                return await self._warmed(self._arguments, self._environment)
            except TemplateError as error:
                logger.error("no new template, the next try is in %g s: %s", delay, error)
            except Exception:
                logger.exception("no new template, the next try is in %g s", delay)
            await anyio.sleep(delay)
            delay = min(2 * delay, _RETRY_SECONDS_MOST)

    async def _warmed(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Source:
        if not self._settings.prefork:
            return Plain(self._settings.application, self._reaper)
        for attempt in range(TRIES):
            await anyio.sleep(attempt * _RETRY_SECONDS)
            try:
                template = Template(self._settings.application, arguments, environment, self._reaper)
            except TemplateError as error:
                logger.warning("warming a template: %s", error)
                if attempt == TRIES - 1:
                    raise  # there is no room for a process; a plain server would be no better
                continue
            try:
                await template.ready()
            except UnusableTemplateError as error:
                template.close()
                return self._plain(str(error))
            except TemplateError as error:
                template.close()
                logger.warning("warming a template: %s", error)
            except BaseException:
                template.close()
                raise
            else:
                self.why_plain = ""
                left = f"{template.threads} thread{'s' if template.threads > 1 else ''}"
                logger.info("warm: the imports took %.1f s and left %s", template.seconds, left)
                return template
        return self._plain(f"{TRIES} templates in a row ended while they were warming")

    def _plain(self, why: str) -> Plain:
        self.why_plain = why
        logger.warning("servers are started plainly, without a fork: %s", why)
        return Plain(self._settings.application, self._reaper)
