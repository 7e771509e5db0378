"""`GET /health`, as a client of the server makes it, and only while there is a server."""

import contextlib
import errno
import logging
import ssl
from typing import Literal

import anyio
import anyio.abc
from anyio.streams.tls import TLSStream

from weightkeeper.launcher.listener import Listener

Tls = Literal["none", "server", "mutual"]
"""Whether a server speaks TLS; with `mutual` its clients have to have a certificate."""

RETRY_SECONDS = 0.1
"""Between two questions to a server that answers something other than 200 while it starts."""

_HEAD = 512
_SERVER_ERROR = 500
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nUser-Agent: weightkeeper\r\nConnection: close\r\n\r\n"

logger = logging.getLogger(__name__)


async def first(listener: Listener, tls: Tls) -> None:
    """Return when the server answers 200.

    One connection waits for a server that does not accept yet: it costs one place in the queue however long the start
    takes, and the answer comes with no delay.
    """
    while not await _answer(listener, tls):
        await anyio.sleep(RETRY_SECONDS)


async def breaks(listener: Listener, tls: Tls) -> str:
    """Return when the server answers that it cannot serve any more; what it answers."""
    while True:
        with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            if (status := await _status(listener, tls)) >= _SERVER_ERROR:
                return f"/health answers {status}"
        await anyio.sleep(RETRY_SECONDS)


async def fails(listener: Listener, tls: Tls, seconds: float) -> str:
    """Why the server does not answer 200 in time; "" where it does."""
    try:
        with anyio.fail_after(seconds):
            status = await _status(listener, tls)
    except TimeoutError:
        return f"no answer from /health within {seconds:g} s"
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        if {getattr(each, "errno", None) for each in (error, error.__cause__)} & _NO_ROOM:
            logger.warning("/health cannot be asked, for want of room in the launcher: %s", error.__cause__ or error)
            return ""  # that is no fault of the server's
        return f"/health cannot be asked: {str(error) or type(error).__name__}"
    return "" if status == 200 else f"/health answers {status}"


async def _answer(listener: Listener, tls: Tls) -> bool:
    try:
        return await _status(listener, tls) == 200
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False


async def _status(listener: Listener, tls: Tls) -> int:
    """The status of the answer; 0 for what is no HTTP."""
    async with await _connect(listener) as plain:
        stream: anyio.abc.ByteStream = plain
        if tls != "none":
            settings = {"ssl_context": _context(), "server_side": False, "standard_compatible": False}
            stream = await TLSStream.wrap(plain, **settings)
        if tls == "mutual":
            return 200  # it would refuse us for want of a certificate; the handshake has shown that it is alive
        await stream.send(_REQUEST)
        head = b""
        while b"\r\n" not in head and len(head) < _HEAD:
            head += await stream.receive(_HEAD)
    fields = head.split(None, 2)
    with contextlib.suppress(IndexError, ValueError):
        if fields[0].startswith(b"HTTP/"):
            return int(fields[1])
    return 0


async def _connect(listener: Listener) -> anyio.abc.SocketStream:
    if isinstance(listener.reach, str):
        return await anyio.connect_unix(listener.reach)
    return await anyio.connect_tcp(*listener.reach)


def _context() -> ssl.SSLContext:
    """The launcher asks its own server over its own socket; whose certificate that has is of no account."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
