"""A keeper after another one: weights that engines still compute on are taken from them instead of loaded again.

What is taken is what the keeper before offered, shown by the fingerprints in the note that it left; as long as the
options of the config file that shape weights are what they were, and the checkpoint's files hold what they held. That
is as far as a process without vLLM can tell. Seen only by the next engine, as a mismatch that names the field, is what
the config file does not say: another release of vLLM or torch in the images, variables of the environment, and a
default or a choice of kernels that follows from either. A load by hand (`weightkeeper load`) then makes them anew.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from weightkeeper import engine_config, fingerprint, note
from weightkeeper.errors import (
    BusyError,
    CheckpointChangedError,
    CheckpointError,
    ConfigError,
    RefusedError,
    StillLoadingError,
    WeightkeeperError,
)
from weightkeeper.frames import HEADER
from weightkeeper.holding import Generation, Part
from weightkeeper.note import Note
from weightkeeper.protocol import WAITING, Loading, Publish, Receipt, Receipts

if TYPE_CHECKING:
    from weightkeeper.checkpoint import Checkpoint

ADOPT_SECONDS = 8.0
"""For engines to offer what they map. They look for a keeper every 5 s at the latest (`offering.LONGEST_PAUSE_S`); what
is left is for handing over the descriptors of all ranks."""

Shaping = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Options of a config file → those that shape weights."""

logger = logging.getLogger("weightkeeper.keeper")


