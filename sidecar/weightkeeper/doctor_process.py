"""The doctor's end of a trial process: started, told what to do, heard under a time limit, and gone at the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

from weightkeeper.doctor_trial import MESSAGE_BYTES
from weightkeeper.errors import TrialError
from weightkeeper.quantities import printable

ANSWERS = 8
"""A trial process has at most so many messages, so it ends itself after so many times the limit of one."""

_OUT_OF_MEMORY = 2
"""CUDA error."""


class TrialProcess:
    """`python -m weightkeeper.doctor_trial`; used with `with`.

    Args:
        role: `make`, `read` or `write`.
        seconds: for each of its answers.

    Attributes:
        taken: descriptors that came with the last message; the receiver closes them.
    """

    def __init__(self, role: str, kind: str, ordinal: int, secret: str, seconds: float):
        self.taken: list[int] = []
        self._role = role
        self._seconds = seconds
        self._command = [sys.executable, "-m", "weightkeeper.doctor_trial", role, kind, str(ordinal), secret]

    def __enter__(self) -> "TrialProcess":
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(self._seconds)
        self._errors = tempfile.TemporaryFile()
        with theirs:
            number = theirs.fileno()
            limit = str(self._seconds * ANSWERS)
            try:
                self._process = subprocess.Popen(
                    [*self._command, limit, "--channel", str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=[number],
                )
            except OSError:
                self._channel.close()
                self._errors.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def tell(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Send what it waits for.

        Raises:
            TrialError: it is gone.
        """
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors or [])
        except OSError as error:
            raise self._ended() from error

    def expect(self, *steps: str) -> dict[str, Any]:
        """Its messages about these steps, in this order; the last of them.

        Raises:
            TrialError: it reported an error, ended, or was silent for too long.
        """
        message: dict[str, Any] = {}
        for step in steps:
            try:
                data, self.taken, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError as error:
                raise self._silent(step) from error
            except OSError as error:
                raise self._ended() from error
            if not data:
                raise self._ended()
            message = json.loads(data)
            if message["error"]:
                number = message["number"]
                raise TrialError(message["error"], number, is_fault=number not in (0, _OUT_OF_MEMORY))
            if message["step"] != step:
                raise TrialError(f"the process told of {message['step']!r:.40} where {step} was next")
        return message

    def finish(self, *steps: str) -> None:
        """`expect`, and then its end without an error.

        Raises:
            TrialError: as `expect`, and where it ends in any other way.
        """
        self.expect(*steps)
        if self._code() != 0:
            raise self._ended()

    def _code(self) -> int:
        try:
            return self._process.wait(self._seconds)
        except subprocess.TimeoutExpired as error:
            raise self._silent("ending") from error

    def _silent(self, step: str) -> TrialError:
        return TrialError(f"no answer to `{step}` within {self._seconds:g} s")

    def _ended(self) -> TrialError:
        """How it ended, in words."""
        code = self._code()
        if code == -signal.SIGALRM:
            return TrialError(f"the process of the trial was still there after {self._seconds * ANSWERS:g} s")
        if code < 0:
            text = f"the process ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
            return TrialError(text, is_fault=-code in (signal.SIGSEGV, signal.SIGBUS))
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - MESSAGE_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {printable(lines[-1], 400)}" if lines else ""
        return TrialError(f"the process ended with exit code {code}{last}")
