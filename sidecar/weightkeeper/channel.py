"""The keeper's end of a dialogue over a connected Unix socket, for AnyIO. `frames.Channel` is the blocking one.

AnyIO's own descriptor passing is not used, because it shows neither that descriptors were cut off nor makes them
close-on-exec.
"""

import socket
from collections.abc import Sequence

import anyio
import anyio.lowlevel

from weightkeeper.errors import LostError, TimeLimitError
from weightkeeper.frames import Arrived, Decoder, Frame, Limits, ancillary_of, encode, receive_some
from weightkeeper.protocol import FRAME_SECONDS, Message


class AsyncChannel:
    """One end of a dialogue. The socket has to be non-blocking; it is owned."""

    def __init__(self, connection: socket.socket, limits: Limits):
        self._socket = connection
        self._limits = limits
        self._decoder = Decoder(limits)

    async def send(self, message: Message, descriptors: Sequence[int] = (), seconds: float = FRAME_SECONDS) -> None:
        """As `frames.Channel.send`."""
        await self.send_encoded(encode(message, len(descriptors)), descriptors, seconds)

    async def send_encoded(self, encoded: bytes, descriptors: Sequence[int], seconds: float = FRAME_SECONDS) -> None:
        """Send a frame that `encode` made."""
        frame = memoryview(encoded)
        sent = 0
        try:
            with anyio.fail_after(seconds):
                await anyio.lowlevel.checkpoint()
                while sent < len(frame):
                    try:
                        if sent:
                            sent += self._socket.send(frame[sent:])
                        else:
                            sent = self._socket.sendmsg([frame], ancillary_of(descriptors))
                    except BlockingIOError:
                        await anyio.wait_writable(self._socket)
        except TimeoutError as error:
            raise TimeLimitError(f"a frame was not taken within {seconds:g} s") from error
        except OSError as error:
            raise LostError(f"the connection broke off while sending: {error.strerror}") from error

    async def receive(self, idle_seconds: float | None, seconds: float = FRAME_SECONDS) -> Frame | None:
        """The next frame, or None where the stream ended between frames.

        Args:
            idle_seconds: until the first byte; None waits for ever, which is what a lease does.
            seconds: from the first byte to the last.
        """
        try:
            with anyio.fail_after(idle_seconds):
                await anyio.lowlevel.checkpoint()
                arrived = await self._arrived()
            if not arrived[0] and not arrived[1]:
                return None
            with anyio.fail_after(seconds):
                while (frame := self._decoder.feed(*arrived)) is None:
                    arrived = await self._arrived()
                return frame
        except TimeoutError as error:
            raise TimeLimitError("no whole message within the time limit") from error
        except OSError as error:
            raise LostError(f"the connection broke off: {error.strerror}") from error
        finally:
            self._decoder.abandon()

    def close(self) -> None:
        self._decoder.abandon()
        self._socket.close()

    async def _arrived(self) -> Arrived:
        while True:
            try:
                return receive_some(self._socket, self._decoder.wanted, self._limits)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
