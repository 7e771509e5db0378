"""The keeper's side of the dialogues with clients: a class each for the control, engine and publish sockets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from weightkeeper.accepting import REQUESTS, Connection
from weightkeeper.errors import MismatchError, ProtocolError, TimeLimitError
from weightkeeper.frames import Limits, close_all, name_of
from weightkeeper.holding import Part
from weightkeeper.protocol import (
    FRAME_SECONDS,
    MAX_DESCRIPTORS,
    Done,
    Lease,
    LoadRequest,
    MapRequest,
    Mismatch,
    Publish,
    ReceiptsRequest,
    ReleaseRequest,
    Report,
    Segments,
    Status,
    StatusRequest,
)
from weightkeeper.publishing import Publisher, Publishing
from weightkeeper.quantities import printable
from weightkeeper.sockets import engine_path
from weightkeeper.store import Store

PUBLICATION = Limits(Publish | Segments)
"""What may come from an engine that was let in to publish, until its part is complete."""

logger = logging.getLogger("weightkeeper.keeper")


@dataclass(frozen=True, slots=True)
class ControlDialogue:
    """Any number of requests, each answered at once.

    Attributes:
        status: makes the answer to a StatusRequest.
        load: asks for a load; returns what to say.
        release: gives the weights back (forced or not); returns what to say.
    """

    store: Store
    status: Callable[[], Status]
    load: Callable[[], str]
    release: Callable[[bool], str]

    async def __call__(self, connection: Connection) -> None:
        if not await connection.welcome("control"):
            return
        while (frame := await connection.request()) is not None:
            match frame.message:
                case StatusRequest():
                    answer: Status | Done = self.status()
                case LoadRequest():
                    answer = Done(self.load())
                case ReleaseRequest(force=force):
                    answer = Done(self.release(force))
                case Report() as report:
                    self.store.report(report)
                    answer = Done()
                case other:
                    raise ProtocolError(f"{name_of(other)} has no place on the control socket")
            await connection.channel.send(answer)


@dataclass(frozen=True, slots=True)
class EngineDialogue:
    """Receipts, then one MapRequest; from the Grant on, the connection is a lease.

    Attributes:
        device: whose engine socket this is.
        give_back: ends a lease whose engine has its own copy; returns what to say.
    """

    store: Store
    device: str
    give_back: Callable[[Lease], str]

    async def __call__(self, connection: Connection) -> None:
        if not await connection.welcome("engine"):
            return
        lease: Lease | None = None
        try:
            while (frame := await connection.request()) is not None:
                match frame.message:
                    case ReceiptsRequest() if lease is None:
                        await connection.channel.send_encoded(self.store.part(self.device).receipts, ())
                    case MapRequest() as request if lease is None:
                        lease = await self._grant(connection, request)
                        if lease is None:
                            return
                    case ReleaseRequest() if lease is not None and lease.is_engine:
                        connection.is_lease = False
                        ended, lease = lease, None
                        await connection.channel.send(Done(self.give_back(ended)))
                    case other:
                        raise ProtocolError(f"{name_of(other)} is out of place on an engine socket")
        finally:
            if lease is not None:
                self.store.end(lease)

    async def _grant(self, connection: Connection, request: MapRequest) -> Lease | None:
        """The new lease, with everything sent; None where the answer was a Mismatch."""
        try:
            granted = self.store.grant(self.device, connection.name, connection.peer, request)
        except MismatchError as error:
            logger.warning("%s is refused, code=%s: %s", connection.shown, error.code, error)
            await connection.channel.send(Mismatch(tuple(error.differences)))
            return None
        connection.is_lease = True
        try:
            await connection.channel.send_encoded(granted.grant, ())
            for first in range(0, len(granted.descriptors), MAX_DESCRIPTORS):
                await connection.channel.send(Segments(first), granted.descriptors[first : first + MAX_DESCRIPTORS])
        except BaseException:
            connection.is_lease = False
            self.store.end(granted.lease)
            raise
        finally:
            close_all(granted.descriptors)
        return granted.lease


@dataclass(frozen=True, slots=True)
class PublishDialogue:
    """Publish and Segments, answered by Done; then the connection is this engine's lease.

    Attributes:
        socket_dir: where the engine sockets will be.
    """

    publishing: Publishing
    socket_dir: str

    async def __call__(self, connection: Connection) -> None:
        if not await connection.welcome("engine"):
            return
        publisher = await self._begin(connection)
        if publisher is None:
            return
        try:
            if not await _receive(connection, publisher.part):
                return
            await self.publishing.check(publisher)
            connection.is_lease = True
            connection.expect(REQUESTS)
            self.publishing.complete(publisher)
            await connection.channel.send(Done())
            await _hold(publisher)
        finally:
            connection.is_lease = False
            self.publishing.end(publisher)

    async def _begin(self, connection: Connection) -> Publisher | None:
        """What a connection publishes; None where it ended before. The message is not kept: it is the whole layout."""
        connection.expect(PUBLICATION)
        frame = await connection.request(FRAME_SECONDS)
        if frame is None:
            return None
        close_all(frame.descriptors)
        message = frame.message
        if frame.descriptors or not isinstance(message, Publish):
            raise ProtocolError(f"expected a Publish without descriptors, got {name_of(message)}")
        engine_path(self.socket_dir, message.device)
        shown = printable(message.model, 1000)
        return self.publishing.begin(connection, msgspec.structs.replace(message, model=shown))


async def _receive(connection: Connection, part: Part) -> bool:
    """Take over all segments of a part; False where the connection ended before."""
    while not part.is_complete:
        frame = await connection.request(FRAME_SECONDS)
        if frame is None:
            return False
        if not isinstance(frame.message, Segments):
            close_all(frame.descriptors)
            raise ProtocolError(f"expected the segments of {part.device}, got {name_of(frame.message)}")
        part.add(frame.message.first, frame.descriptors)
    return True


async def _hold(publisher: Publisher) -> None:
    """Return at the end of the connection.

    Raises:
        TimeLimitError: the other ranks did not come in time.
        WeightkeeperError: the part was given up for another reason.
        ProtocolError: the engine said anything.
    """
    with publisher.scope:
        frame = await publisher.connection.request()
        if frame is not None:
            raise ProtocolError(f"{name_of(frame.message)} is out of place after a Publish")
    if publisher.refusal is not None:
        raise publisher.refusal
    if publisher.scope.cancelled_caught:
        part = publisher.part
        raise TimeLimitError(
            f"rank {part.rank} of {part.world_size} was published, and the others did not come in time"
        )
