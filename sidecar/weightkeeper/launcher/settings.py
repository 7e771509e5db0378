"""What one launcher was told, once, by its command line."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from weightkeeper.errors import ConfigError

APPLICATION = "weightkeeper.vllm_server"
"""Module with `warm(arguments)`, `check(arguments)` and `serve(arguments, listener)`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one launcher. All times in seconds.

    Attributes:
        arguments: what follows `vllm serve`.
        name: of this engine: of its control socket and its history.
        env_files: read over the inherited environment at the start and at each reload.
        socket_dir: where the control socket's directory is; None for no control socket.
        state_dir: where the history is; None for none.
        prefork: whether servers are forked from a process that has their imports.
        restarts: whether a server that ended is started again.
        stop_grace: from SIGTERM to SIGKILL.
        start_timeout: from a server's start to its first answer; after that the start counts as a crash.
        health_interval: between two looks at a ready server, and the time that each has.
        health_failures: in a row, after which the server is replaced.
        delay: before the second start in a row; doubles each time.
        delay_max: up to this.
        healthy_seconds: a server that was healthy for so long starts the delays anew.
        application: the module that is served, see APPLICATION.
    """

    arguments: tuple[str, ...]
    name: str
    env_files: tuple[Path, ...] = ()
    socket_dir: str | None = None
    state_dir: Path | None = None
    prefork: bool = True
    restarts: bool = True
    stop_grace: float = 30.0
    start_timeout: float = 3600.0
    health_interval: float = 5.0
    health_failures: int = 3
    delay: float = 1.0
    delay_max: float = 60.0
    healthy_seconds: float = 60.0
    application: str = APPLICATION


def checked_name(name: str | None) -> str:
    """The name of an engine; the host's where none is given.

    Raises:
        ConfigError: it cannot be part of a file's name.
    """
    name = name or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} cannot be an engine's name: up to 63 letters, digits, `.`, `-` and `_`; give another --name"
        )
    return name
