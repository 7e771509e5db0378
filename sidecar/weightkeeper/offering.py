"""An engine's lease for as long as it computes on a keeper's weights, with that keeper and with those after it.

A thread waits for the end of the connection, then looks for another keeper's publish socket and hands over what this
engine has kept: descriptors of the segments, layout, fingerprint and receipts. From then on that connection is the
lease. A keeper that refuses is not asked again; the one after it is.

What a kept descriptor allows: of host memory reading alone, since it is sealed; of GPU memory all that the driver
gives to who imports it, writing included. That is no more than the engine was handed to map it, and no store of the
engine's goes through a descriptor: what it computes on stays mapped read-only. They are close-on-exec.
"""

import contextlib
import logging
import os
import queue
import threading
from dataclasses import dataclass

from weightkeeper import client
from weightkeeper.client import Granted, Session
from weightkeeper.dialing import connect, hand_over
from weightkeeper.errors import (
    BusyError,
    LostError,
    NoSocketError,
    ProtocolError,
    SocketPathError,
    StillLoadingError,
    TimeLimitError,
    WeightkeeperError,
)
from weightkeeper.frames import Channel, close_all
from weightkeeper.protocol import WAITING, Publish, Receipt
from weightkeeper.quantities import bytes_text
from weightkeeper.sockets import publish_path

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between two looks for a keeper. A keeper waits for longer than this before it loads (`adopting.ADOPT_SECONDS`)."""

ANSWER_S = 3600.0
"""For a keeper to take over what is offered: it may have to hash the whole checkpoint first."""

PASSING = (BusyError, LostError, NoSocketError, StillLoadingError, TimeLimitError)
"""Refusals after which the same keeper is asked again."""

logger = logging.getLogger("vllm.weightkeeper")

Stamp = tuple[int, int, int]
"""Device, inode and change time (ns) of a socket: another one with each keeper."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where an engine has its weights from, as a keeper after that one has to be told.

    Attributes:
        socket_dir: where keepers are.
        device: name of the engine socket.
        rank: of this process, 0 ≤ rank < world_size.
        model: path or name.
        receipts: what the keeper knows of the checkpoint's files.
        name: of this engine, for people.
        connect_timeout_s: to connect and be greeted.
    """

    socket_dir: str
    device: str
    rank: int
    world_size: int
    model: str
    receipts: tuple[Receipt, ...]
    name: str
    connect_timeout_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What one engine can give to a keeper.

    Attributes:
        socket_dir: where keepers are looked for.
        message: with the time at which it was mapped.
        descriptors: one a segment; they belong to this offer.
        name: of this engine, for people.
        connect_timeout_s: to connect and be greeted.
    """

    socket_dir: str
    message: Publish
    descriptors: list[int]
    name: str
    connect_timeout_s: float

    def keeper(self) -> Stamp | None:
        """Which keeper's publish socket is there, dead or alive; None where there is none."""
        try:
            state = os.lstat(publish_path(self.socket_dir))
        except (OSError, SocketPathError):
            return None
        return state.st_dev, state.st_ino, state.st_ctime_ns

    def dial(self) -> Channel:
        """A connection to the keeper that is there, if it has use for what is offered now.

        Raises:
            StillLoadingError: nobody answers, or it loads by itself.
            ProtocolError: it is of another release.
        """
        try:
            state = client.status(self.socket_dir, self.connect_timeout_s)
            if state.loading is not None and state.loading.stage != WAITING:
                raise StillLoadingError("the keeper is loading by itself")
            return connect(publish_path(self.socket_dir), "engine", self.name, self.connect_timeout_s)
        except ProtocolError:
            raise
        except WeightkeeperError as error:
            raise StillLoadingError(f"no keeper to offer the weights to: {error}") from error


def offer_of(granted: Granted, source: Source) -> Offer:
    """What was just granted, as it will be offered; the descriptors belong to the offer from now on."""
    grant = granted.grant
    message = Publish(
        device=source.device,
        rank=source.rank,
        world_size=source.world_size,
        model=source.model,
        fingerprint=grant.fingerprint,
        receipts=source.receipts,
        kind=grant.kind,
        sizes=grant.sizes,
        layout=grant.layout,
        mapped_at=granted.at,
    )
    return Offer(source.socket_dir, message, granted.descriptors, source.name, source.connect_timeout_s)


class Lease:
    """One engine's hold on one device's weights, from a thread of its own until `close`.

    Args:
        session: with the keeper that has them; None where the one that is there did not take them.
        offer: is closed with the lease.
    """

    def __init__(self, session: Session | None, offer: Offer):
        self._session = session
        self._offer = offer
        self._keeper = offer.keeper()
        self._refused_by = None if session else self._keeper
        self._is_over = False
        self._process = os.getpid()
        self._pause = FIRST_PAUSE_S
        self._taken_by: Stamp | None = None
        self._lost_of: Stamp | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="weightkeeper lease", daemon=True).start()

    def close(self) -> None:
        """End it. The keeper sees it at once; the thread lets go of the descriptors.

        Takes no lock: it may be called by the garbage collector, in any thread and also in this lease's own. In a
        forked child it does nothing: the lease is its parent's.
        """
        if os.getpid() != self._process:
            return
        self._is_over = True
        self._wake.put(None)
        if session := self._session:
            session.shutdown()

    def _run(self) -> None:
        try:
            while not self._is_over:
                if self._session is None:
                    self._find_keeper()
                    continue
                error = self._session.wait_for_end()
                if not self._is_over:
                    self._session.close()
                    self._session = None
                    self._lost(error)
        except Exception:  # this engine goes on; it is only no longer known to any keeper
            logger.exception("weightkeeper: the lease broke on a fault of its own")
        finally:
            if self._session is not None:
                self._session.close()
            close_all(self._offer.descriptors)

    def _lost(self, error: WeightkeeperError) -> None:
        if isinstance(error, PASSING):
            # once for each keeper: one that takes the weights and drops them does so again and again
            level = logging.DEBUG if self._keeper and self._lost_of == self._keeper else logging.INFO
            self._lost_of = self._keeper
            logger.log(
                level,
                "weightkeeper: the lease ended, code=%s; the weights are offered to the next keeper in %s",
                error.code, self._offer.socket_dir,
            )  # fmt: skip
        else:  # said while it waited for this engine's other ranks
            self._refused(error)

    def _refused(self, error: WeightkeeperError) -> None:
        self._refused_by = self._keeper
        logger.info("weightkeeper: a keeper does not take over the weights, code=%s: %s", error.code, error)

    def _find_keeper(self) -> None:
        """Return when one took the weights, or when this lease is over."""
        while self._session is None and not self._is_over:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._pause)
                return
            before, self._keeper = self._keeper, self._offer.keeper()
            # it grows on while the keeper is the same one, also after that one took the weights and dropped them
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S) if self._keeper == before else FIRST_PAUSE_S
            if self._keeper is None or self._keeper == self._refused_by:
                continue
            try:
                with contextlib.suppress(*PASSING, OSError):
                    self._give()
            except WeightkeeperError as error:
                self._refused(error)

    def _give(self) -> None:
        channel, message = self._offer.dial(), self._offer.message
        self._session = Session(channel)  # from here on `close` can end what goes on
        try:
            if self._is_over:
                return
            hand_over(channel, message, self._offer.descriptors, ANSWER_S)
        except BaseException:
            self._session = None
            channel.close()
            raise
        level = logging.DEBUG if self._taken_by == self._keeper else logging.INFO
        self._taken_by = self._keeper
        size = bytes_text(sum(message.sizes))
        logger.log(level, "weightkeeper: a keeper took over %s on %s", size, message.device)
