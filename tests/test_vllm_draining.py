"""How a server leaves: on a real uvicorn server, with a stand-in in place of vLLM's engine."""

import asyncio
import contextlib
import http.client
import socket
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from keepers import wait_for

from weightkeeper import vllm_draining

uvicorn = pytest.importorskip("uvicorn", reason="it comes with vLLM")
pytest.importorskip("websockets", reason="it comes with vLLM")
from websockets.exceptions import ConnectionClosed  # noqa: E402
from websockets.sync.client import ClientConnection as WebSocket  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

CLOSE_FRAME = b"\x88\x82\0\0\0\0\x03\xe8"


class Engine:
    """vLLM's AsyncLLM, as far as leaving needs it. `stopped` says whether it can still compute."""

    def __init__(self, shutdown_timeout: float):
        self.vllm_config = types.SimpleNamespace(shutdown_timeout=shutdown_timeout)
        self.stopped = False

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped = True


class Served:
    """A server in a thread, on a listening socket that is not its own.

    Attributes:
        let_go: requests of /slow are answered once it is set.
        asked: paths.
        errors: that ended the server.
    """

    def __init__(self, listener: socket.socket, name: str, engine: Engine):
        self.let_go = threading.Event()
        self.asked: list[str] = []
        self.errors: list[BaseException] = []
        self._name, self._engine = name, engine
        self.server = uvicorn.Server(
            uvicorn.Config(self._answer, interface="asgi3", log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        wait_for(lambda: self.server.started, "the server")

    def _run(self, listener: socket.socket) -> None:
        try:
            self.server.run(sockets=[listener])
        except BaseException as error:
            self.errors.append(error)

    async def _talk(self, scope: dict, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while scope["path"] == "/flood":
            await send({"type": "websocket.send", "bytes": b"x" * 65536})
        while not self.let_go.is_set():
            await asyncio.sleep(0.005)
        assert not self._engine.stopped
        await send({"type": "websocket.send", "text": self._name})
        await send({"type": "websocket.close"})

    async def _answer(self, scope: dict, receive, send) -> None:
        self.asked.append(scope["path"])
        if scope["type"] == "websocket":
            return await self._talk(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []}) if scope[
            "path"
        ] == "/stream" else None
        while scope["path"] in ("/slow", "/stream") and not self.let_go.is_set():
            await asyncio.sleep(0.005)
        assert not self._engine.stopped
        if scope["path"] != "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self._name.encode()})

    def end(self) -> None:
        self.let_go.set()
        self.server.should_exit = True
        self._thread.join(10)


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator["Stand"]:
    """A server that leaves as ours do; its engine has `seconds` for what is asked when it is told to stop."""
    monkeypatch.setattr(uvicorn.Server, "startup", uvicorn.Server.startup)
    monkeypatch.setattr(Engine, "shutdown", Engine.shutdown)
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.engine.async_llm"].AsyncLLM = Engine
    vllm_draining.install()
    engine = Engine(seconds)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, contextlib.ExitStack() as stack:
        served = Served(listener.dup(), "old", engine)
        stack.callback(served.end)
        yield Stand(listener, served, engine, stack)


@dataclass
class Stand:
    """A server, its engine, the listening socket that outlives them, and clients."""

    listener: socket.socket
    served: Served
    engine: Engine
    stack: contextlib.ExitStack

    def client(self, path: str = "") -> http.client.HTTPConnection:
        """One that is connected, and has asked for a path."""
        connection = self.stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(*self.listener.getsockname(), timeout=10))
        )
        connection.connect()
        if path:
            connection.request("GET", path)
        return connection

    def slow_client(self) -> http.client.HTTPConnection:
        """One whose request is there and not answered yet."""
        slow = self.client("/slow")
        wait_for(lambda: "/slow" in self.served.asked, "the request")
        return slow

    def web_socket(self, path: str) -> WebSocket:
        """One that has been accepted."""
        host, port = self.listener.getsockname()
        return self.stack.enter_context(connect(f"ws://{host}:{port}{path}", open_timeout=10, proxy=None))

    def full_web_socket(self) -> socket.socket:
        """One whose client reads nothing of the many words that it gets."""
        client = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        client.sendall(
            b"GET /flood HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        wait_for(self._is_full, "a full buffer")
        return client

    def _is_full(self) -> bool:
        connections = list(self.served.server.server_state.connections)
        return any(each.transport.get_write_buffer_size() > 0 for each in connections)

    def until_it_accepts_no_more(self) -> None:
        wait_for(lambda: not self.served.server.servers[0].is_serving(), "the end of accepting")


def ask(connection: http.client.HTTPConnection, path: str = "/") -> tuple[int, bytes, str | None]:
    connection.request("GET", path)
    return answer_of(connection)


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, bytes, str | None]:
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.getheader("connection")


