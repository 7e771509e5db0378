"""A listening socket and its connections: a bounded number of them, each peer known, the silent ones making room."""

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection

import anyio
import anyio.abc
import anyio.lowlevel

from weightkeeper.channel import AsyncChannel
from weightkeeper.errors import (
    LostError,
    ProtocolError,
    RefusedError,
    TimeLimitError,
    WeightkeeperError,
    WrongOwnerError,
)
from weightkeeper.frames import Frame, Limits, encode
from weightkeeper.protocol import (
    FRAME_SECONDS,
    MAX_REQUEST_BYTES,
    VERSION,
    Hello,
    LoadRequest,
    MapRequest,
    ReceiptsRequest,
    Refusal,
    ReleaseRequest,
    Report,
    StatusRequest,
    Welcome,
)
from weightkeeper.quantities import printable
from weightkeeper.sockets import Peer, check_peer

MAX_CONNECTIONS = 64
"""On one socket at once. A host has some 8 engines a device at the very most; the rest is people and health checks."""

IDLE_SECONDS = 3600.0
"""Between two requests. An engine may have to hash its whole checkpoint in between."""

_GRACE_SECONDS = 1.0
"""Nobody who has just connected, or just been answered, is made to go for a newcomer."""

FromClient = Hello | StatusRequest | LoadRequest | ReleaseRequest | Report | ReceiptsRequest | MapRequest

REQUESTS = Limits(FromClient, MAX_REQUEST_BYTES, 0)
"""What may come on a socket before a dialogue expects something else."""

logger = logging.getLogger("weightkeeper.keeper")


class Connection:
    """One client. `name` is what it calls itself, for people.

    Attributes:
        is_lease: it maps weights: it may be silent for ever and is never made to go.
    """

    def __init__(self, accepted: socket.socket, peer: Peer):
        self.channel = AsyncChannel(accepted, REQUESTS)
        self.peer = peer
        self.name = ""
        self.is_lease = False
        self.scope = anyio.CancelScope()
        self._socket = accepted
        self._is_welcome = False
        self._waiting_since: float | None = time.monotonic()

    @property
    def shown(self) -> str:
        """Who it is, for log lines."""
        return self.name or f"a client with pid {self.peer.pid}"

    @property
    def patience(self) -> tuple[bool, float]:
        """Who has the smallest is the first to go: before the first message, then longest silent."""
        return self._is_welcome, self._waiting_since or time.monotonic()

    def can_go(self) -> bool:
        since = self._waiting_since
        return not self.is_lease and since is not None and time.monotonic() - since > _GRACE_SECONDS

    async def welcome(self, role: str) -> bool:
        """Whether the client greeted as it should; False where it went away without a word."""
        try:
            with anyio.fail_after(FRAME_SECONDS):
                frame = await self.channel.receive(None)
        except TimeoutError as error:
            raise TimeLimitError(f"no whole Hello within {FRAME_SECONDS:g} s") from error
        if frame is None:
            return False
        hello = frame.message
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message has to be a Hello")
        if hello.version != VERSION:
            raise ProtocolError(
                f"this side speaks version {VERSION} and the client {hello.version}; "
                "run the same release of weightkeeper on both sides"
            )
        if hello.role != role:
            raise ProtocolError(f"this socket is for the role {role}, not {hello.role}")
        self.name = printable(hello.name)
        self._is_welcome = True
        await self.channel.send(Welcome(VERSION))
        return True

    async def request(self, idle_seconds: float = IDLE_SECONDS) -> Frame | None:
        """The next request; None at the end of the stream. From a lease it may be long in coming."""
        self._waiting_since = time.monotonic()
        try:
            return await self.channel.receive(None if self.is_lease else idle_seconds)
        finally:
            self._waiting_since = None

    def expect(self, limits: Limits) -> None:
        """What may come from the next message on."""
        self.channel = AsyncChannel(self._socket, limits)

    def say_at_once(self, error: WeightkeeperError) -> None:
        """Say why it is over, if that takes no waiting."""
        _say_at_once(self._socket, error)


Dialogue = Callable[[Connection], Awaitable[None]]


class Acceptor:
    """Accepts on one listening socket, which it owns, and runs `dialogue` for each connection."""

    def __init__(self, listener: socket.socket, dialogue: Dialogue, allowed_uids: Collection[int]):
        self._listener = listener
        self._dialogue = dialogue
        self._allowed_uids = allowed_uids
        self._connections: list[Connection] = []
        self._excess_told = -FRAME_SECONDS
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        """Accept until `scope` is cancelled, then go on until the last connection has ended."""
        with self._listener:
            async with anyio.create_task_group() as tasks:
                with self.scope:
                    while True:
                        await (
                            anyio.lowlevel.checkpoint()
                        )  # so that a flood of connections leaves time for their answers
                        accepted = await self._accepted()
                        self._admit(accepted, tasks)
                self._listener.close()

    async def _accepted(self) -> socket.socket:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED):
                    raise
                self._end_a_silent_one(f"a connection cannot be accepted: {error.strerror}")
                await anyio.sleep(0.1)
            else:
                accepted.setblocking(False)
                return accepted

    def _admit(self, accepted: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        try:
            peer = check_peer(accepted, self._allowed_uids)
            if len(self._connections) >= MAX_CONNECTIONS:
                text = f"{MAX_CONNECTIONS} connections are open, which is the limit"
                if not self._end_a_silent_one(text):
                    raise RefusedError(f"{text}; try again in a second")
        except WeightkeeperError as error:
            if isinstance(error, WrongOwnerError):
                logger.warning("a connection is refused: %s", error)
            with accepted:
                _say_at_once(accepted, error)
            return
        connection = Connection(accepted, peer)
        self._connections.append(connection)
        tasks.start_soon(self._converse, connection)

    def _end_a_silent_one(self, text: str) -> bool:
        """Make room, and say why now and then; False where nobody has been silent for long enough."""
        if time.monotonic() - self._excess_told > FRAME_SECONDS:
            self._excess_told = time.monotonic()
            logger.warning("%s; silent ones make room for new ones", text)
        silent = [each for each in self._connections if each.can_go() and not each.scope.cancel_called]
        if silent:
            min(silent, key=lambda each: each.patience).scope.cancel()
        return bool(silent)

    async def _converse(self, connection: Connection) -> None:
        try:
            with connection.scope:
                await self._dialogue(connection)
            if connection.scope.cancelled_caught:
                connection.say_at_once(RefusedError("the place of this silent connection was needed for another"))
        except LostError as error:
            logger.debug("%s: %s", connection.shown, error)
        except WeightkeeperError as error:
            is_fault = isinstance(error, ProtocolError | TimeLimitError)
            level = logging.WARNING if is_fault else logging.INFO
            logger.log(level, "%s is refused, code=%s: %s", connection.shown, error.code, error)
            with contextlib.suppress(WeightkeeperError):
                await connection.channel.send(Refusal(error.code, str(error)), seconds=1)
        except Exception:
            logger.exception("%s: the dialogue broke on a fault of our own", connection.shown)
        finally:
            self._connections.remove(connection)
            connection.channel.close()


def _say_at_once(accepted: socket.socket, error: WeightkeeperError) -> None:
    """Say why, if the socket takes it without waiting."""
    with contextlib.suppress(OSError):
        accepted.send(encode(Refusal(error.code, str(error))))
