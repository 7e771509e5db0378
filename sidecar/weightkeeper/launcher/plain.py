"""Servers as processes of their own, each with imports of its own: the way that needs no fork."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from weightkeeper import phases
from weightkeeper.errors import TemplateError
from weightkeeper.launcher import outcome, stamp
from weightkeeper.launcher.reaping import Reaper, Watched

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
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        descriptors: Sequence[int],
        number: int,
    ) -> Watched:
        """As Template.start."""
        listener, _ = descriptors
        given = {**environment, "TMPDIR": directory, phases.CHANNEL: os.path.join(directory, MARKS)}
        options = ["--serve", str(listener)]
        process = start_module(self._reaper, self._application, options, arguments, given, descriptors)
        with contextlib.suppress(OSError):  # it has been killed; a limit that cannot be set has been said
            stamp.put(process.pid, number)  # Python takes longer to start than this
        return process

    async def check(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """As Template.check; it takes as long as the imports do."""
        try:
            reading, writing = os.pipe()
        except OSError as error:
            raise TemplateError(f"the arguments cannot be checked: {error.strerror}") from error
        try:
            try:
                options = ["--check", str(writing)]
                process = start_module(self._reaper, self._application, options, arguments, environment, [writing])
            finally:
                os.close(writing)
            await outcome.passed(process, reading, PLAIN_CHECK_SECONDS)
        finally:
            os.close(reading)


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
