"""The process that servers are forked from. It has their imports, one thread, no CUDA, and no event loop.

    python -m weightkeeper.launcher.template --application MODULE --launcher PID --channel FD -- ARGUMENTS

It warms, says so, and then answers one request after the other; each is a JSON object in a packet of its own:

    ready      ← {"ready": true, "seconds": 17.2, "threads": 1} | {"unusable": "reason"}
    check      → {"op": "check", "arguments": […], "environment": {…}}
                 and two descriptors: of a pipe for the outcome, and of one as below; the check is a process of its own
               ← {"pid": 123}, and on the pipe {"ok": true} | {"error": "as the user should see it"}
    fork       → {"op": "fork", "arguments": […], "environment": {…}, "directory": "…"}
                 and three descriptors: of the listening socket, of a socket for marks, and of a pipe; the server
                 goes on when a byte comes on the pipe, and ends where none does, because nobody knows of it then
               ← {"pid": 123} | {"unusable": "reason"}

Launchers that do not fork run this module too: with `--serve` it is the server, with `--check` the check, and then it
has the inherited environment.
"""

import argparse
import array
import contextlib
import importlib
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from weightkeeper import phases
from weightkeeper.launcher.checking import check
from weightkeeper.launcher.child import await_go, await_parent, become, end_with
from weightkeeper.launcher.warming import fork, unfit, warm

MAX_MESSAGE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Server:
    """What a forked child is to run."""

    arguments: list[str]
    listener: int


@dataclass(frozen=True, slots=True)
class Check:
    """What a forked child is to check. It may import, set and break what it likes.

    Attributes:
        outcome: descriptor of the pipe for it.
    """

    arguments: list[str]
    outcome: int


class Template:
    """The dialogue with the launcher, from warm to the end of the channel.

    Args:
        channel: to the launcher.
        launcher: process id of it.
        variables: that the imports set; over those of a request.
    """

    def __init__(self, channel: socket.socket, launcher: int, variables: dict[str, str]):
        self._channel = channel
        self._launcher = launcher
        self._variables = variables

    def answer(self) -> Server | Check | None:
        """Answer requests. Returns what to run in a forked child, and None in the template itself, at the end."""
        while True:
            request, descriptors = self._receive()
            if request is None:
                return None
            if request["op"] == "fork" and (reason := unfit()) is not None:
                self._say({"unusable": reason})
            elif (child := self._fork(request, descriptors)) is not None:
                return child
            for each in descriptors:
                os.close(each)

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._channel.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data, ancillary = b"", []
        found = array.array("i")
        for _, _, content in ancillary:
            found.frombytes(content)
        return json.loads(data) if data else None, found.tolist()

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the next read sees the end
            self._channel.send(json.dumps(message).encode())

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Server | Check | None:
        """Fork by way of a child that ends at once, so that the launcher becomes the parent."""
        try:
            reading, writing = os.pipe()
        except OSError as error:
            self._say({"error": f"the process cannot be forked: {error.strerror}"})
            return None
        try:
            between = fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self._say({"error": f"the process cannot be forked: {error.strerror}"})
            return None
        if between == 0:
            try:
                child = fork()
            except OSError:
                os._exit(1)
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            os.close(reading)
            os.close(writing)
            self._channel.close()
            await_go(descriptors[-1])
            await_parent(self._launcher)
            environment = request["environment"] | self._variables
            if request["op"] == "check":
                become(environment)
                return Check(request["arguments"], descriptors[0])
            listener, marks, _ = descriptors
            become(environment | {phases.CHANNEL: str(marks), "TMPDIR": request["directory"]})
            phases.mark("server", "fork")
            return Server(request["arguments"], listener)
        os.close(writing)
        answer = _read(reading)
        os.waitpid(between, 0)
        self._say({"pid": int(answer)} if answer else {"error": "the process cannot be forked: no room for it"})
        return None


def _read(descriptor: int) -> bytes:
    """Everything until the other end is closed, which is ours to close here."""
    with open(descriptor, "rb") as stream:
        return stream.read()


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as stream:
        stream.write(data)


def main() -> None:
    """Be a template, a server or a check, as the options say."""
    options = _options()
    end_with(options.launcher)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.check is not None:
        answer = check(importlib.import_module(options.application), options.arguments)
        _write(options.check, json.dumps(answer).encode())
        return
    if options.serve is not None:
        application: ModuleType | None = importlib.import_module(options.application)
        child: Server | Check | None = Server(options.arguments, options.serve)
        phases.mark("server", "imports")
    else:
        application, message, variables = warm(options.application, options.arguments)
        channel = socket.socket(fileno=options.channel)
        with contextlib.suppress(ConnectionError):
            channel.send(json.dumps(message).encode())
        if application is None:
            return
        child = Template(channel, options.launcher, variables).answer()
    if isinstance(child, Check) and application is not None:
        _write(child.outcome, json.dumps(check(application, child.arguments)).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the imports left for the end of a process is the template's
    if isinstance(child, Server) and application is not None:
        application.serve(child.arguments, socket.socket(fileno=child.listener))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weightkeeper.launcher.template")
    parser.add_argument("--application", required=True)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--channel", type=int)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--check", type=int)
    parser.add_argument("arguments", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
