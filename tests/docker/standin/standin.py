"""A stand-in for vLLM's server: starts in a moment, reads its config file as vLLM does, and answers /health.

    python standin.py --config FILE …                        as a container's own program
    weightkeeper engine --application standin -- --config …  behind our launcher

Options, in the file or after it (which wins): port; max-model-len, a whole number from 1, which is checked before a
server is replaced; crash, true for a server that ends with code 3 after a check that it passed; words, which it says
as it starts; start-delay in seconds.
"""

import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def options(arguments: list[str]) -> dict[str, str]:
    """What vLLM's parser makes of a flat config file and of `--key value` arguments."""
    found: dict[str, str] = {}
    if "--config" in arguments:
        place = arguments.index("--config")
        with open(arguments[place + 1], encoding="utf-8") as file:
            lines = [line.split("#")[0].strip() for line in file]
        for key, value in (line.split(":", 1) for line in lines if line):
            found[key.strip("'\" ").replace("_", "-")] = value.strip().strip("\"'")
        arguments = arguments[:place] + arguments[place + 2 :]
    for key, value in zip(arguments[::2], arguments[1::2], strict=True):
        found[key.removeprefix("--")] = value
    return found


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(repr(self.server.found | {"pid": os.getpid()}).encode())

    def log_message(self, *_: object) -> None:
        pass


def warm(arguments: list[str]) -> None:
    """There is nothing to import."""


def check(arguments: list[str]) -> None:
    length = options(arguments).get("max-model-len", "1")
    if not length.isdecimal() or int(length) < 1:
        raise ValueError(f"max-model-len {length} is not positive")


def serve(arguments: list[str], listener: socket.socket) -> None:
    found = options(arguments)
    # in one piece, as a log does it: the launcher writes there, too
    os.write(2, f"{found.get('words', 'starting')}\n".encode())
    time.sleep(float(found.get("start-delay", "0")))
    if found.get("crash") == "true":
        raise SystemExit(3)
    server = HTTPServer(("", 0), Health, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.found = found
    listener.setblocking(True)
    server.serve_forever(poll_interval=0.05)


def main(arguments: list[str]) -> None:
    # As process 1 of a container it has no default handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check(arguments)
    except ValueError as error:
        sys.exit(str(error))
    listener = socket.create_server(("0.0.0.0", int(options(arguments).get("port", "8000"))), backlog=128)
    serve(arguments, listener)


if __name__ == "__main__":
    main(sys.argv[1:])
