"""A template as the launcher sees it: started, asked, ended."""

import array
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from weightkeeper.errors import TemplateError
from weightkeeper.launcher import outcome, stamp
from weightkeeper.launcher.plain import start_module
from weightkeeper.launcher.reaping import Reaper, Watched
from weightkeeper.launcher.template import MAX_MESSAGE_BYTES
from weightkeeper.launcher.warming import SINGLE_THREADED

WARM_SECONDS = 900.0
"""For the imports of a template. A cold disk on a busy machine takes minutes."""

CHECK_SECONDS = 60.0
"""After which a check that is not through is given up."""

FORK_SECONDS = 60.0
"""For a fork; a template of 2 GB takes some 50 ms."""


class Template:
    """A running template process.

    Attributes:
        environment: that it was started with; variables that act at import have their effect in it.
        process: its end.
        seconds: that its imports took; 0 until it is ready.

    Raises:
        TemplateError: there is no room for it.
    """

    def __init__(self, application: str, arguments: Sequence[str], environment: Mapping[str, str], reaper: Reaper):
        self.environment = dict(environment)
        self.seconds = 0.0
        self.threads = 0
        self._reaper = reaper
        self._lock = anyio.Lock()
        self._is_read = False
        try:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TemplateError(f"a template cannot be started: {error.strerror}") from error
        self._channel.setblocking(False)
        # The kernel lowers this to net.core.wmem_max; a message is the environment and the arguments, some 10 KiB.
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        with theirs:
            number = theirs.fileno()
            options = ["--channel", str(number)]
            variables = self.environment | SINGLE_THREADED
            try:
                self.process = start_module(reaper, application, options, arguments, variables, [number])
            except BaseException:
                self._channel.close()
                raise

    async def ready(self) -> None:
        """Wait for its imports.

        Raises:
            UnusableTemplateError: it says that nothing can be forked from it.
            TemplateError: it ended, or took too long.
        """
        message = await self._receive(WARM_SECONDS)
        if "unusable" in message:
            raise UnusableTemplateError(str(message["unusable"]))
        self.seconds, self.threads = float(message.get("seconds", 0)), int(message.get("threads", 0))

    async def check(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have the arguments checked, in a process of its own: a start need not wait for it.

        Raises:
            ConfigError: the server would refuse them; the message is the server's.
            TemplateError: the template is lost, or has no room for a process.
        """
        message = {"op": "check", "arguments": list(arguments), "environment": dict(environment)}
        reading, writing = _pipe()
        try:
            try:
                process = await self._fork(message, [writing])
            finally:
                os.close(writing)
            await outcome.passed(process, reading, CHECK_SECONDS)
        finally:
            os.close(reading)

    async def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        descriptors: Sequence[int],
        number: int,
    ) -> Watched:
        """Fork a server. It is our child by the time it runs.

        Args:
            directory: for its temporary files.
            number: for it and all that it starts, see `stamp`.
            descriptors: of the listening socket and of the socket for marks.

        Raises:
            UnusableTemplateError: nothing can be forked from it any more.
            TemplateError: the template is lost, or has no room for a process.
        """
        message = {"op": "fork", "arguments": list(arguments), "environment": dict(environment), "directory": directory}
        return await self._fork(message, descriptors, number)

    def close(self) -> None:
        """End the process. Servers that were forked from it go on."""
        if not self.process.ended.is_set():  # before its channel ends, which would tell it of our own end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self._is_read:  # whoever reads is to wake up
            self._channel.shutdown(socket.SHUT_RDWR)
        else:
            self._channel.close()

    async def _fork(self, message: dict[str, Any], descriptors: Sequence[int], number: int | None = None) -> Watched:
        """Ask for a child, and let it go on once it is watched. It is ours by the time it runs."""
        reading, writing = _pipe()
        with open(writing, "wb", buffering=0) as go:
            try:
                async with self._lock:
                    since = time.monotonic()
                    # Shielded, or there would be a process that nobody knows; a fork is all that this waits for.
                    with anyio.CancelScope(shield=True):
                        self._send(json.dumps(message).encode(), [*descriptors, reading])
                        answer = await self._receive(FORK_SECONDS)
            finally:
                os.close(reading)
            if "unusable" in answer:
                raise UnusableTemplateError(str(answer["unusable"]))
            if "pid" not in answer:
                raise TemplateError(str(answer.get("error", "the template's answer to a fork has no pid")))
            child = self._reaper.watch(int(answer["pid"]), since)
            if number is not None:
                with contextlib.suppress(OSError):  # it has been killed; a limit that cannot be set has been said
                    stamp.put(child.pid, number)
            with contextlib.suppress(BrokenPipeError):  # it has been killed already
                go.write(b"1")
        return child

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise OSError(f"over {MAX_MESSAGE_BYTES} bytes")
            self._channel.sendmsg([data], rights)
        except ConnectionError as error:
            raise TemplateError("the template has ended") from error
        except OSError as error:
            text = f"{len(data)} bytes of environment and arguments cannot be sent to the template"
            raise TemplateError(f"{text}: {error.strerror or error}") from error

    async def _receive(self, seconds: float) -> dict[str, Any]:
        self._is_read = True
        try:
            with anyio.fail_after(seconds):
                await anyio.wait_readable(self._channel)
            data = self._channel.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            self.close()
            raise TemplateError(f"the template did not answer within {seconds:g} s and was ended") from error
        except OSError as error:
            raise TemplateError("the template is lost") from error
        finally:
            self._is_read = False
        if not data:
            raise TemplateError("the template has ended")
        return json.loads(data)


def _pipe() -> tuple[int, int]:
    try:
        return os.pipe()
    except OSError as error:
        raise TemplateError(f"nothing can be asked of the template: {error.strerror}") from error


class UnusableTemplateError(TemplateError):
    """Nothing can be forked from this template, and a new one would be no better."""

    code = "template_unusable"
