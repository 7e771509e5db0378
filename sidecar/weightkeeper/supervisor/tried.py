"""What was tried in vain: it is not tried again until its files change, or somebody has them read by hand."""

from collections.abc import Mapping
from dataclasses import dataclass

from weightkeeper.errors import DockerLostError, ServiceError
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.engines import Engines
from weightkeeper.supervisor.plan import Action, Nothing
from weightkeeper.supervisor.project import Service, Snapshot

NEVER = "0001-"
"""How Docker's time of a start begins where there was none."""


@dataclass(frozen=True, slots=True)
class Vain:
    """A service as it was tried, and what its containers had read by then.

    Attributes:
        started: when the containers that it was tried on were started.
        reloads: how often its launchers had read their files again; both None where that is not known.
    """

    service: Service
    started: str | None
    reloads: int | None


class Tried:
    """Keys of services, by name. What a supervisor before this one has tried is known only by its key."""

    def __init__(self, engines: Engines, actor: Actor, keys: Mapping[str, str]) -> None:
        self._engines = engines
        self._actor = actor
        self._keys = dict(keys)
        self._vain: dict[str, Vain] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def key(self, name: str) -> str:
        """Of what was tried for a service; "" for nothing."""
        return self._keys.get(name, "")

    def add(self, service: Service, started: str | None) -> None:
        """It was tried, and what was there before serves on. `started` as in `Vain`."""
        self._keys[service.name] = service.key
        self._vain[service.name] = Vain(service, started, self._reloads(service))

    def untried(self, actions: list[Action], snapshot: Snapshot) -> list[Action]:
        """Without what was tried for the same files already; what was tried for other ones is forgotten."""
        keys = {name: service.key for name, service in snapshot.services.items()}
        for name in [name for name, key in self._keys.items() if key != keys.get(name)]:
            self._forget(name)
        return [one for one in actions if isinstance(one, Nothing) or one.service not in self]

    def take_read(self) -> list[Service]:
        """What was read all the same: its containers were started since, or somebody had the launcher reload.

        Raises:
            DockerLostError: Docker does not answer.
        """
        read = [vain.service for vain in list(self._vain.values()) if self._is_read(vain)]
        for service in read:
            self._forget(service.name)
        return read

    def is_started(self) -> bool:
        """Whether anything that was tried in vain has containers that were started since.

        Raises:
            DockerLostError: Docker does not answer.
        """
        return any(self._is_started(vain) for vain in self._vain.values())

    def _is_started(self, vain: Vain) -> bool:
        return vain.started is not None and start_of(self._engines, vain.service.name) not in ("", vain.started)

    def _is_read(self, vain: Vain) -> bool:
        if self._is_started(vain):
            return True
        now = self._reloads(vain.service)
        return vain.reloads is not None and now is not None and now > vain.reloads

    def _reloads(self, service: Service) -> int | None:
        try:
            return self._actor.reloads(service.name, service.launcher) if service.launcher else None
        except DockerLostError:
            return None

    def _forget(self, name: str) -> None:
        del self._keys[name]
        self._vain.pop(name, None)


def start_of(engines: Engines, name: str) -> str:
    """When the containers of a service were started, those that ever were; "" where there is none.

    Raises:
        DockerLostError: Docker does not answer.
    """
    try:
        starts = [one.attrs["State"]["StartedAt"] for one in engines.containers(name)]
    except ServiceError:
        return ""
    return " ".join(start for start in starts if not start.startswith(NEVER))
