"""Servers as processes of their own, each with imports of its own: the way that needs no fork."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import anyio

from weightkeeper import phases
from weightkeeper.errors import ConfigError, TemplateError
from weightkeeper.launcher.reaping import Reaper, Watched
from weightkeeper.launcher.template import MAX_MESSAGE_BYTES

PLAIN_CHECK_SECONDS = 600.0
"""For a check that has to import the server first."""

MARKS = "marks"
"""Name in a server's directory of the socket that takes marks; a process with its own imports inherits no number."""

_MODULE = (sys.executable, "-m", "weightkeeper.launcher.template")


class Plain:
    """Servers as processes of their own, with their own imports."""

    def __init__(self, application: str, reaper: Reaper):
        self._application = application
        self._reaper = reaper

    async def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: str, descriptors: Sequence[int]
    ) -> Watched:
        """As Template.start."""
        listener, _ = descriptors
        given = {**environment, "TMPDIR": directory, phases.CHANNEL: os.path.join(directory, MARKS)}
        return start_module(self._reaper, self._application, ["--serve", str(listener)], arguments, given, descriptors)

    async def check(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """As Template.check; it takes as long as the imports do."""
        reading, writing = os.pipe()
        with open(reading, "rb") as answer:
            try:
                options = ["--check", str(writing)]
                process = start_module(self._reaper, self._application, options, arguments, environment, [writing])
            finally:
                os.close(writing)
            try:
                with anyio.fail_after(PLAIN_CHECK_SECONDS):
                    await process.ended.wait()
            except TimeoutError as error:
                raise ConfigError(f"the check did not end within {PLAIN_CHECK_SECONDS:g} s") from error
            finally:
                if not process.ended.is_set():
                    os.kill(process.pid, signal.SIGKILL)
            os.set_blocking(answer.fileno(), False)
            data = answer.read(MAX_MESSAGE_BYTES)
        message = json.loads(data) if data else {"error": f"the check of the arguments broke off: {process.exit}"}
        if "error" in message:
            raise ConfigError(str(message["error"]))


def start_module(
    reaper: Reaper,
    application: str,
    options: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
) -> Watched:
    """Start the module `template` in one of its forms, with these descriptors.

    Raises:
        TemplateError: it cannot be started.
    """
    command = [*_MODULE, "--application", application, "--launcher", str(os.getpid()), *options, "--", *arguments]
    since = time.monotonic()
    try:
        process = subprocess.Popen(command, env=dict(environment), pass_fds=descriptors, start_new_session=True)
    except OSError as error:
        raise TemplateError(f"{command[0]} cannot be started: {error}") from error
    process.returncode = 0  # the reaper waits for it; Popen is not to
    return reaper.watch(process.pid, since)
