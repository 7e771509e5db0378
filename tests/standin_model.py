"""A stand-in for `vllm serve`: an OpenAI-compatible server whose greedy answers depend on the question alone.

    python standin_model.py serve --config FILE [--host HOST] [--port PORT] [--load-format FORMAT]

Its config file is YAML, of which it takes `standin` besides vLLM's own options:

    start: SECONDS       before it listens
    token: SECONDS       for each token
    other: TEXT          gives other answers, as other weights would
    never: true          it never does
    zero_copy: {…}       any of these, for an engine that maps weights alone
    copy: {…}            the same, for one that copies them
    trouble: FILE        of lines, taken one by one by the requests for completions:
                         abort, short, cut, hang, die, 500, 404, torn, other (answer); an empty line for a whole answer
    asked: FILE          one line is appended for each request for completions: its question, as JSON

It starts a second process, named as vLLM's engine core, and ends when that one does. At SIGTERM it takes no new
connection, answers what it was asked, each time with `Connection: close`, and ends. It is also an application for the
launcher, with `warm`, `check` and `serve`.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from weightkeeper import client
from weightkeeper.frames import close_all

LOCK = threading.Lock()

LINGER_SECONDS = 0.1
"""For a request that is under way on a connection that was kept."""

DRAIN_SECONDS = 5.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = {"/health": b"", "/v1/models": b'{"object": "list", "data": [{"id": "local", "object": "model"}]}'}
        self.answer(200 if self.path in known else 404, known.get(self.path, b""))

    def do_POST(self) -> None:
        with self.server.answering():
            self.complete()

    def complete(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        trouble = self.taken(request)
        if trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang":
            time.sleep(1000)
        if trouble in ("404", "500"):
            self.answer(int(trouble), b'{"error": {"message": "trouble"}}')
            return
        ids = self.tokens(request["prompt"], request["max_tokens"])
        reason = "length"
        if trouble == "other":
            ids.reverse()
        if trouble in ("abort", "cut", "short"):
            ids, reason = ids[: len(ids) // 2], "abort" if trouble == "abort" else "length"
        if request.get("stream"):
            self.stream(request, ids, reason, trouble)
            return
        time.sleep(self.server.standin.get("token", 0) * len(ids))
        choice = {"index": 0, "text": text_of(ids), "token_ids": ids, "finish_reason": reason, "logprobs": None}
        body = json.dumps(envelope([choice], usage(len(ids)))).encode()
        if trouble == "torn":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.answer(200, body)

    def taken(self, request: dict[str, Any]) -> str:
        """The trouble for this request."""
        standin = self.server.standin
        with LOCK:
            if "asked" in standin:
                with open(standin["asked"], "a") as stream:
                    stream.write(json.dumps(request["prompt"]) + "\n")
            file = Path(standin.get("trouble", "/nonexistent"))
            if not file.exists():
                return ""
            first, _, rest = file.read_text().partition("\n")
            file.write_text(rest)
            return first.strip()

    def tokens(self, prompt: str, count: int) -> list[int]:
        seed = hashlib.blake2b((self.server.standin.get("other", "") + prompt).encode()).digest()
        return [int.from_bytes(hashlib.blake2b(seed + bytes([n])).digest()[:2], "big") for n in range(count)]

    def stream(self, request: dict[str, Any], ids: list[int], reason: str, trouble: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers_of_answer()
        for number, token in enumerate(ids):
            time.sleep(self.server.standin.get("token", 0))
            is_last = number == len(ids) - 1 and trouble not in ("cut", "torn")
            choice = {
                "index": 0, "text": text_of([token]), "token_ids": [token], "logprobs": None,
                "finish_reason": reason if is_last else None,
            }  # fmt: skip
            self.chunk(f"data: {json.dumps(envelope([choice]))}\n\n")
        if trouble == "torn":  # no last chunk: the connection ends in the middle
            self.close_connection = True
            return
        if trouble != "cut":
            if request.get("stream_options", {}).get("include_usage"):
                self.chunk(f"data: {json.dumps(envelope([], usage(len(ids))))}\n\n")
            self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers_of_answer()
        self.wfile.write(body)

    def end_headers_of_answer(self) -> None:
        if self.server.is_leaving:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def envelope(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
    return {"id": "1", "object": "text_completion", "created": 1, "model": "local", "choices": choices, "usage": usage}


def usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}


def text_of(ids: list[int]) -> str:
    return "".join(f" w{token}" for token in ids)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    is_leaving = False
    _asked = 0

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with LOCK:
            self._asked += 1
        try:
            yield
        finally:
            with LOCK:
                self._asked -= 1

    def leave_at_sigterm(self) -> None:
        """With a thread that is there before the signal, whose handler may interrupt the start of another."""
        self._told: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._drain, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self._told.put(None))

    def _drain(self) -> None:
        self._told.get()
        self.is_leaving = True
        self.shutdown()
        time.sleep(LINGER_SECONDS)
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._asked and time.monotonic() < deadline:
            time.sleep(0.005)
        os._exit(0)

    def handle_error(self, request: socket.socket, client_address: Any) -> None:
        pass  # a client that has gone


def warm(arguments: list[str]) -> None:
    pass


def check(arguments: list[str]) -> None:
    config_of(arguments)


def serve(arguments: list[str], listener: socket.socket) -> None:
    """Behind a launcher."""
    run(config_of(arguments), listener)


def run(config: dict[str, Any], listener: socket.socket | None, address: tuple[str, int] = ("", 0)) -> None:
    start_engine_core()
    tell(config)
    standin = dict(config.get("standin", {}))
    if config.get("load-format") == "weightkeeper":
        standin |= standin.get(config["model-loader-extra-config"].get("mode", "zero_copy"), {})
    time.sleep(1000 if standin.get("never") else standin.get("start", 0))
    server = Server(address, Handler, bind_and_activate=listener is None)
    if listener is not None:
        listener.setblocking(True)
        server.socket.close()
        server.socket = listener
    server.standin = standin
    server.leave_at_sigterm()
    server.serve_forever(poll_interval=0.02)
    threading.Event().wait()  # the thread that drains ends the process


def tell(config: dict[str, Any]) -> None:
    """What vLLM's log tells, as far as somebody reads it."""
    print("INFO non-default args: {}", flush=True)
    print("INFO Initializing a V1 LLM engine (v0) with config", flush=True)
    if config.get("load-format") == "weightkeeper":
        extra = config["model-loader-extra-config"]
        with client.open_session(extra["socket_dir"], "cpu-0") as session:
            weights = session.map({"dtype": "bfloat16"}, extra.get("mode", "zero_copy"))
        close_all(weights.descriptors)
        print("INFO weightkeeper: zero_copy, mapped 100 bytes and copied 5 in 1.5 ms (connect 1 ms)", flush=True)
    print("INFO Model loading took 0.1 GiB memory and 0.10 seconds", flush=True)


def config_of(arguments: list[str]) -> dict[str, Any]:
    return yaml.safe_load(Path(arguments[arguments.index("--config") + 1]).read_text())


def start_engine_core() -> None:
    """A child that lives until it is killed, and takes the server along."""
    core = os.fork()
    if core == 0:
        Path("/proc/self/comm").write_text("VLLM::EngineCor")
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)

    def watch() -> None:
        os.waitpid(core, 0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def main() -> None:
    arguments = sys.argv[1:]
    config = config_of(arguments)
    host, port = (
        arguments[arguments.index(f"--{name}") + 1] if f"--{name}" in arguments else config[name]
        for name in ("host", "port")
    )
    if "--load-format" in arguments:
        config["load-format"] = arguments[arguments.index("--load-format") + 1]
    run(config, None, (host, int(port)))


if __name__ == "__main__":
    main()
