"""Weights that engines hand over: ranks come on connections of their own, and are offered when all are there."""

import logging
import math
import resource
from collections.abc import Callable, Iterator, Mapping

import anyio

from weightkeeper import fingerprint
from weightkeeper.accepting import Connection
from weightkeeper.errors import AlreadyHeldError, RefusedError, StillLoadingError, WeightkeeperError
from weightkeeper.holding import Generation, Part
from weightkeeper.protocol import MAX_SEGMENTS, Lease, Publish
from weightkeeper.quantities import bytes_text
from weightkeeper.store import Store

RANKS_SECONDS = 600.0
"""From the first published rank of a model to the last one: they load at the same time, but from slow disks."""

logger = logging.getLogger("weightkeeper.keeper")


class Publisher:
    """One engine's rank, from its Publish to the end of its connection.

    Attributes:
        scope: of its waiting for the other ranks, and then of its lease.
        lease: once the model is offered.
        refusal: why its part was given up while it waited.
    """

    def __init__(self, connection: Connection, part: Part):
        self.connection = connection
        self.part = part
        self.scope = anyio.CancelScope()
        self.lease: Lease | None = None
        self.refusal: WeightkeeperError | None = None

    @property
    def belongs_to(self) -> tuple[object, ...]:
        """Equal for ranks of one model: whose they are, of which files, and how they are held."""
        part = self.part
        contents = {name: each for name, each in part.fingerprint.items() if name.startswith(fingerprint.CONTENT)}
        return self.connection.peer.uid, part.model, part.world_size, part.kind, fingerprint.digest(contents)

    def refuse(self, error: WeightkeeperError) -> None:
        self.refusal = error
        self.scope.cancel()


class Gathering:
    """A generation whose ranks are coming in."""

    def __init__(self, number: int, seconds: float):
        self.generation = Generation(number)
        self.publishers: list[Publisher] = []
        self.deadline = anyio.current_time() + seconds

    def fits(self, publisher: Publisher) -> bool:
        """Whether a rank is one of those that are missing here."""
        if anyio.current_time() >= self.deadline or publisher.belongs_to != self.publishers[0].belongs_to:
            return False
        part, others = publisher.part, [other.part for other in self.publishers]
        return not any(part.rank == other.rank or part.device == other.device for other in others)

    def add(self, publisher: Publisher) -> None:
        self.generation.add(publisher.part)
        self.publishers.append(publisher)

    def remove(self, publisher: Publisher) -> None:
        del self.generation.parts[publisher.part.device]
        self.publishers.remove(publisher)


class Publishing:
    """All that engines are handing over to one keeper.

    Args:
        store: what is held.
        numbers: of the generations, which the keeper counts.
        seconds: that the ranks of a model have, from the first to the last.
        is_loading: whether the keeper loads by itself now.
        adopt: takes over a complete generation from engines of these names, or raises SocketPathError.
    """

    def __init__(
        self,
        store: Store,
        numbers: Iterator[int],
        seconds: float,
        is_loading: Callable[[], bool],
        adopt: Callable[[Generation, str], None],
    ):
        self._store = store
        self._numbers = numbers
        self._seconds = seconds
        self._is_loading = is_loading
        self._adopt = adopt
        self._publishers: list[Publisher] = []
        self._gatherings: list[Gathering] = []

    def begin(self, connection: Connection, publish: Publish) -> Publisher:
        """A rank whose segments may come.

        Raises:
            StillLoadingError: the keeper loads by itself.
            AlreadyHeldError: it holds these weights.
            RefusedError: too much is being handed over at once.
            ProtocolError: the message contradicts itself.
            MemoryKindError: its kind of memory cannot be held.
        """
        self._check(publish.device, publish.fingerprint)
        publisher = Publisher(connection, Part(publish))
        room = min(MAX_SEGMENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        coming = sum(len(other.part.sizes) for other in self._publishers if other.lease is None)
        if coming + len(publish.sizes) > room:
            raise RefusedError(
                f"{len(publish.sizes)} segments on {publish.device} besides {coming} of other engines that are not "
                f"complete yet; the limit is {room} (half the limit of open files, {MAX_SEGMENTS} at most)"
            )
        self._publishers.append(publisher)
        return publisher

    def complete(self, publisher: Publisher) -> None:
        """A rank's part is whole: it waits for the others, or is offered with them.

        Raises:
            StillLoadingError: as in `begin`, and so is AlreadyHeldError.
            SocketPathError: the engine sockets cannot be made.
        """
        gathering = next((each for each in self._gatherings if each.fits(publisher)), None)
        if gathering is None:
            gathering = Gathering(next(self._numbers), self._seconds)
        gathering.add(publisher)
        if gathering not in self._gatherings:
            self._gatherings.append(gathering)
        publisher.scope.deadline = gathering.deadline
        part = publisher.part
        if not gathering.generation.is_complete:
            logger.info(
                "rank %d of %d: %s, %s on %s by %s; the others have %.0f s",
                part.rank, part.world_size, part.model, bytes_text(sum(part.sizes)), part.device,
                publisher.connection.shown, gathering.deadline - anyio.current_time(),
            )  # fmt: skip
            return
        try:
            for each in gathering.generation.parts.values():
                self._check(each.device, each.fingerprint)
            self._adopt(gathering.generation, _names(gathering.publishers))
        except WeightkeeperError as error:
            self._give_up(gathering, error)
            raise
        self._gatherings.remove(gathering)
        for each in gathering.publishers:
            each.scope.deadline = math.inf
            peer, name = each.connection.peer, each.connection.name
            each.lease = self._store.begin(each.part.device, name, peer, "zero_copy")

    def end(self, publisher: Publisher) -> None:
        """The connection is over: its lease ends, or its part goes."""
        self._publishers.remove(publisher)
        if publisher.lease is not None:
            self._store.end(publisher.lease)
            return
        for gathering in self._gatherings:
            if publisher in gathering.publishers:
                gathering.remove(publisher)
        self._gatherings = [each for each in self._gatherings if each.publishers]
        publisher.part.close()

    def refuse_all(self, error: WeightkeeperError) -> None:
        """Give up every rank that waits for others."""
        for gathering in list(self._gatherings):
            self._give_up(gathering, error)

    def _give_up(self, gathering: Gathering, error: WeightkeeperError) -> None:
        """Refuse all of its ranks; their parts go as their connections end."""
        self._gatherings.remove(gathering)
        for each in gathering.publishers:
            each.refuse(error)

    def _check(self, device: str, fields: Mapping[str, str]) -> None:
        if self._is_loading():
            raise StillLoadingError("the keeper is loading by itself now, so it takes no weights from engines")
        held = self._store.current.parts.get(device) if self._store.current else None
        if held is not None and held.fingerprint == fields:
            number = self._store.current.number
            raise AlreadyHeldError(
                f"the keeper holds these weights on {device} already (generation {number}); map them"
            )


def _names(publishers: list[Publisher]) -> str:
    by_rank = sorted(publishers, key=lambda each: each.part.rank)
    return ", ".join(dict.fromkeys(each.connection.shown for each in by_rank))