@contextlib.contextmanager
def stopping(engine: Engine) -> Iterator[threading.Thread]:
    """vLLM's own stop at SIGTERM, in a thread."""
    thread = threading.Thread(target=engine.shutdown)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def test_a_request_in_flight_is_answered_whole_and_new_clients_get_the_next_server(monkeypatch):
    """The engine is stopped behind the last answer; who connects meanwhile waits and is not refused."""
    with serving(monkeypatch, 10) as stand:
        slow = stand.slow_client()
        with stopping(stand.engine):
            stand.until_it_accepts_no_more()
            new = stand.client("/")
            assert not stand.engine.stopped
            stand.served.let_go.set()
            assert answer_of(slow) == (200, b"old", "close")
        assert stand.engine.stopped
        stand.served.end()
        following = Served(stand.listener.dup(), "new", Engine(0))
        stand.stack.callback(following.end)
        assert answer_of(new)[:2] == (200, b"new")
        assert stand.served.asked == ["/slow"]


def test_a_stream_that_has_begun_ends_whole(monkeypatch):
    """Its connection is closed behind it, which its headers could not say any more."""
    with serving(monkeypatch, 10) as stand:
        stream = stand.client("/stream")
        answer = stream.getresponse()
        with stopping(stand.engine):
            stand.until_it_accepts_no_more()
            stand.served.let_go.set()
            assert (answer.status, answer.read()) == (200, b"old")
        assert stream.sock.recv(1) == b""


def test_a_request_on_a_kept_connection_is_answered_and_told_to_go_elsewhere(monkeypatch):
    """It was under way when the server was told to end."""
    monkeypatch.setattr(vllm_draining, "LINGER_SECONDS", 10.0)
    with serving(monkeypatch, 0) as stand:
        one, other = stand.client(), stand.client()
        assert ask(one) == ask(other) == (200, b"old", None)
        with stopping(stand.engine):
            stand.until_it_accepts_no_more()
            assert ask(one) == ask(other) == (200, b"old", "close")
        assert stand.engine.stopped


def test_an_idle_connection_is_closed(monkeypatch):
    """It does not hold up the stop."""
    with serving(monkeypatch, 10) as stand:
        idle = stand.client()
        assert ask(idle) == (200, b"old", None)
        with stopping(stand.engine):
            pass
        assert idle.sock.recv(1) == b""


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_request_without_an_answer_in_time_gets_an_error(monkeypatch, seconds):
    """Never a whole status with half a text, and never nothing."""
    with serving(monkeypatch, seconds) as stand:
        slow = stand.slow_client()
        with stopping(stand.engine):
            pass
        assert answer_of(slow)[0] == 500
        assert stand.engine.stopped


def test_the_engine_s_end_in_the_server_s_own_thread_waits_for_nothing(monkeypatch):
    """As vLLM calls it once more when all is over."""
    with serving(monkeypatch, 10) as stand:
        stand.slow_client()
        done = threading.Event()
        loop = stand.served.server.servers[0].get_loop()
        loop.call_soon_threadsafe(lambda: (stand.engine.shutdown(), done.set()))
        assert done.wait(5) and stand.engine.stopped
        stand.engine.stopped = False


