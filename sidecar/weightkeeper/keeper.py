"""The long-lived process of the sidecar: holds descriptors of weights, answers sockets, starts loaders.

No torch, no CUDA, no mapping of weights: what it holds is the weights and nothing else.
"""

import itertools
import logging
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass

import anyio

from weightkeeper import __version__, fingerprint, note
from weightkeeper.accepting import Acceptor
from weightkeeper.adopting import ADOPT_SECONDS, Adoption, Shaping
from weightkeeper.errors import ConfigError, RefusedError, SocketPathError, StillLoadingError
from weightkeeper.holding import Generation
from weightkeeper.listening import SocketDirectory
from weightkeeper.loads import Loads
from weightkeeper.note import Note
from weightkeeper.protocol import Lease, State, Status
from weightkeeper.publishing import RANKS_SECONDS, Publishing
from weightkeeper.quantities import bytes_text
from weightkeeper.sessions import ControlDialogue, EngineDialogue, PublishDialogue
from weightkeeper.sockets import control_path, engine_path, publish_path
from weightkeeper.store import Store

LOADER = (sys.executable, "-m", "weightkeeper.loader")

NOTE_SECONDS = 5.0
"""Between two tries to leave a note that could not be written."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one keeper.

    Attributes:
        socket_dir: where its sockets are.
        config: vLLM's config file, which names the model; without it nothing is loaded and the keeper stays empty.
        allowed_uids: users besides our own who may connect.
        loader: argument list that loads; `--config` and `--channel` are added.
        poll_seconds: between two looks for a change, after a failed load.
        takes_publications: whether engines may hand over weights that they loaded.
        ranks_seconds: that the ranks of a model which engines publish have, from the first to the last.
        adopt_seconds: to wait at the start for engines that hold the weights; only where a keeper before left engines.
        shaping: picks the options of the config file that shape weights.
    """

    socket_dir: str
    config: str | None = None
    allowed_uids: frozenset[int] = frozenset()
    loader: tuple[str, ...] = LOADER
    poll_seconds: float = 3.0
    takes_publications: bool = True
    ranks_seconds: float = RANKS_SECONDS
    adopt_seconds: float = ADOPT_SECONDS
    shaping: Shaping = dict


