"""A stand-in for vLLM's server: imports nothing slow, forks an engine core that forks a worker, does as it is told.

Its config file is YAML with these keys besides `host`, `port`, `uds` and `model`:

    refuse: TEXT         check raises ValueError with it
    crash: N             serve ends with this exit code before it listens; by signal -N where it is negative
    crash_while: FILE    as crash with 3, but only while this file exists
    check_waits: FILE    check does not end while this file exists
    hang: FILE           /health does not answer while this file exists
    slow: SECONDS        before it accepts
    ignore_term: true    SIGTERM does nothing
    drain: SECONDS       between SIGTERM and its end
    code: N              its exit code at SIGTERM, 0 else; by signal where it is negative
    answer: TEXT         of GET /
    notices: true        it reaps an engine core that dies, and /health answers 503 from then on
    leave: true          the worker starts a process in a session of its own that outlives all
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from weightkeeper import phases

# As vLLM does: some variables are set by the first import of it.
os.environ["STANDIN_IMPORTED"] = "1"
os.environ.setdefault("STANDIN_DEFAULT", "of the import")

WARMED: list[str] = []
BUSY: list[str] = []


def warm(arguments: list[str]) -> None:
    """In the template. STANDIN_WARM says how: `thread` leaves a thread, `fail` raises, `exit` ends, N sleeps."""
    how = os.environ.get("STANDIN_WARM", "")
    if how == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    elif how == "fail":
        raise ImportError("no module of this name")
    elif how == "exit":
        os._exit(7)
    elif how:
        print("the stand-in warms", file=sys.stderr, flush=True)
        time.sleep(float(how))
    WARMED.append(str(os.getpid()))


def config(arguments: list[str]) -> dict[str, Any]:
    if "--config" not in arguments:
        return {}
    return yaml.safe_load(Path(arguments[arguments.index("--config") + 1]).read_text())


def check(arguments: list[str]) -> None:
    values = config(arguments)
    if "--bad" in arguments:
        print("usage: serve\nserve: error: unrecognized arguments: --bad", file=sys.stderr)
        raise SystemExit(2)
    if values.get("break"):
        os.kill(os.getpid(), signal.SIGSEGV)
    while values.get("check_waits") and Path(values["check_waits"]).exists():
        time.sleep(0.01)
    if values.get("refuse"):
        raise ValueError(values["refuse"])


def serve(arguments: list[str], listener: socket.socket) -> None:
    values = config(arguments)
    if values.get("crash"):
        end(values["crash"])
    if values.get("crash_while") and Path(values["crash_while"]).exists():
        end(3)
    core, worker = start_engine(values)
    if values.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(values.get("slow", 0))
    facts = {
        "pid": os.getpid(), "core": core, "worker": worker, "parent": os.getppid(), "warmed": WARMED,
        "arguments": arguments, "environment": dict(os.environ), "answer": values.get("answer", ""),
        "model": values.get("model"),
    }  # fmt: skip
    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = False
    server.handle_error = lambda *_: None  # a client that went away
    server.facts, server.hang = facts, values.get("hang")
    server.broken = threading.Event()
    if values.get("notices"):
        threading.Thread(target=notice, args=(core, server.broken), daemon=True).start()

    asked: SimpleQueue[None] = SimpleQueue()

    def drain() -> None:
        asked.get()
        time.sleep(values.get("drain", 0))
        server.shutdown()

    # Started before the signal: its handler may find this thread in the middle of starting another, and locks held.
    threading.Thread(target=drain, daemon=True).start()
    if not values.get("ignore_term"):
        signal.signal(signal.SIGTERM, lambda *_: asked.put(None))
    Path(os.environ["TMPDIR"], "leftover").write_text("x")
    listener.setblocking(True)
    phases.mark("server", "server")
    server.serve_forever(poll_interval=0.01)
    listener.close()
    if not server.broken.is_set():
        os.kill(core, signal.SIGTERM)
        server.broken.wait() if values.get("notices") else os.waitpid(core, 0)
    end(values.get("code", 0))


def notice(core: int, broken: threading.Event) -> None:
    """As vLLM, which looks at the processes it has started."""
    os.waitpid(core, 0)
    broken.set()


def end(code: int) -> None:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -9 else None
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def start_engine(values: dict[str, Any]) -> tuple[int, int]:
    """An engine core that forks a worker. Both live until the core is told to end, and outlive the server."""
    reading, writing = os.pipe()
    core = os.fork()
    if core:
        os.close(writing)
        with os.fdopen(reading) as stream:
            return core, int(stream.read() or end(1))
    worker = os.fork()
    if worker == 0:
        if values.get("leave"):
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.close(writing)
        while True:
            signal.pause()
    phases.mark("engine core", "engine core")
    os.write(writing, str(worker).encode())
    os.close(writing)

    def stop(*_: object) -> None:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        signal.pause()


def program() -> int:
    """A program that runs for as long as it is let."""
    started = subprocess.Popen(["sleep", "1000"])
    threading.Thread(target=started.wait, daemon=True).start()
    return started.pid


def fork() -> int:
    """A fork that ends with code 0 at SIGTERM."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        while True:
            signal.pause()
    return child


def orphan() -> int:
    """A process whose parent has ended."""
    shown = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    return int(shown.stdout)


def session() -> int:
    """A program with a session of its own and nothing of our environment."""
    return subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env={}, stdout=subprocess.DEVNULL).pid


def daemon(runs: Callable[[], None]) -> int:
    """A process that has left parent, session and descriptors behind."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        if (child := os.fork()) == 0:
            os.closerange(3, 1000)
            runs()
        os.write(writing, str(child).encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        return int(stream.read())


def sleep() -> None:
    os.execve("/bin/sleep", ["sleep", "1000"], {})


def pause() -> None:
    """Ends with 0 at SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        signal.pause()


def shared() -> str:
    """Name of a piece of shared memory that Python's resource tracker removes when its makers are gone."""
    MADE.append(SharedMemory(create=True, size=4096))
    return MADE[-1].name


MADE: list[SharedMemory] = []
CHILDREN = {
    "/program": program,
    "/fork": fork,
    "/orphan": orphan,
    "/session": session,
    "/daemon": lambda: daemon(sleep),
    "/shared": shared,
    "/forked-daemon": lambda: daemon(pause),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hang = self.server.hang
        while self.path == "/health" and hang and Path(hang).exists():
            time.sleep(0.02)
        if self.path.startswith("/sleep"):
            BUSY.append(self.path)
            time.sleep(float(self.path.partition("?")[2]))
        path, _, told = self.path.partition("?")
        child = CHILDREN[path]() if path in CHILDREN else 0
        if told and child:
            Path(told).write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        body = json.dumps(self.server.facts | {"busy": BUSY, "child": child}).encode()
        self.send_response(503 if self.path == "/health" and self.server.broken.is_set() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
