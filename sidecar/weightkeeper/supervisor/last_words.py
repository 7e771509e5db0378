"""What a server said of its start or its end, in its container's log, for whoever reads only our line."""

import re
import time
from collections.abc import Iterable

from docker.models.containers import Container

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.quantities import printable
from weightkeeper.supervisor.connection import docker_answers

TAIL_LINES = 400
"""Of the log; a server with several workers ends with a traceback of each."""

MAX_CHARACTERS = 300

FALLBACK = "weightkeeper: fallback to disk, "

_PREFIX = re.compile(r"^(?:\([^()]*\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
"""Of vLLM's log lines: `(EngineCore pid=7) ERROR 11-30 04:12:12 [core.py:900] `."""

_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|error): .*\S")
"""The last line of a traceback; some classes are spelt small, like `struct.error`."""

_ELSEWHERE = re.compile(r"(?:see|check) (?:the )?(?:root cause|error|stack trace)", re.IGNORECASE)
"""Of errors that say only that another process has one."""


def error_in(lines: Iterable[str]) -> str:
    """The last error in these lines of a log that says what went wrong; "" where there is none."""
    found = ""
    for line in lines:
        text = _PREFIX.sub("", line, count=1)
        if _ERROR.match(text) and not (found and _ELSEWHERE.search(text)):
            found = text.strip()
    return printable(found, MAX_CHARACTERS)


def fallback_in(lines: Iterable[str]) -> str:
    """Why weights were read from disk, by the first such line of our loader; "" where there is none."""
    texts = (_PREFIX.sub("", line, count=1) for line in lines)
    found = next((text for text in texts if text.startswith(FALLBACK)), "")
    return printable(found.removeprefix(FALLBACK).strip(), MAX_CHARACTERS)


def lines_of(container: Container, seconds: float) -> list[str]:
    """What a container has logged in the last `seconds`, its end at least; none where Docker does not answer."""
    since = max(1.0, time.time() - seconds)
    try:
        with docker_answers():
            data = container.logs(since=since, tail=TAIL_LINES)
    except (DockerLostError, ServiceError):
        return []
    return data.decode(errors="replace").splitlines()