class Adoption:
    """Whether what engines offer is what the config file asks for; and the waiting for it at a keeper's start.

    Without a config file everything that is well formed is taken, as it is of an engine that has just loaded it.

    Args:
        config: path of vLLM's config file.
        left: by the keeper before.
        seconds: to wait.
        shaping: picks the options that count.

    Attributes:
        is_waiting: engines have time to offer, and no load has begun.
        given_up: called when the waiting ends without them.
    """

    def __init__(self, config: str | None, left: Note | None, seconds: float, shaping: Shaping):
        self._config = config
        self._left = left
        self._seconds = seconds
        self._shaping = shaping
        self._refused: WeightkeeperError | None = None
        self._changed = anyio.Event()
        self._checking = anyio.Lock()
        self._hashed: tuple[Receipt, ...] = ()
        self._is_adopted = False
        self._since = time.monotonic()
        self.given_up: Callable[[], None] = lambda: None
        self.is_waiting = config is not None and left is not None and seconds > 0

    def loading(self) -> Loading | None:
        """For `status`, while engines are waited for."""
        return Loading(WAITING, 0, 0, time.monotonic() - self._since) if self.is_waiting else None

    @property
    def seconds_left(self) -> float:
        """Of the waiting; without end where nobody waits."""
        return max(0.0, self._since + self._seconds - time.monotonic()) if self.is_waiting else math.inf

    async def wait(self) -> bool:
        """Give engines time to offer what they map; whether they did. Ends early where it cannot be taken."""
        if not self.is_waiting:
            return self._is_adopted
        try:
            try:
                await anyio.to_thread.run_sync(self._check_options, abandon_on_cancel=True)
            except ConfigError as error:  # it may be half written
                logger.warning("engines are waited for although the config file cannot be read now: %s", error)
            names = ", ".join(dict.fromkeys(name or "an engine" for name in self._left.engines))
            logger.info("waiting %g s for engines that hold the weights: %s", self._seconds, names)
            deadline = self._since + self._seconds
            while not self._is_adopted and self._refused is None:
                # a check that has begun in time is waited for: hashing the files anew may take minutes
                left = deadline - time.monotonic()
                if left <= 0 and not self._checking.locked():
                    logger.info("no engine offered the weights in time")
                    break
                with anyio.move_on_after(max(left, 0.05)):
                    await self._changed.wait()
        except WeightkeeperError as error:
            logger.info("engines are not waited for: %s", error)
        finally:
            self.is_waiting = False
            if not self._is_adopted:
                self.given_up()
        return self._is_adopted

    def end_waiting(self) -> None:
        """From now on nothing is taken before a load has ended."""
        self.is_waiting = False

    def admit(self, publish: Publish) -> None:
        """Refuse what the keeper before did not hold, before its descriptors come.

        Raises:
            RefusedError: with the cause; so does whatever stood against an offer before.
        """
        if self._config is None:
            return
        if self._left is None:
            raise RefusedError("no keeper before this one left word of weights that engines compute on")
        if self._refused is not None:
            raise RefusedError(str(self._refused))
        if self._left.parts.get(publish.device) != fingerprint.digest(publish.fingerprint):
            raise RefusedError(f"these are not the weights that the keeper before held on {publish.device}")
        if publish.world_size != len(self._left.parts):
            raise RefusedError(f"the keeper before held {len(self._left.parts)} rank(s), not {publish.world_size}")
        for each in publish.receipts:
            if publish.fingerprint.get(fingerprint.CONTENT + each.name, each.blake3) != each.blake3:
                raise RefusedError(f"its receipt of {each.name!r:.200} contradicts its own fingerprint")

    async def check(self, part: Part) -> None:
        """Compare the config file and the checkpoint with what these weights were made of.

        For every rank, so that whichever makes a generation complete has been compared last of all, an instant before
        it is held. What no receipt covers is hashed once for all ranks.

        Raises:
            RefusedError: an option that shapes weights changed.
            CheckpointChangedError: a file does.
            BusyError: something cannot be read now, so that nothing is known yet.
            StillLoadingError: the time for this is over.
        """
        if self._config is None:
            return
        async with self._checking:
            contents = {name: each for name, each in part.fingerprint.items() if name.startswith(fingerprint.CONTENT)}
            if self.is_waiting and time.monotonic() > self._since + self._seconds:
                raise StillLoadingError("engines were waited for long enough: the keeper loads by itself")
            is_over = threading.Event()
            try:
                await anyio.to_thread.run_sync(self._check_all, part, contents, is_over, abandon_on_cancel=True)
            except (CheckpointChangedError, RefusedError) as error:
                self._refused = (
                    error  # whoever offers them: `admit` lets in one fingerprint a device, and true receipts
                )
                raise
            except (CheckpointError, ConfigError) as error:
                raise BusyError(f"what these weights were made of cannot be compared now: {error}") from error
            finally:
                is_over.set()
                self._changed.set()
                self._changed = anyio.Event()

    def adopted(self, generation: Generation) -> None:
        """This generation came of offers and is about to be held."""
        if self._config is not None and self._left is not None:
            generation.options = self._left.options
        self._is_adopted = True
        self.is_waiting = False
        self._changed.set()

    async def options(self) -> dict[str, str] | None:
        """Digests of the config file's options that shape weights; None where there is no file that can be read."""
        if self._config is None:
            return None
        try:
            return await anyio.to_thread.run_sync(self._options_now, abandon_on_cancel=True)
        except ConfigError:
            return None  # whoever needs the file says what is wrong with it

    def _options_now(self) -> dict[str, str]:
        return note.digests(self._shaping(engine_config.read(self._config)))

    def _check_options(self) -> None:
        now, then = self._options_now(), self._left.options
        if changed := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
            self._refused = RefusedError(f"{self._config}: {', '.join(changed)} changed since these weights were made")
            raise self._refused

    def _check_all(self, part: Part, contents: dict[str, str], is_over: threading.Event) -> None:
        """In a thread."""
        # a keeper that nobody offers anything has no use for this
        from weightkeeper.checkpoint import open_checkpoint

        receipts: tuple[Receipt, ...] = msgspec.json.decode(part.receipts[HEADER.size :], type=Receipts).files
        for _ in range(2):  # hashing may take minutes in which anything changes
            self._check_options()
            model = self._model(part.model)
            known, names = self._contents(open_checkpoint(model), receipts, is_over)
            if differences := fingerprint.differences(contents, fingerprint.compose(known, {})):
                fields = ", ".join(each.field.removeprefix(fingerprint.CONTENT) for each in differences)
                raise CheckpointChangedError(f"{model}: other files than these weights were made of: {fields}")
            if not names:
                return
            logger.info("hashed %s: their receipts do not cover them", ", ".join(names))

    def _model(self, offered: str) -> str:
        """Where the files are: the config file's path, or the engine's own where the config file has a mere name."""
        model = engine_config.required(engine_config.read(self._config), "model", self._config)
        if os.path.isabs(model) or os.path.exists(model):
            return model
        if os.path.isabs(offered) and os.path.isdir(offered):
            return offered
        raise RefusedError(
            f"{self._config}: the model {model} is no path that this keeper sees, so its files cannot be compared"
        )

    def _contents(
        self, checkpoint: "Checkpoint", receipts: tuple[Receipt, ...], is_over: threading.Event
    ) -> tuple[dict[str, str], list[str]]:
        """File name → BLAKE3 in hex; and the names of those that had to be hashed."""
        from weightkeeper import identity

        def progress(*_: object) -> None:
            if is_over.is_set():
                raise RefusedError("the keeper ends")

        trusted = [each for each in (*receipts, *self._hashed) if each.trusted]
        by_stamp = {(each.name, each.size, each.mtime_ns, each.ctime_ns, each.inode): each.blake3 for each in trusted}
        known = {file.name: by_stamp.get((file.name, *file.stamp), "") for file in checkpoint.files}
        weights = tuple(file for file in checkpoint.weight_files if not known[file.name])
        configs = tuple(file for file in checkpoint.config_files if not known[file.name])
        if not weights and not configs:
            return known, []
        try:
            taken = identity.take(replace(checkpoint, weight_files=weights, config_files=configs), progress)
        except CheckpointChangedError as error:
            raise BusyError(f"the files are being written: {error}") from error
        names = {each.name for each in taken}
        present = {file.name for file in checkpoint.files}
        self._hashed = (*(each for each in self._hashed if each.name in present - names), *taken)
        return known | {each.name: each.blake3 for each in taken}, sorted(names)
