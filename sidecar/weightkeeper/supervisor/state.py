"""What was applied last, on disk: so that edits are seen that were made while no supervisor ran."""

import base64
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper.supervisor import project, variables
from weightkeeper.supervisor.project import Service

log = logging.getLogger(__name__)


class Applied(msgspec.Struct, frozen=True):
    """One engine as it was when something was last applied to it, or found applied.

    Attributes:
        definition: of the service.
        hash: Compose's, of the definition.
        path: of its config file, seen from here; "" for none.
        text: what the config file held, in base64.
        started: when its container was started, as Docker writes it.
        failed: key of what was tried and did not come up; it is not tried again.
        good: the whole project as it was when this service was healthy last.
        env_files: the launcher's environment files in their order, each as its path and what it held, in base64; None
            where a release wrote this that did not look at them.
    """

    definition: dict[str, Any]
    hash: str = ""
    path: str = ""
    text: str = ""
    started: str = ""
    failed: str = ""
    good: dict[str, Any] = {}
    env_files: list[tuple[str, str]] | None = None

    def service(self, now: Service) -> Service:
        """The service as it was then; what runs in it is read off its definition of `now`."""
        config = project.parse_config(Path(self.path), base64.b64decode(self.text)) if self.path else None
        env_files = now.env_files
        if self.env_files is not None:
            env_files = tuple(variables.parse(Path(path), base64.b64decode(text)) for path, text in self.env_files)
        return Service(now.name, self.definition, True, config, now.launcher, now.keeper, self.hash, env_files)


class State:
    """The file of one project in a state directory. It has what the environment of engines has, so only we read it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"applied-{name}.json"

    def read(self) -> dict[str, Applied]:
        """Service → what was applied; empty, and said, where the file cannot be used."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Applied])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: %s; what is there now counts as applied", self._path, error)
            return {}

    def write(self, services: Mapping[str, Applied]) -> None:
        """Replace the file. A full disk is said, and keeps no engine from being restarted."""
        temporary = self._path.with_suffix(".new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.json.encode(services))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self._path)
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error)


def of_service(service: Service, started: str, failed: str, good: Mapping[str, Any]) -> Applied:
    """What is kept of a service."""
    config = service.config
    return Applied(
        definition=dict(service.definition),
        hash=service.hash,
        path=str(config.path) if config else "",
        text=base64.b64encode(config.text).decode() if config else "",
        started=started,
        failed=failed,
        good=dict(good),
        env_files=[(str(file.path), base64.b64encode(file.text).decode()) for file in service.env_files],
    )