def test_a_loop_that_is_over_does_not_keep_the_engine_from_stopping(monkeypatch, caplog):
    """The drain is given up, and said."""
    with serving(monkeypatch, 10) as stand:
        stand.served.end()
        with stopping(stand.engine):
            pass
        assert stand.engine.stopped
    assert "weightkeeper: requests cannot be waited for: RuntimeError('Event loop is closed')" in caplog.text


def test_a_web_socket_in_flight_is_answered_whole(monkeypatch):
    """As a request is; it keeps its connection for as long as its talk goes on."""
    with serving(monkeypatch, 10) as stand:
        talk = stand.web_socket("/talk")
        with stopping(stand.engine):
            stand.until_it_accepts_no_more()
            assert not stand.engine.stopped
            stand.served.let_go.set()
            assert talk.recv(10) == "old"
        assert stand.engine.stopped


def test_a_web_socket_that_does_not_end_in_time_is_told(monkeypatch):
    """By code 1012, service restart."""
    with serving(monkeypatch, 0.05) as stand:
        talk = stand.web_socket("/talk")
        with stopping(stand.engine), pytest.raises(ConnectionClosed) as closed:
            talk.recv(10)
        assert closed.value.rcvd.code == 1012
        assert stand.engine.stopped


@pytest.mark.parametrize("has_closed", [False, True])
def test_a_web_socket_that_nobody_reads_costs_the_others_nothing(monkeypatch, caplog, has_closed):
    """Neither their time nor the server its orderly end, also where its client has said that it goes."""
    with serving(monkeypatch, 2) as stand:
        client = stand.full_web_socket()
        if has_closed:
            client.sendall(CLOSE_FRAME)
        slow = stand.slow_client()
        with stopping(stand.engine):
            stand.until_it_accepts_no_more()
            stand.served.let_go.set()
            assert answer_of(slow) == (200, b"old", "close")
        assert stand.engine.stopped
        stand.served.end()
        assert not stand.served.errors
    assert "1 requests had no whole answer after 2 s" in caplog.text
    assert "cannot be waited for" not in caplog.text


def test_what_one_connection_raises_costs_the_others_nothing(monkeypatch, caplog):
    """It is said, and they are closed all the same."""

    def broken() -> None:
        raise ValueError("broken")

    with serving(monkeypatch, 10) as stand:
        clients = [stand.client() for _ in range(3)]
        assert [ask(each)[0] for each in clients] == [200] * 3
        first = next(iter(stand.served.server.server_state.connections))
        first.shutdown = broken
        with stopping(stand.engine):
            pass
        wait_for(lambda: stand.served.server.server_state.connections == {first}, "the end of the others")
        del first.shutdown
    assert "weightkeeper: a connection cannot be shut down: ValueError('broken')" in caplog.text


def test_what_goes_wrong_in_the_server_s_thread_is_heard_at_once(monkeypatch, caplog):
    """The drain is given up with its reason, and the engine stops."""
    with serving(monkeypatch, 10) as stand:
        with monkeypatch.context() as wrong:
            wrong.setattr(stand.served.server, "server_state", None)
            with stopping(stand.engine):
                pass
        assert stand.engine.stopped
    assert "requests cannot be waited for: AttributeError" in caplog.text


def test_the_engine_s_end_while_the_server_starts_waits_for_nothing(monkeypatch, caplog):
    """There is nothing yet that could be asked."""
    starting, end = threading.Event(), threading.Event()

    async def application(scope: dict, receive, send) -> None:
        starting.set()
        while not end.is_set():
            await asyncio.sleep(0.005)
        await send({"type": "lifespan.startup.failed"})

    def run() -> None:
        config = uvicorn.Config(application, interface="asgi3", log_level="critical", lifespan="on")
        with contextlib.suppress(SystemExit):  # of a start that failed
            uvicorn.Server(config).run()

    with serving(monkeypatch, 10) as stand:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            assert starting.wait(10)
            with stopping(stand.engine):
                pass
        finally:
            end.set()
            thread.join(10)
        assert stand.engine.stopped
    assert "cannot be waited for" not in caplog.text
