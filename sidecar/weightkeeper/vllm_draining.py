"""How a vLLM server leaves: clients that come now wait for the next server, requests that it has are answered whole.

vLLM stops its engine first and its HTTP server last. In between, connections are accepted and requests are taken that
nobody answers rightly: with status 500, with a cut text, with a reset, or not at all, which holds up the stop. Here
the HTTP server goes first:

    it accepts no more; the launcher's listening socket keeps new clients for the next server
    each answer says `Connection: close`, so that its client asks the next server
    connections without a request get LINGER_SECONDS, because one may be under way, and are closed
    requests get the seconds of --shutdown-timeout, WebSockets too, which end by themselves or not at all; one that
    has no whole answer then gets status 500, a WebSocket the code 1012, service restart
    and then vLLM stops its engine

A client whose connection has been idle for longer and whose request meets its very closing is not answered and has to
ask again; HTTP has no way to avoid that.
"""

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger("vllm.weightkeeper")

LINGER_SECONDS = 0.1
LOOK_SECONDS = 0.01
CANCEL_SECONDS = 1.0
"""For requests to end that were told to, with their error written."""

LOOP_SECONDS = 10.0
"""For the server's thread to do what it is asked; it may be busy with a long prompt."""

GRACEFUL_SECONDS = 0.5
"""Of uvicorn, for what is left when the engine is gone: nobody can be answered any more."""

ABORT_SECONDS = 0.2
"""For the client of a WebSocket that is closing already to read what there is for it; within GRACEFUL_SECONDS."""


class Draining:
    """What ends a running uvicorn server gently. Made in the thread of its event loop.

    Args:
        server: that has started: its `servers`, `server_state` and `config` are used.
    """

    def __init__(self, server: Any):
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._is_over = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is another thread than the server's, so that one can wait for it."""
        return threading.current_thread() is not self._thread

    def drain(self, seconds: float) -> None:
        """Take no more, and return when all requests are answered or `seconds` are over. Not in the server's thread."""
        if self._is_over:
            return
        self._is_over = True
        self._call(self._stop_accepting)
        self._wait(lambda: not self._idle(), LINGER_SECONDS)
        self._call(self._close_idle)
        self._wait(lambda: not self._requests(), seconds)
        left = self._call(self._cancel)
        if left:
            logger.warning(
                "weightkeeper: %d requests had no whole answer after %g s (--shutdown-timeout) and get an error", left,
                seconds,
            )  # fmt: skip
        self._wait(lambda: not self._requests(), CANCEL_SECONDS)

    def closing(self, application: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """An ASGI application whose answers close their connection once this drains."""

        async def closing(scope: dict, receive: Callable, send: Callable) -> None:
            async def answer(message: dict) -> None:
                if self._is_over and message["type"] == "http.response.start":
                    message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)

            await application(scope, receive, answer if scope["type"] == "http" else send)

        return closing

    def _stop_accepting(self) -> None:
        for server in getattr(self._server, "servers", ()):  # there are none before it has started
            server.close()
        for connection in self._connections():
            if _is_http(connection) and not _is_idle(connection):  # a WebSocket would be closed at once
                _shut(connection)  # it is closed behind its answer

    def _close_idle(self) -> None:
        for connection in self._idle():
            _shut(connection)

    def _cancel(self) -> int:
        tasks = self._requests()
        for connection in self._connections():
            if not _is_http(connection):
                _shut(connection)
        for task in tasks:
            task.cancel()
        return len(tasks)

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    def _idle(self) -> list[Any]:
        return [connection for connection in self._connections() if _is_idle(connection)]

    def _requests(self) -> list[Any]:
        return [task for task in list(self._server.server_state.tasks) if not task.done()]

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run it in the server's thread."""
        given: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def give() -> None:
            try:
                given.set_result(function())
            except Exception as error:
                given.set_exception(error)

        self._loop.call_soon_threadsafe(give)
        return given.result(LOOP_SECONDS)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return once it is so, or when `seconds` are over and the loop has read what came in them."""
        deadline = time.monotonic() + seconds
        while True:
            is_over = time.monotonic() >= deadline  # before the call: the loop goes once more to its sockets behind it
            if self._call(condition) or is_over:
                return
            time.sleep(LOOK_SECONDS)


def install() -> None:
    """Have vLLM's server in this process leave like that."""
    import uvicorn
    from vllm.v1.engine.async_llm import AsyncLLM

    found: list[Draining] = []
    started, stopped = uvicorn.Server.startup, AsyncLLM.shutdown

    @functools.wraps(started)
    async def startup(self: Any, *args: Any, **kwargs: Any) -> None:
        draining = Draining(self)
        found.append(draining)
        self.config.loaded_app = draining.closing(self.config.loaded_app)
        if self.config.ws_protocol_class is not None:
            self.config.ws_protocol_class = _closed_twice(self.config.ws_protocol_class)
        self.config.timeout_graceful_shutdown = self.config.timeout_graceful_shutdown or GRACEFUL_SECONDS
        await started(self, *args, **kwargs)

    @functools.wraps(stopped)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        for draining in found:
            if draining.is_elsewhere:  # vLLM calls it at SIGTERM in a thread, and when all is over in the server's
                try:
                    draining.drain(self.vllm_config.shutdown_timeout)
                except Exception as error:  # a loop that is over, or hangs; the engine has to stop all the same
                    logger.warning("weightkeeper: requests cannot be waited for: %r", error)
        stopped(self, *args, **kwargs)

    uvicorn.Server.startup, AsyncLLM.shutdown = startup, shutdown


def _closed_twice(protocol: type) -> type:
    """uvicorn's WebSocket connection, to be shut down also when it is closing already, where uvicorn's raises.

    One with a full buffer that nobody reads stays so, and uvicorn shuts it down once more at its own end.
    """

    class ClosedTwice(protocol):  # type: ignore[misc]
        def shutdown(self) -> None:
            try:
                super().shutdown()
            except Exception as error:
                logger.info("weightkeeper: a WebSocket is closed without a word to its client: %r", error)
                self.transport.close()  # once its client has all; it may read nothing
                asyncio.get_running_loop().call_later(ABORT_SECONDS, self.transport.abort)

    return ClosedTwice


def _shut(connection: Any) -> None:
    """By uvicorn's own means. What one connection raises is not to cost the others their time."""
    try:
        connection.shutdown()
    except Exception as error:
        logger.warning("weightkeeper: a connection cannot be shut down: %r", error)


def _is_http(connection: Any) -> bool:
    """Whether it is no WebSocket."""
    return hasattr(connection, "cycle")


def _is_idle(connection: Any) -> bool:
    """Whether nothing is asked on it; a WebSocket never is."""
    return _is_http(connection) and (connection.cycle is None or connection.cycle.response_complete)
