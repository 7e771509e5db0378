"""What a server said of its start or its end, in its container's log, for whoever reads only our line."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from docker.models.containers import Container

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor.connection import docker_answers
from weightkeeper.supervisor.error_words import error_in, fallback_in
from weightkeeper.supervisor.follow import Outcome

TAIL_LINES = 400
"""Of the log; a server with several workers ends with a traceback of each."""

_LAUNCHER = r"^\S+ \S+ [A-Z]+ weightkeeper\.launcher\.\w+: generation (\d+): "

_SERVER = re.compile(_LAUNCHER + "(?:starts|the server cannot be)")
"""Our launcher's line about a server that starts, or cannot be started or watched."""

_ENDED = re.compile(_LAUNCHER + "(?:ended|the server cannot be)")
_READY = re.compile(_LAUNCHER + "ready")

LOG_SECONDS = 1.0
"""For what was said to be in a container's log: Docker writes it there some time after."""

REST_SECONDS = 0.2
"""The same behind our launcher's line: stdout and stderr come to Docker on two ways."""

LOOK_SECONDS = 0.05


def added(outcome: Outcome, container: Container, since: float, generation: int = 0) -> Outcome:
    """An outcome with what the server said of its end, or of a healthy start without the keeper's weights.

    Args:
        since: seconds since the epoch; what the container logged before is another server's.
        generation: of our launcher's server whose outcome it is; 0 where it is the container's.
    """
    detail = outcome.detail
    if outcome.result in ("exited", "unhealthy"):
        words = _error(outcome.result, container, since, generation)
        detail = f"{detail} ({words})" if detail and words else detail or words
    elif outcome.result in ("healthy", "running"):
        why = _fallback(outcome.result, container, since, generation)
        detail = f"weights from disk, {why}" if why else detail
    return replace(outcome, detail=detail)


def _error(result: str, container: Container, since: float, generation: int) -> str:
    """That of a server that ended, once its lines are all there, or what there is of them when that takes long."""

    def error(lines: list[str]) -> str:
        return error_in(of_server(lines, generation) if generation else lines)

    if result != "exited":
        return error(lines_of(container, since))
    if generation:
        _lines_with(_tells(_ENDED, generation), container, since, LOG_SECONDS)
    return error(_lines_with(error, container, since, REST_SECONDS if generation else LOG_SECONDS))


def _fallback(result: str, container: Container, since: float, generation: int) -> str:
    """That of a server that is healthy; where our launcher says so, up to its line about that."""
    if result == "healthy" and generation:
        lines = _lines_with(_tells(_READY, generation), container, since, LOG_SECONDS)
    else:
        lines = lines_of(container, since)
    return fallback_in(of_server(lines, generation))


def _lines_with(
    is_there: Callable[[list[str]], object], container: Container, since: float, seconds: float
) -> list[str]:
    """The container's lines once this is true of them, or those of then when time is over."""
    deadline = time.monotonic() + seconds
    while not is_there(lines := lines_of(container, since)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return lines


def _tells(line: re.Pattern[str], generation: int) -> Callable[[list[str]], bool]:
    return lambda lines: any((found := line.match(one)) and int(found[1]) == generation for one in lines)


def of_server(lines: Sequence[str], generation: int = 0) -> Sequence[str]:
    """The lines from the start of one of our launcher's servers on, 0: of the newest; all where no such start is in."""
    for place in reversed(range(len(lines))):
        match = _SERVER.match(lines[place])
        if match and (not generation or int(match[1]) == generation):
            return lines[place:]
    return lines


def lines_of(container: Container, since: float) -> list[str]:
    """What a container has logged since then (seconds since the epoch), its end at least; none where Docker is mute."""
    try:
        with docker_answers():
            data = container.logs(since=max(1.0, since), tail=TAIL_LINES)
    except (DockerLostError, ServiceError):
        return []
    return data.decode(errors="replace").splitlines()
