"""The keeper's side of the two dialogues with clients: one class for the control socket, one for engine sockets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from weightkeeper.accepting import Connection
from weightkeeper.errors import MismatchError, ProtocolError
from weightkeeper.frames import close_all, name_of
from weightkeeper.protocol import (
    MAX_DESCRIPTORS,
    Done,
    Lease,
    LoadRequest,
    MapRequest,
    Mismatch,
    ReceiptsRequest,
    ReleaseRequest,
    Report,
    Segments,
    Status,
    StatusRequest,
)
from weightkeeper.store import Store

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
