"""One supervisor for one project: the second refuses, wherever it runs."""

import fcntl
import logging
import os
from dataclasses import replace
from pathlib import Path

from weightkeeper.errors import ComposeError, ConfigError
from weightkeeper.supervisor import place, programs
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection, docker_answers
from weightkeeper.supervisor.engines import PROJECT_LABEL

log = logging.getLogger(__name__)


class Alone:
    """Held for as long as the process lives: locks, which the kernel lets go with it."""

    def __init__(self, state_dir: Path, compose: Compose, project: str, connection: Connection) -> None:
        """Make sure of it.

        Raises:
            ConfigError: another supervisor is at work on this project.
            DockerLostError: Docker does not answer.
        """
        self._held: list[int] = []
        self._project = project
        try:
            self._take(state_dir, compose, connection)
        except BaseException:
            self.close()
            raise

    def _take(self, state_dir: Path, compose: Compose, connection: Connection) -> None:
        self._lock(state_dir / f"supervisor-{self._project}.lock", os.O_RDWR | os.O_CREAT)
        if _is_own_name(compose, self._project):
            # The directory is one inode, on the host and in every container that mounts it.
            self._lock(compose.directory, os.O_RDONLY | os.O_DIRECTORY)
        if name := _other(self._project, connection):
            raise ConfigError(f"{name} supervises {self._project} already; stop it first")

    def _lock(self, path: Path, flags: int) -> None:
        """Lock a file or a directory; where its file system has no locks, or we may not open it, the rest has to do."""
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("%s cannot be locked against a second supervisor: %s", path, error.strerror)
            return
        self._held.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another supervisor is at work on {self._project}; stop it first") from error
        except OSError as error:
            log.warning("%s cannot be locked against a second supervisor: %s", path, error.strerror)

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def _is_own_name(compose: Compose, project: str) -> bool:
    """Whether the project has the name that its files give it; under names given by hand there may be several."""
    if compose.name is None:
        return True
    try:
        return replace(compose, name=None).config()[0].get("name") == project
    except (ComposeError, ConfigError):
        return False


def _other(project: str, connection: Connection) -> str:
    """Name of another running container of the project that supervises; "" where there is none."""
    own = place.own_container()
    with docker_answers():
        running = connection.client().containers.list(filters={"label": f"{PROJECT_LABEL}={project}"})
    for container in running:
        config = container.attrs["Config"]
        words = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
        if container.id != own and programs.find(words, "supervise"):
            return container.name
    return ""
