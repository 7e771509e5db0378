"""Clients that ask an engine one question after the other while its servers are replaced."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from keepers import DEADLINE_SECONDS, wait_for

from weightkeeper.vllm_draining import LINGER_SECONDS

CLIENTS = 100


class Client:
    """One client.

    Args:
        keeps: its connection for as long as the server lets it. Another one makes a new connection for each question.

    Attributes:
        answers: whole ones with status 200, by who gave them.
        told: answers on a kept connection that said `Connection: close`.
        missed: requests that met the very closing of a connection, and were sent again on a new one. HTTP has no way to
            avoid them; but a server that leaves waits LINGER_SECONDS for them first, so that only a client that let
            as much time go by before its request was sent can meet it.
    """

    def __init__(self, port: int, path: str, who: Callable[[Any], Hashable], keeps: bool):
        self.answers: Counter[Hashable] = Counter()
        self.told = self.missed = 0
        self._began = self._sent = 0.0
        self._port, self._who, self._keeps = port, who, keeps
        self._request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> None:
        """Have one answer.

        Raises:
            OSError: the connection was refused or reset, or nothing came in time.
            EOFError: the answer was cut, or there was none.
            ValueError: it was no good one.
        """
        if self._connection is not None and self._connection[0].at_eof():
            await self.close()
        # the server may have gone since the last request began, or since this connection did
        heard = self._began if self._connection else time.monotonic()
        try:
            head = await self._send()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            await self.close()
            if getattr(error, "partial", b"") or self._sent - heard < LINGER_SECONDS:
                raise
            self.missed += 1
            head = await self._send()
        status, *lines = head.decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self._connection[0].readexactly(int(headers["content-length"]))
        if int(status.split()[1]) != HTTPStatus.OK:
            raise ValueError(f"{status}: {body!r}")
        is_last = headers.get("connection") == "close"
        self.told += is_last and self._keeps
        if is_last or not self._keeps:
            await self.close()
        self.answers[self._who(json.loads(body))] += 1

    async def _send(self) -> bytes:
        """The head of the answer."""
        self._began = time.monotonic()
        if self._connection is None:
            # at once, as clients do, however busy this loop is; a connection on which nothing is asked may be closed
            connected = socket.create_connection(("127.0.0.1", self._port), DEADLINE_SECONDS)
            connected.sendall(self._request)
            self._sent = time.monotonic()
            self._connection = await asyncio.open_connection(sock=connected)
        else:
            self._connection[1].write(self._request)
            self._sent = time.monotonic()
        return await self._connection[0].readuntil(b"\r\n\r\n")

    async def close(self) -> None:
        """Close its connection, if there is one."""
        if self._connection is None:
            return
        _, writer = self._connection
        self._connection = None
        writer.close()
        with suppress(ConnectionError):  # it was reset
            await writer.wait_closed()


class Clients:
    """A hundred clients that ask without a pause, in a thread, from `with` to its end.

    Args:
        who: has given this answer, which is JSON.
        keeping: so many of them keep their connections.

    Attributes:
        failures: in words. A client with one asks no more.
    """

    def __init__(self, port: int, path: str, who: Callable[[Any], Hashable], keeping: int):
        self.failures: list[str] = []
        self._clients = [Client(port, path, who, keeps=number < keeping) for number in range(CLIENTS)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def told(self) -> int:
        return sum(each.told for each in self._clients)

    @property
    def missed(self) -> int:
        return sum(each.missed for each in self._clients)

    @property
    def answers(self) -> Counter[Hashable]:
        """How many there were, by who gave them."""
        return sum((each.answers for each in self._clients), Counter())

    def until_all_are_answered_by(self, who: Hashable) -> None:
        """Wait until each client has an answer of this server; a failure of any client is one of the test."""

        def is_so() -> bool:
            assert not self.failures, self.failures
            return all(each.answers[who] for each in self._clients)

        wait_for(is_so, f"an answer of {who} for each client")

    async def _run(self) -> None:
        await asyncio.gather(*map(self._ask, self._clients))

    async def _ask(self, client: Client) -> None:
        try:
            while not self._stop.is_set():
                await asyncio.wait_for(client.ask(), DEADLINE_SECONDS)
        except Exception as error:
            self.failures.append(repr(error))
        finally:
            await client.close()

    def __enter__(self) -> "Clients":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
