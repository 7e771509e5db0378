"""The loader as a process: in a group of its own, ended with everything it started, its last words kept."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import anyio
import anyio.abc

from weightkeeper.errors import LoadFailedError
from weightkeeper.quantities import printable

STDERR_BYTES = 4096
"""Kept of the end of its stderr, in which the last line tells why it ended."""

KILLED_SECONDS = 5.0
"""For a killed one to be gone before it is left behind."""

REST_SECONDS = 0.2
"""For the last words of one that has ended; something that it left may hold its stderr open for ever."""

LOOK_SECONDS = 0.01

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Child:
    """A started process and our end of its channel.

    Used with `async with`; at its end the process is gone, or killed and left behind where the kernel cannot end it, in
    a call of a driver, say.

    Args:
        command: its argument list; `--channel` and the number of its end of the channel are added.
        environment: variables besides our own.

    Attributes:
        channel: a non-blocking connected Unix socket, which the user closes.
        ended: set when the process has ended, and what it had started has been killed.
        drained: set when everything that it wrote to stderr has been passed on.

    Raises:
        LoadFailedError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.ended = anyio.Event()
        self.drained = anyio.Event()
        self._stderr_tail = b""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        keeper = os.getpid()
        with theirs:
            number = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [*command, "--channel", str(number)],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[number],
                    start_new_session=True,
                    preexec_fn=lambda: _end_with(keeper),
                    env=os.environ | environment,
                )
            except (OSError, subprocess.SubprocessError) as error:
                self.channel.close()
                raise LoadFailedError(f"the loader cannot be started: {command[0]}: {error}") from error
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self.channel.close()
            self.kill()
            self._process.communicate()
            raise LoadFailedError(f"the loader cannot be followed: {error}") from error

    async def __aenter__(self) -> "Child":
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._pass_on_stderr)
        self._tasks.start_soon(self._follow)
        return self

    async def __aexit__(self, *exception: object) -> bool | None:
        self.kill()
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(*exception)
        finally:
            with anyio.move_on_after(KILLED_SECONDS, shield=True):
                await self._reaped()
            self._process.stderr.close()
            os.close(self._pidfd)

    async def settled(self, seconds: float) -> bool:
        """Wait until it has ended and said everything; False where that takes longer."""
        with anyio.move_on_after(seconds):
            await self.ended.wait()
            await self.drained.wait()
            return True
        return False

    async def gone(self, seconds: float) -> bool:
        """Wait until it has ended, whoever else may hold its stderr; False where that takes longer."""
        with anyio.move_on_after(seconds):
            await self.ended.wait()
            with anyio.move_on_after(REST_SECONDS):
                await self.drained.wait()
            return True
        return False

    def kill(self) -> None:
        """Kill it and all that it has started; `ended` is set once it is gone."""
        # Until the process has been waited for, no other group can have its number.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def cause_of_end(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "the loader closed its channel without publishing a model, and did not end"
        if code < 0:
            hint = " (killed; out of memory?)" if code == -signal.SIGKILL else f" ({signal.strsignal(-code)})"
            return f"the loader ended by signal {-code}{hint}"
        lines = [line for line in self._stderr_tail.decode(errors="replace").splitlines() if line.strip()]
        last = f": {printable(lines[-1].strip(), 400)}" if lines else ""
        return f"the loader ended with exit code {code} before it had published a model{last}"

    async def _follow(self) -> None:
        """When it has ended, end what it left: the channel is closed only when the last of them is gone."""
        await anyio.wait_readable(self._pidfd)
        self.kill()
        await self._reaped()
        self.ended.set()

    async def _reaped(self) -> None:
        """Wait for it without waiting in the kernel: a tracer can hold on to a process that has ended."""
        while self._process.poll() is None:
            await anyio.sleep(LOOK_SECONDS)

    async def _pass_on_stderr(self) -> None:
        """Write its stderr to ours, and keep the end."""
        source = self._process.stderr.fileno()
        os.set_blocking(source, False)
        while True:
            await anyio.wait_readable(source)
            try:
                data = os.read(source, 65536)
            except BlockingIOError:
                continue
            if not data:
                self.drained.set()
                return
            self._stderr_tail = (self._stderr_tail + data)[-STDERR_BYTES:]
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), data)


def _end_with(keeper: int) -> None:
    """In the child, before its program starts: end when the keeper does, however the keeper ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