class Keeper:
    """One keeper.

    Raises:
        SocketPathError: the socket directory cannot be used.
        SocketInUseError: a live keeper has it.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._directory = SocketDirectory(settings.socket_dir, settings.allowed_uids)
        self._store = Store()
        self._store.changed = self._leave_note
        left = note.read(settings.socket_dir)
        self._written = left
        self._note_failure = ""
        self._was_released = left is not None and left.released
        self._store.released = self._was_released
        self._adoption = Adoption(
            settings.config,
            None if self._was_released else left,
            settings.adopt_seconds if settings.takes_publications else 0.0,
            settings.shaping,
        )
        self._started_at = time.time()
        self._acceptors: dict[str, Acceptor] = {}
        self._loads: Loads | None = None
        numbers = itertools.count(1)
        if settings.config is not None:
            loader, poll = settings.loader, settings.poll_seconds
            self._loads = Loads(
                settings.config, loader, settings.socket_dir, poll, self._adopt_loaded, numbers, self._adoption
            )
        self._publishing = Publishing(
            self._store, numbers, settings.ranks_seconds, self._is_loading, self._adoption, self._adopt_published
        )
        late = StillLoadingError("the keeper has waited long enough for all ranks, and loads by itself")
        self._adoption.given_up = lambda: self._publishing.refuse_offers(late)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        path = control_path(self._settings.socket_dir)
        dialogue = ControlDialogue(self._store, self.status, self.load, self.release)
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async with anyio.create_task_group() as self._tasks:
                    if self._settings.takes_publications:  # first, so that whoever finds a keeper finds all of it
                        self._take_publications()
                    acceptor = Acceptor(self._directory.listen(path), dialogue, self._settings.allowed_uids)
                    self._tasks.start_soon(acceptor.run)
                    logger.info("weightkeeper %s answers on %s", __version__, path)
                    if self._loads is not None:
                        self._tasks.start_soon(self._loads.run)
                    async for number in signals:
                        logger.info("%s: ending", signal.Signals(number).name)
                        if self._note_failure:
                            self._leave_note()
                        self._store.changed = lambda: None  # engines that are there now are there for the next keeper
                        self._tasks.cancel_scope.cancel()
                        break
        finally:
            self._store.close()
            self._directory.close()

    def status(self) -> Status:
        """Everything this keeper knows of itself."""
        return Status(
            state=self._state(),
            version=__version__,
            pid=os.getpid(),
            started_at=self._started_at,
            config=self._settings.config or "",
            own_bytes=_own_bytes(),
            held=self._store.held,
            releasing=self._store.releasing,
            leases=self._store.leases,
            loading=self._loads.loading() if self._loads else None,
            failure=self._loads.failure if self._loads else "",
            loads=self._loads.count if self._loads else 0,
            fallbacks=dict(self._store.fallbacks),
            last_report=self._store.last_report,
            last_report_at=self._store.last_report_at,
        )

    def load(self) -> str:
        """Ask for a load of what the config file names now.

        Raises:
            ConfigError: there is no config file.
        """
        if self._loads is None:
            raise ConfigError("this keeper was started without --config, so it has nothing to load")
        return "loading" if self._loads.ask() else "already loading"

    def release(self, force: bool) -> str:
        """Give the weights back, and stop a load that runs.

        Raises:
            ReleaseRefusedError: engines map them and `force` is not set.
        """
        text = self._store.release(force)
        if self._loads is not None and self._loads.stop():
            text += "; the running load is stopped"
            logger.info("load stopped: the weights are to be released")
        self._publishing.refuse_all(RefusedError("the keeper was told to release its weights meanwhile"))
        self._settle_sockets()
        return text

    def _give_back(self, lease: Lease) -> str:
        text = self._store.give_back(lease)
        self._settle_sockets()
        return text

    def _state(self) -> State:
        if self._store.current is not None:
            return "ready"
        if self._is_loading():
            return "loading"
        if self._loads is not None and self._loads.failure:
            return "failed"
        return "released" if self._store.released else "empty"

    def _is_loading(self) -> bool:
        return self._loads is not None and self._loads.is_running

    def _take_publications(self) -> None:
        listener = self._directory.listen(publish_path(self._settings.socket_dir))
        dialogue = PublishDialogue(self._publishing, self._settings.socket_dir)
        self._tasks.start_soon(Acceptor(listener, dialogue, self._settings.allowed_uids).run)

    def _adopt_loaded(self, generation: Generation) -> None:
        """Offer what a loader published."""
        self._adopt(generation)
        self._leave_note()
        self._publishing.refuse_all(RefusedError("the keeper has loaded a model by itself meanwhile"))
        held = generation.held
        logger.info(
            "ready: %s, %s on %s, loaded in %.1f s (generation %d)",
            held.model, bytes_text(held.nbytes), ", ".join(held.devices), held.load_seconds, held.generation,
        )  # fmt: skip

    def _adopt_published(self, generation: Generation, names: str) -> None:
        """Offer what engines of these names published, or had mapped from a keeper before."""
        is_offer = any(part.mapped_at for part in generation.parts.values())
        self._adopt(generation, names if is_offer else "")
        if is_offer:
            self._adoption.adopted(generation)
        if self._loads is not None:
            self._loads.not_needed()
        held = generation.held
        logger.info(
            "%s: %s, %s on %s %s %s (generation %d)",
            "adopted" if is_offer else "published", held.model, bytes_text(held.nbytes), ", ".join(held.devices),
            "from" if is_offer else "by", names, held.generation,
        )  # fmt: skip

    def _adopt(self, generation: Generation, adopted_from: str = "") -> None:
        """Offer a complete generation in place of the one before."""
        listeners: dict[str, socket.socket] = {}
        try:
            for device in generation.parts.keys() - self._acceptors.keys():
                listeners[device] = self._directory.listen(self._engine_path(device))
        except SocketPathError:
            for device, listener in listeners.items():
                self._directory.remove(self._engine_path(device))
                listener.close()
            raise
        generation.finish(adopted_from)
        self._store.replace(generation)
        for device, listener in listeners.items():
            dialogue = EngineDialogue(self._store, device, self._give_back)
            self._acceptors[device] = Acceptor(listener, dialogue, self._settings.allowed_uids)
            self._tasks.start_soon(self._acceptors[device].run)
        self._settle_sockets()

    def _settle_sockets(self) -> None:
        """Take away the engine sockets of devices on which nothing is offered any more."""
        offered = self._store.current.parts.keys() if self._store.current else set()
        for device in self._acceptors.keys() - offered:
            self._directory.remove(self._engine_path(device))
            self._acceptors.pop(device).scope.cancel()

    def _leave_note(self) -> None:
        """Keep the note for a keeper after this one true: which engines compute on what is offered, if any do."""
        current, engines = self._store.current, self._store.names()
        left = None
        # engines that are there of a keeper before are not known to this one
        self._was_released = self._was_released and current is None
        if engines and current.options is not None:
            parts = {part.device: fingerprint.digest(part.fingerprint) for part in current.parts.values()}
            left = Note(parts, current.options, engines)
        elif self._store.released and (self._was_released or any(lease.is_engine for lease in self._store.leases)):
            left = Note({}, {}, (), released=True)
        if left == self._written:
            self._note_failure = ""
            return
        was_failing, self._note_failure = self._note_failure, note.write(self._settings.socket_dir, left)
        if not self._note_failure:
            self._written = left
        elif not was_failing:
            logger.warning("%s", self._note_failure)
            self._tasks.start_soon(self._leave_note_later)

    async def _leave_note_later(self) -> None:
        while self._note_failure:
            await anyio.sleep(NOTE_SECONDS)
            self._leave_note()

    def _engine_path(self, device: str) -> str:
        return engine_path(self._settings.socket_dir, device)


async def serve(settings: Settings) -> None:
    """Run a keeper until it is told to end.

    Raises:
        SocketPathError: the socket directory cannot be used.
        SocketInUseError: a live keeper has it.
    """
    await Keeper(settings).run()


def _own_bytes() -> int:
    """Resident memory of this process. Held weights are not mapped, so they do not count."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
