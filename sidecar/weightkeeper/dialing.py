"""A client's way to a keeper: connecting to one that is who it should be, asking, and telling refusals from answers."""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

from weightkeeper.errors import (
    CacheUnusableError,
    ConfigError,
    LostError,
    MismatchError,
    NoSocketError,
    ProtocolError,
    RefusedError,
    ReleaseRefusedError,
    TimeLimitError,
    WeightkeeperError,
)
from weightkeeper.frames import Channel, Limits, close_all, name_of
from weightkeeper.protocol import (
    FRAME_SECONDS,
    MAX_DESCRIPTORS,
    VERSION,
    Done,
    FromKeeper,
    Hello,
    Message,
    Publish,
    Refusal,
    Segments,
    Welcome,
)
from weightkeeper.sockets import allowed_uids, check_owner, check_peer

RETRY_SECONDS = 0.02
"""Between two tries to connect to a keeper whose queue of connections is full."""


def request(path: str, message: Message, expected: type, seconds: float) -> Any:
    """One request on a connection of its own."""
    channel = connect(path, "control", "", seconds)
    try:
        return ask(channel, message, expected, seconds)
    finally:
        channel.close()


def connect(path: str, role: Literal["control", "engine"], name: str, seconds: float) -> Channel:
    """A connection to a keeper that is who it should be and has greeted us.

    Args:
        name: who we are, for people.
        seconds: for all of it together.

    Raises:
        CacheUnusableError: no socket, nobody there, another user's, silent, lost or malformed, by its class.
    """
    deadline = time.monotonic() + seconds
    allowed = allowed_uids()
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            check_owner(path, allowed)
            _connect_until(connection, path, deadline)
            check_peer(connection, allowed)
        except FileNotFoundError as error:
            raise NoSocketError(
                f"there is no socket at {path}; is the sidecar running, with the same volume?"
            ) from error
        except ConnectionRefusedError as error:
            raise RefusedError(f"nobody answers on {path}; the sidecar has ended or is starting again") from error
        except TimeoutError as error:
            raise TimeLimitError(f"{path}: no connection within {seconds:g} s") from error
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror}") from error
        channel = Channel(connection, Limits(FromKeeper))
        ask(channel, Hello(VERSION, role, name), Welcome, max(0.0, deadline - time.monotonic()))
        undo.pop_all()
        return channel


def _connect_until(connection: socket.socket, path: str, deadline: float) -> None:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        try:
            connection.connect(path)
            return
        except BlockingIOError:  # the queue of connections is full
            time.sleep(min(RETRY_SECONDS, left))


def ask(channel: Channel, message: Message, expected: Any, seconds: float = FRAME_SECONDS) -> Any:
    """The answer to a message. A refusal that was sent before the message could be is an answer, too."""
    lost = None
    try:
        channel.send(message, seconds=seconds)
    except LostError as error:
        lost = error
    return _answer(channel, expected, seconds, lost)


def _answer(channel: Channel, expected: Any, seconds: float, lost: LostError | None) -> Any:
    try:
        frame = channel.receive(seconds)
    except LostError as error:
        raise lost or error from error
    if frame.descriptors:
        close_all(frame.descriptors)
        raise ProtocolError(f"descriptors came with {name_of(frame.message)}, where none belong")
    return expected_of(frame.message, expected)


def hand_over(channel: Channel, message: Publish, descriptors: Sequence[int], seconds: float) -> None:
    """Publish and its segments, until the keeper says Done.

    Args:
        seconds: for the keeper's answer, once everything is sent.

    Raises:
        CacheUnusableError: the keeper refused, at any point, or is lost.
    """
    lost = None
    try:
        channel.send(message)
        for first in range(0, len(descriptors), MAX_DESCRIPTORS):
            channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])
    except LostError as error:
        lost = error
    _answer(channel, Done, seconds, lost)


def expected_of(message: Message, expected: Any) -> Any:
    """The message, if it is of an expected type; a refusal raises the error that it carries."""
    if isinstance(message, Refusal):
        raise _error_of(message)
    if not isinstance(message, expected):
        raise ProtocolError(f"the keeper answered with {name_of(message)}, which is out of place")
    return message


def _error_of(refusal: Refusal) -> WeightkeeperError:
    """The error class that has the refusal's code; one that we do not know is a RefusedError."""
    for each in (*CacheUnusableError.__subclasses__(), ConfigError, ReleaseRefusedError):
        if each.code == refusal.code and each is not MismatchError:
            return each(refusal.message)
    return RefusedError(f"{refusal.message} ({refusal.code})")
