"""The connection to Docker, which may be lost and come back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)

DOCKER_SECONDS = 30
"""For one answer of Docker, on top of a container's own stop grace."""

BACK_OFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Between attempts to reach Docker again; the last one repeats."""


class Connection:
    """Makes the client when it is first needed, and again after it was lost. Used by several threads."""

    def __init__(self, stop: Stop, connect: Callable[[], docker.DockerClient] | None = None) -> None:
        self._stop = stop
        self._connect = connect or (lambda: docker.from_env(timeout=DOCKER_SECONDS))
        self._client: docker.DockerClient | None = None
        self._making = threading.Lock()
        self._waiting = threading.Lock()

    def client(self) -> docker.DockerClient:
        """The client of now.

        Raises:
            DockerLostError: nobody answers.
        """
        with self._making, docker_answers():
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        """End the connection; the next use makes another."""
        with self._making:
            if self._client is not None:
                self._client.close()
            self._client = None

    def wait(self) -> None:
        """Return once Docker answers, or we are told to end. Say once that it is lost, and once that it is back."""
        with self._waiting:
            began = time.monotonic()
            attempt = 0
            while True:
                try:
                    with docker_answers():
                        self.client().ping()
                    break
                except (DockerLostError, ServiceError) as error:
                    if not attempt:
                        log.error("%s; trying again until it does", error)
                    self.close()
                if self._stop.wait(BACK_OFF_SECONDS[min(attempt, len(BACK_OFF_SECONDS) - 1)]):
                    return
                attempt += 1
            if attempt:
                log.info("Docker answers again after %.1f s", time.monotonic() - began)


@contextmanager
def docker_answers() -> Iterator[None]:
    """Turn the errors of SDK and transport into ours: refused is a ServiceError, no answer a DockerLostError."""
    try:
        yield
    except APIError as error:
        raise ServiceError(f"Docker refused: {error.explanation or error}") from error
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        text = str(error)
        remedy = "; is the socket's group in group_add (DOCKER_GID)?" if "Permission denied" in text else ""
        raise DockerLostError(f"Docker does not answer: {text}{remedy}") from error
