"""One run of the loader: the dialogue over its channel, and the generation that comes of it."""

import contextlib
import logging
import time
from collections.abc import Callable

from weightkeeper.channel import AsyncChannel
from weightkeeper.child import Child
from weightkeeper.errors import LoadFailedError, LostError, ProtocolError, WeightkeeperError
from weightkeeper.frames import Frame, Limits, close_all, name_of
from weightkeeper.holding import MAX_COUNT, Generation
from weightkeeper.protocol import (
    FRAME_SECONDS,
    VERSION,
    Done,
    Failed,
    Hello,
    Loading,
    Progress,
    Publish,
    Refusal,
    Segments,
    Welcome,
)
from weightkeeper.quantities import bytes_text, printable
from weightkeeper.sockets import engine_path

FromLoader = Hello | Progress | Publish | Segments | Failed

END_SECONDS = 5.0
"""For a loader to end by itself once everything is said, and again once it is killed."""

LOG_SECONDS = 10.0
"""A load that goes on says so at least this often, when it tells anything at all."""

_SETTLE_SECONDS = 5.0

logger = logging.getLogger("weightkeeper.keeper")


class ProgressLog:
    """Progress as log lines: every stage, and inside a stage every tenth of it, but no more than one line a second."""

    def __init__(self) -> None:
        self._told = ("", 0)
        self._told_at = 0.0

    def tell(self, progress: Progress) -> None:
        tenth = progress.done_bytes * 10 // progress.total_bytes if progress.total_bytes else 0
        now = time.monotonic()
        stage_before, tenth_before = self._told
        if progress.stage == stage_before:
            quiet = now - self._told_at
            if quiet < 1 or (tenth == tenth_before and quiet < LOG_SECONDS):
                return
        self._told, self._told_at = (progress.stage, tenth), now
        if progress.total_bytes:
            done, total = bytes_text(progress.done_bytes), bytes_text(progress.total_bytes)
            percent = progress.done_bytes * 100 // progress.total_bytes
            logger.info("loading: %s, %d %% (%s of %s)", progress.stage, percent, done, total)
        else:
            logger.info("loading: %s", progress.stage)


class Load:
    """What a running loader says, and what becomes of it.

    Args:
        child: the loader; its channel is closed with `close`.
        generation: what its ranks are added to. Its owner closes it where `published` fails.
        socket_dir: where the engine sockets will be.
        on_progress: called with every message of progress, cleaned.
    """

    def __init__(self, child: Child, generation: Generation, socket_dir: str, on_progress: Callable[[Progress], None]):
        self._child = child
        self._channel = AsyncChannel(child.channel, Limits(FromLoader))
        self._generation = generation
        self._socket_dir = socket_dir
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._progress = Progress("starting")

    def loading(self) -> Loading:
        """For `status`."""
        progress = self._progress
        return Loading(progress.stage, progress.done_bytes, progress.total_bytes, time.monotonic() - self._started)

    async def published(self) -> None:
        """Return when the generation is complete.

        Raises:
            LoadFailedError: the loader said why it cannot, or ended, or broke the dialogue.
        """
        try:
            cause = await self._dialogue()
        except LostError:
            cause = ""
        except WeightkeeperError as error:
            await self._refuse(error)
            cause = f"the loader was refused: {error}"
        if cause is None:
            return
        await self._child.settled(_SETTLE_SECONDS)  # what it still writes to stderr is part of the story
        raise LoadFailedError(cause or self._child.cause_of_end())

    async def ended(self) -> None:
        """Wait until the loader is gone, and its own memory on the device with it; kill it where that takes long.

        An engine that is waiting measures free memory next, and must not count on what is only about to be freed.
        """
        self._progress = Progress("ending the loader")
        if await self._child.gone(END_SECONDS):
            return
        logger.warning("the loader has published everything and does not end; it is killed")
        self._child.kill()
        if not await self._child.gone(END_SECONDS):
            logger.warning("the killed loader is still there; its weights are served all the same")

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    async def _dialogue(self) -> str | None:
        """None when everything is published, a cause in words, or "" where the loader just ended."""
        hello = await self._next(None)
        if hello is None:
            return ""
        if not isinstance(hello.message, Hello) or hello.message.version != VERSION:
            raise ProtocolError(f"expected a Hello of version {VERSION}")
        await self._channel.send(Welcome(VERSION))
        part = None
        while (frame := await self._next(FRAME_SECONDS if part else None)) is not None:
            message = frame.message
            if part is None and frame.descriptors:
                close_all(frame.descriptors)
                raise ProtocolError("descriptors came before the Publish that they belong to")
            if part is not None and not isinstance(message, Segments):
                close_all(frame.descriptors)
                raise ProtocolError(f"expected the segments of {part.device}, got {name_of(message)}")
            match message:
                case Progress():
                    self._tell(message)
                case Publish():
                    engine_path(self._socket_dir, message.device)
                    part = self._generation.begin(message)
                case Segments() if part is not None:
                    part.add(message.first, frame.descriptors)
                    if part.is_complete:
                        part = None
                        is_complete = self._generation.is_complete
                        await self._channel.send(Done())
                        if is_complete:
                            return None
                case Failed():
                    await self._channel.send(Done())
                    return printable(message.message, 4000, keep_lines=True) or message.code
                case _:
                    raise ProtocolError(f"{name_of(message)} is out of place")
        return ""

    async def _next(self, idle_seconds: float | None) -> Frame | None:
        """A loader may take its time between two messages: its end is seen as the end of the stream."""
        try:
            return await self._channel.receive(idle_seconds)
        except LostError:
            return None  # how the process ended says more than how its stream did

    def _tell(self, progress: Progress) -> None:
        done, total = (min(max(0, number), MAX_COUNT) for number in (progress.done_bytes, progress.total_bytes))
        self._progress = Progress(printable(progress.stage, 80), done, total)
        self._on_progress(self._progress)

    async def _refuse(self, error: WeightkeeperError) -> None:
        with contextlib.suppress(WeightkeeperError):
            await self._channel.send(Refusal(error.code, str(error)), seconds=1)
