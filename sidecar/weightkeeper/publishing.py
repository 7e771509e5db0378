"""Weights that engines hand over: ranks come on connections of their own, and are offered when all are there."""

import logging
import math
import resource
from collections.abc import Callable, Iterator

import anyio

from weightkeeper import fingerprint
from weightkeeper.accepting import Connection
from weightkeeper.adopting import Adoption
from weightkeeper.errors import AlreadyHeldError, BusyError, RefusedError, StillLoadingError, WeightkeeperError
from weightkeeper.holding import Generation, Part
from weightkeeper.memory.sameness import is_same
from weightkeeper.protocol import MAX_SEGMENTS, Lease, Publish
from weightkeeper.quantities import bytes_text
from weightkeeper.store import Store

RANKS_SECONDS = 600.0
"""From the first published rank of a model to the last one: they load at the same time, but from slow disks."""

RANK = "rank"
"""The one field of a fingerprint in which ranks of one model differ; `conditions.conditions_of` composes it."""

logger = logging.getLogger("weightkeeper.keeper")


class Publisher:
    """One engine's rank, from its Publish to the end of its connection.

    Attributes:
        scope: of its waiting for the other ranks, and then of its lease.
        options: of the keeper's config file, as they were when this came.
        lease: once the model is offered.
        refusal: why its part was given up while it waited.
    """

    def __init__(self, connection: Connection, part: Part):
        self.connection = connection
        self.part = part
        self.scope = anyio.CancelScope()
        self.options: dict[str, str] | None = None
        self.lease: Lease | None = None
        self.refusal: WeightkeeperError | None = None

    @property
    def is_offer(self) -> bool:
        """Whether it was mapped from a keeper before, and not just loaded."""
        return self.part.mapped_at > 0

    @property
    def belongs_to(self) -> tuple[object, ...]:
        """Equal for ranks of one model: whose they are, what they were made of, and how they are held."""
        part = self.part
        shared = {name: each for name, each in part.fingerprint.items() if name != RANK}
        whose = self.connection.peer.uid, self.is_offer
        return *whose, part.model, part.world_size, part.kind, fingerprint.digest(shared)

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
        adoption: what may be taken of engines that mapped it from a keeper before.
        adopt: takes over a complete generation from engines of these names, or raises SocketPathError.
    """

    def __init__(
        self,
        store: Store,
        numbers: Iterator[int],
        seconds: float,
        is_loading: Callable[[], bool],
        adoption: Adoption,
        adopt: Callable[[Generation, str], None],
    ):
        self._store = store
        self._numbers = numbers
        self._seconds = seconds
        self._is_loading = is_loading
        self._adoption = adoption
        self._adopt = adopt
        self._publishers: list[Publisher] = []
        self._gatherings: list[Gathering] = []

    def begin(self, connection: Connection, publish: Publish) -> Publisher:
        """A rank whose segments may come.

        Raises:
            StillLoadingError: the keeper loads by itself.
            AlreadyHeldError: it holds these weights.
            RefusedError: too much is being handed over at once, or an offer is not what this keeper is to hold.
            BusyError: as the first, of an offer.
            ProtocolError: the message contradicts itself.
            MemoryKindError: its kind of memory cannot be held.
        """
        publisher = Publisher(connection, Part(publish))
        self._check(publisher)
        if publisher.is_offer and not self._is_held(publisher):
            self._adoption.admit(publish)
        room = min(MAX_SEGMENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        coming = sum(len(other.part.sizes) for other in self._publishers if other.lease is None)
        if coming + len(publish.sizes) > room:
            raise (BusyError if publisher.is_offer else RefusedError)(
                f"{len(publish.sizes)} segments on {publish.device} besides {coming} of other engines that are not "
                f"complete yet; the limit is {room} (half the limit of open files, {MAX_SEGMENTS} at most)"
            )
        self._publishers.append(publisher)
        return publisher

    async def check(self, publisher: Publisher) -> None:
        """Note the keeper's own options beside what was just loaded; of an offer, see whether all is as it was.

        Raises:
            WeightkeeperError: with what changed.
        """
        if not publisher.is_offer:
            publisher.options = await self._adoption.options()
        elif not self._is_held(publisher):
            await self._adoption.check(publisher.part)

    def complete(self, publisher: Publisher) -> None:
        """A rank's part is whole: it waits for the others, or is offered with them; or it is what is held already.

        Raises:
            StillLoadingError: as in `begin`, and so are AlreadyHeldError and RefusedError.
            SocketPathError: the engine sockets cannot be made.
        """
        if publisher.is_offer:
            self._check(publisher)
            if self._is_held(publisher):
                self._join(publisher)
                return
        gathering = next((each for each in self._gatherings if each.fits(publisher)), None)
        if gathering is None:
            gathering = Gathering(next(self._numbers), self._seconds)
        gathering.add(publisher)
        if gathering not in self._gatherings:
            self._gatherings.append(gathering)
        publisher.scope.deadline = gathering.deadline
        part = publisher.part
        if not gathering.generation.is_complete:
            left = gathering.deadline - anyio.current_time()
            logger.info(
                "rank %d of %d: %s, %s on %s by %s; the others have %.0f s",
                part.rank, part.world_size, part.model, bytes_text(sum(part.sizes)), part.device,
                publisher.connection.shown, min(left, self._adoption.seconds_left if publisher.is_offer else left),
            )  # fmt: skip
            return
        try:
            for each in gathering.publishers:
                self._check(each)
            gathering.generation.options = publisher.options
            self._adopt(gathering.generation, _names(gathering.publishers))
        except WeightkeeperError as error:
            self._give_up(gathering, error)
            raise
        self._gatherings.remove(gathering)
        for each in gathering.publishers:
            self._begin_lease(each)
        self._settle_offers()

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

    def refuse_offers(self, error: WeightkeeperError) -> None:
        """Give up every offered rank that waits for others."""
        for gathering in list(self._gatherings):
            if gathering.publishers[0].is_offer:
                self._give_up(gathering, error)

    def _give_up(self, gathering: Gathering, error: WeightkeeperError) -> None:
        """Refuse all of its ranks; their parts go as their connections end."""
        self._gatherings.remove(gathering)
        for each in gathering.publishers:
            each.refuse(error)

    def _begin_lease(self, publisher: Publisher) -> None:
        publisher.scope.deadline = math.inf
        peer, name = publisher.connection.peer, publisher.connection.name
        publisher.lease = self._store.begin(publisher.part.device, name, peer, "zero_copy")

    def _join(self, publisher: Publisher) -> None:
        """Let an engine that computes on what is held have its lease on it.

        Raises:
            AlreadyHeldError: it cannot be shown that it is the same memory.
        """
        part, current = publisher.part, self._store.current
        held = current.parts[part.device]
        if held.sizes != part.sizes or not is_same(part.kind, held.descriptors, part.descriptors):
            raise AlreadyHeldError(
                f"these weights are already held on {part.device} by another engine's copy (generation "
                f"{current.number}); for as long as this engine lives, its own copy is there beside it"
            )
        part.close()
        current.mapped_at = max(current.mapped_at, part.mapped_at)
        self._begin_lease(publisher)

    def _settle_offers(self) -> None:
        """Of the offers that wait for other ranks: those of what is held now are leases, the others are refused."""
        for gathering in list(self._gatherings):
            for each in [one for one in gathering.publishers if one.is_offer]:
                try:
                    self._check(each)
                    if not self._is_held(each):
                        continue  # newer than what is held, and not complete yet
                    self._join(each)
                except WeightkeeperError as error:
                    each.refuse(error)
                gathering.remove(each)
        self._gatherings = [each for each in self._gatherings if each.publishers]

    def _is_held(self, publisher: Publisher) -> bool:
        """Whether weights with this fingerprint are offered on this device."""
        held = self._store.current.parts.get(publisher.part.device) if self._store.current else None
        return held is not None and held.fingerprint == publisher.part.fingerprint

    def _check(self, publisher: Publisher) -> None:
        if self._is_loading() and not (publisher.is_offer and self._adoption.is_waiting):
            raise StillLoadingError("the keeper is loading by itself now, so it takes no weights from engines")
        if publisher.is_offer:
            self._check_offer(publisher)
        elif self._is_held(publisher):
            device, number = publisher.part.device, self._store.current.number
            raise AlreadyHeldError(
                f"the keeper holds these weights on {device} already (generation {number}); map them"
            )

    def _check_offer(self, publisher: Publisher) -> None:
        """What engines mapped from a keeper before never takes the place of anything newer."""
        current = self._store.current
        if current is None and self._store.released:
            raise RefusedError("the keeper was told to release its weights")
        if (
            current is not None
            and not self._is_held(publisher)
            and not 0 < current.mapped_at < publisher.part.mapped_at
        ):
            raise RefusedError(f"the keeper holds other weights by now (generation {current.number})")


def _names(publishers: list[Publisher]) -> str:
    by_rank = sorted(publishers, key=lambda each: each.part.rank)
    return ", ".join(dict.fromkeys(each.connection.shown for each in by_rank))
