"""Answers for clients while no server will come by itself: a health check fails at once, and says why."""

import json
import logging
import socket

import anyio

from weightkeeper.launcher.listener import Listener

_SECONDS = 2.0
_REQUEST_BYTES = 65536

logger = logging.getLogger(__name__)


async def refuse_clients(listener: Listener, has_tls: bool, cause: str) -> None:
    """Answer 503 with the cause to every client, for ever. With TLS the connection is only closed."""
    error = {"message": f"the engine is broken: {cause}", "type": "Service Unavailable", "param": None, "code": 503}
    body = json.dumps({"error": error}).encode() + b"\n"
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = b"" if has_tls else f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    listener.socket.setblocking(False)
    try:
        await _accept(listener, answer)
    finally:
        listener.socket.setblocking(True)  # this is shared with the server to come


async def _accept(listener: Listener, answer: bytes) -> None:
    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener.socket)
            try:
                client, _ = listener.socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                logger.debug("a client cannot be accepted: %s", error)
                await anyio.sleep(0.1)
                continue
            tasks.start_soon(_refuse, client, answer)


async def _refuse(client: socket.socket, answer: bytes) -> None:
    """Read the head of a request first: closing with it unread would reset the connection before the answer is read."""
    client.setblocking(False)
    with client, anyio.move_on_after(_SECONDS):
        try:
            if answer:
                await anyio.wait_readable(client)
                client.recv(_REQUEST_BYTES)
                client.send(answer)
                client.shutdown(socket.SHUT_WR)
                await anyio.wait_readable(client)
        except OSError as error:
            logger.debug("a client went away: %s", error)
