"""Serves /health like `vllm serve`, after reading its --config file once; ends with code 1 on a bad value.

Options, in the file or after it (which wins): port, max-model-len (a whole number from 1), start-delay (seconds).
"""

import signal
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
            found[key.strip().replace("_", "-")] = value.strip().strip("\"'")
        arguments = arguments[:place] + arguments[place + 2 :]
    for key, value in zip(arguments[::2], arguments[1::2], strict=True):
        found[key.removeprefix("--")] = value
    return found


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(repr(found).encode())


# As process 1 of a container it has no default handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
found = options(sys.argv[1:])
if (length := int(found.get("max-model-len", "1"))) < 1:
    sys.exit(f"max-model-len {length} is not positive")
time.sleep(float(found.get("start-delay", "0")))
HTTPServer(("127.0.0.1", int(found.get("port", "8000"))), Health).serve_forever()
