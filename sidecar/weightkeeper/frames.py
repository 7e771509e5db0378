"""Frames of the dialogue in `protocol`: a decoder that knows no socket, and the blocking end of a dialogue.

Limits on size and descriptors hold before anything is allocated or kept. A time limit covers a whole frame, however
slowly its bytes drip in. Descriptors arrive close-on-exec.
"""

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from weightkeeper.errors import LostError, ProtocolError, TimeLimitError
from weightkeeper.protocol import FRAME_SECONDS, MAX_ANSWER_BYTES, MAX_DESCRIPTORS, Message

HEADER = struct.Struct("!IH")
"""Bytes of JSON, number of descriptors."""

READ_BYTES = 256 * 1024
"""At most so much is read, and allocated, at once."""

INT_BYTES = array.array("i").itemsize

Arrived = tuple[bytes, list[tuple[int, int, bytes]], int]
"""Data, ancillary data and flags, as recvmsg returns them."""

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Frame:
    """One message and the descriptors beside it, which belong to whoever received it."""

    message: Message
    descriptors: list[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a side accepts.

    Attributes:
        messages: union of the message types that may arrive.
        nbytes: of JSON in one frame.
        descriptors: in one frame.
    """

    messages: type
    nbytes: int = MAX_ANSWER_BYTES
    descriptors: int = MAX_DESCRIPTORS


def encode(message: Message, descriptors: int = 0, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """A whole frame.

    Raises:
        ProtocolError: over the limit (it names both sizes), or no JSON can hold its values.
    """
    try:
        body = _encoder.encode(message)
    except (OverflowError, ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a {name_of(message)} message cannot be sent: {error}") from error
    if len(body) > max_bytes:
        raise ProtocolError(f"a {name_of(message)} message has {len(body)} bytes, the limit is {max_bytes}")
    return HEADER.pack(len(body), descriptors) + body


class Decoder:
    """Bytes and descriptors in, one frame out. Whatever goes wrong, it closes the descriptors that it was fed."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._json = msgspec.json.Decoder(limits.messages)
        self._reset()

    @property
    def wanted(self) -> int:
        """Bytes to read next."""
        whole = HEADER.size if self._expected is None else self._expected
        return min(whole - len(self._received), READ_BYTES)

    @property
    def is_idle(self) -> bool:
        """Whether no byte of a frame has come yet."""
        return self._expected is None and not self._received

    def feed(self, data: bytes, ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> Frame | None:
        """What one `recvmsg` returned → a frame, when this was its end.

        Raises:
            LostError: the stream ended in the middle of a frame.
            ProtocolError: over a limit, malformed, or descriptors where none belong.
        """
        try:
            return self._feed(data, ancillary, flags)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Close the descriptors of an unfinished frame."""
        close_all(self._descriptors)
        self._reset()

    def _reset(self) -> None:
        self._received = bytearray()
        self._expected: int | None = None
        self._descriptors: list[int] = []

    def _feed(self, data: bytes, ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> Frame | None:
        arrived = _descriptors(ancillary)
        self._descriptors += arrived
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > self._limits.descriptors:
            raise ProtocolError(f"more descriptors arrived beside a frame than the {self._limits.descriptors} allowed")
        if arrived and self._expected is not None:
            raise ProtocolError("descriptors arrived in the middle of a frame; they belong beside its header")
        if not data:
            where = "instead of answering" if self.is_idle else "in the middle of a message"
            raise LostError(f"the other side closed the connection {where}")
        self._received += data
        if self._expected is None and len(self._received) == HEADER.size:
            self._read_header()
        if self._expected is None or len(self._received) < self._expected:
            return None
        frame = Frame(self._message(), self._descriptors)
        self._reset()
        return frame

    def _read_header(self) -> None:
        nbytes, count = HEADER.unpack(self._received)
        if not 0 < nbytes <= self._limits.nbytes:
            raise ProtocolError(f"a frame of {nbytes} bytes; 1 to {self._limits.nbytes} are allowed")
        if count != len(self._descriptors):
            raise ProtocolError(f"a frame announces {count} descriptors and {len(self._descriptors)} came with it")
        self._expected = nbytes
        self._received = bytearray()

    def _message(self) -> Message:
        try:
            return self._json.decode(self._received)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise ProtocolError(f"a message cannot be read: {error}") from error


class Channel:
    """A blocking end of a dialogue over a connected Unix socket, which it owns. For client and loader."""

    def __init__(self, connection: socket.socket, limits: Limits):
        self._socket = connection
        self._limits = limits
        self._decoder = Decoder(limits)

    def send(self, message: Message, descriptors: Sequence[int] = (), seconds: float = FRAME_SECONDS) -> None:
        """Send one frame.

        Raises:
            LostError: the other side is gone.
            TimeLimitError: it did not take the frame in time.
            ProtocolError: the message is over the limit.
        """
        frame = memoryview(encode(message, len(descriptors)))
        deadline = time.monotonic() + seconds
        try:
            self._wait_until(deadline)
            sent = self._socket.sendmsg([frame], ancillary_of(descriptors))
            while sent < len(frame):
                self._wait_until(deadline)
                sent += self._socket.send(frame[sent:])
        except TimeoutError as error:
            raise TimeLimitError(f"a {name_of(message)} message was not taken within {seconds:g} s") from error
        except OSError as error:
            raise LostError(f"the connection broke off while sending {name_of(message)}: {error.strerror}") from error

    def receive(self, seconds: float = FRAME_SECONDS) -> Frame:
        """The next frame.

        Raises:
            LostError: the stream ended.
            TimeLimitError: the whole frame was not there in time.
            ProtocolError: see Decoder.feed.
        """
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._wait_until(deadline)
                frame = self._decoder.feed(*receive_some(self._socket, self._decoder.wanted, self._limits))
                if frame is not None:
                    return frame
        except TimeoutError as error:
            raise TimeLimitError(f"no whole answer within {seconds:g} s") from error
        except OSError as error:
            raise LostError(f"the connection broke off while waiting for an answer: {error.strerror}") from error
        finally:
            self._decoder.abandon()

    def wait(self) -> None:
        """Return when something can be received, be it the end; however long that takes."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def shutdown(self) -> None:
        """End the dialogue from any thread; one that waits here is woken. Somebody still has to close."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._decoder.abandon()
        self._socket.close()

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that are owned here."""
    for descriptor in descriptors:
        os.close(descriptor)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % INT_BYTES])
    return found.tolist()


def name_of(message: Message) -> str:
    return type(message).__name__


def receive_some(connection: socket.socket, nbytes: int, limits: Limits) -> Arrived:
    """One `recvmsg` under the limits."""
    # There is always room for one descriptor, so that one where none belongs is seen and refused.
    space = socket.CMSG_LEN(max(1, limits.descriptors) * INT_BYTES)
    data, ancillary, flags, _ = connection.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    return data, ancillary, flags


def ancillary_of(descriptors: Sequence[int]) -> list[tuple[int, int, array.array]]:
    """What `sendmsg` takes to send descriptors."""
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
