"""When a keeper loads: on request, and again after a failure when something changed. One load at a time."""

import logging
import math
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread

from weightkeeper import retry_key
from weightkeeper.adopting import Adoption
from weightkeeper.child import Child
from weightkeeper.errors import LoadFailedError, SocketPathError
from weightkeeper.holding import Generation
from weightkeeper.loading import Load, ProgressLog
from weightkeeper.protocol import Loading

logger = logging.getLogger("weightkeeper.keeper")


class Loads:
    """The loads of one keeper, one after the other.

    Args:
        config: vLLM's config file, whose path every loader gets.
        loader: argument list of the loader.
        socket_dir: where the engine sockets will be; the loader finds it in WEIGHTKEEPER_SOCKET_DIR.
        poll_seconds: between two looks for a change, after a failed load.
        adopt: takes over a complete generation, or raises SocketPathError and leaves all as it was.
        numbers: of the generations, which the keeper counts.
        adoption: what engines may give back before the first load; None where they are not asked.

    Attributes:
        failure: cause of the last failed load, empty when the last one succeeded.
        count: finished loads.
    """

    def __init__(
        self,
        config: str,
        loader: tuple[str, ...],
        socket_dir: str,
        poll_seconds: float,
        adopt: Callable[[Generation], None],
        numbers: Iterator[int],
        adoption: Adoption | None = None,
    ):
        self.failure = ""
        self.count = 0
        self._config = config
        self._command = [*loader, "--config", config]
        self._socket_dir = socket_dir
        self._poll_seconds = poll_seconds
        self._adopt = adopt
        self._numbers = numbers
        self._adoption = adoption
        self._load: Load | None = None
        self._key: retry_key.Key | None = None
        self._is_asked = True
        self._is_asked_again = False
        self._asked = anyio.Event()
        self._scope = anyio.CancelScope()

    @property
    def is_running(self) -> bool:
        """Whether a load runs or is about to."""
        return self._is_asked or self._load is not None

    def loading(self) -> Loading | None:
        """For `status`."""
        if self._load is not None:
            return self._load.loading()
        if self._adoption is not None and (waiting := self._adoption.loading()):
            return waiting
        return Loading("starting", 0, 0, 0.0) if self._is_asked else None

    def ask(self) -> bool:
        """Have the next load begin. Engines are not waited for any longer.

        False where a load runs already; where what it was begun for has changed since, another one follows it.
        """
        if self._adoption is not None and self._adoption.is_waiting:
            self._adoption.end_waiting()
            self._scope.cancel()
            return True
        if self.is_running:
            self._is_asked_again = True
            return False
        self._is_asked = True
        self._asked.set()
        return True

    def stop(self) -> bool:
        """End a load that runs and forget a failure; False where none ran."""
        was_running = self.is_running
        self._is_asked = False
        self._scope.cancel()
        self.failure = ""
        return was_running

    def not_needed(self) -> None:
        """The weights are there by another way, so nothing is to be loaded, or tried again."""
        self.failure = ""
        if self._load is None:
            self._is_asked = False

    async def run(self) -> None:
        """Load for ever; the first load begins at once, unless engines have the weights."""
        if self._adoption is not None:
            with anyio.CancelScope() as self._scope:
                try:
                    await self._adoption.wait()
                except Exception:  # whatever breaks here, the weights can be loaded
                    logger.exception("waiting for engines broke on a fault of the keeper's own")
        while True:
            await self._wait_for_reason()
            with anyio.CancelScope() as self._scope:
                try:
                    await self._run_once()
                except Exception as error:  # whatever breaks here, weights that are held stay held
                    logger.exception("the load broke on a fault of the keeper's own")
                    self._fail(error)

    async def _wait_for_reason(self) -> None:
        seen = None
        while not self._is_asked:
            self._asked = anyio.Event()
            with anyio.move_on_after(self._poll_seconds if self.failure else math.inf):
                await self._asked.wait()
            if self._is_asked or not self.failure:
                continue
            key = await self._key_now()
            # A change counts when it has settled, so that a copy that is still running is not read half.
            if self.failure and key == seen != self._key:
                logger.info("something changed since the load failed: trying again")
                self._is_asked = True
            seen = key

    async def _run_once(self) -> None:
        generation = Generation(next(self._numbers))
        is_adopted = False
        try:
            self._is_asked_again = False
            self._key = await self._key_now()
            logger.info("load started: %s", self._config)
            if self._adoption is not None:
                generation.options = await self._adoption.options()
            child = Child(self._command, {"WEIGHTKEEPER_SOCKET_DIR": self._socket_dir})
            self._load = load = Load(child, generation, self._socket_dir, ProgressLog().tell)
            self._is_asked = False
            async with child:
                try:
                    await load.published()
                    await load.ended()
                    if self._adoption is not None and await self._adoption.options() != generation.options:
                        generation.options = None  # nobody knows which of the two this was made of
                    is_changed = await self._is_changed()
                    self._adopt(generation)
                except (LoadFailedError, SocketPathError) as error:
                    self._fail(error)
                else:
                    is_adopted = True
                    self._load, self.failure, self.count = None, "", self.count + 1
                    self._is_asked = is_changed
                finally:
                    load.close()
        except LoadFailedError as error:
            self._fail(error)
        finally:
            self._load = None
            if not is_adopted:
                generation.close()

    async def _is_changed(self) -> bool:
        """Whether somebody asked for a load of what has changed since this one began."""
        is_changed = False
        while self._is_asked_again and not is_changed:
            self._is_asked_again = False
            is_changed = await self._key_now() != self._key
        return is_changed

    def _fail(self, error: Exception) -> None:
        self._load, self._is_asked = None, False
        self.failure = str(error)
        logger.error("load failed: %s", error)

    async def _key_now(self) -> retry_key.Key:
        """In a thread, because a network file system may take its time."""
        return await anyio.to_thread.run_sync(retry_key.key_of, self._config, abandon_on_cancel=True)
