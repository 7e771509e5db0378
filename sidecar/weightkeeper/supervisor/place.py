"""Where the supervisor itself runs: what is mounted here, and which container this is."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from weightkeeper.errors import ConfigError, ServiceError
from weightkeeper.supervisor import sources
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection, docker_answers

MOUNTINFO = Path("/proc/self/mountinfo")


def mount_points(mountinfo: str | None = None) -> frozenset[Path]:
    """Every path at which something is mounted, as this process sees it."""
    text = MOUNTINFO.read_text("utf-8", "surrogateescape") if mountinfo is None else mountinfo
    return frozenset(Path(_plain(fields[4])) for line in text.splitlines() if len(fields := line.split()) > 4)


def single_mounts(paths: Iterable[Path], mountinfo: str | None = None) -> list[Path]:
    """Those of the files that are mount points themselves: a save by rename outside never shows here."""
    points = mount_points(mountinfo)
    return sorted(path for path in paths if not path.is_dir() and path.resolve() in points)


def own_container(mountinfo: str | None = None) -> str | None:
    """Id of the container we run in, from the files that Docker mounts into each; None outside of one."""
    text = MOUNTINFO.read_text("utf-8", "surrogateescape") if mountinfo is None else mountinfo
    found = re.search(r"/containers/([0-9a-f]{64})/(?:hostname|hosts|resolv\.conf) ", text)
    return found[1] if found else None


def own(connection: Connection) -> Container | None:
    """The container we run in; None outside of one, or in one of another Docker engine than the one we talk to."""
    identity = own_container()
    if identity is None:
        return None
    connection.wait()
    try:
        with docker_answers():
            return connection.client().containers.get(identity)
    except ServiceError:
        return None


def here(compose: Compose, connection: Connection) -> Compose:
    """The project as it has to be read from where we run.

    Raises:
        ConfigError: we run in a container, and the project does not lie at the host's path in it.
        DockerLostError: Docker does not answer, and we are told to end.
    """
    container = own(connection)
    if container is None:
        return compose
    check_same_path(compose.directory, container.attrs["Mounts"])
    return adopted(compose, container.labels)


def check_same_path(directory: Path, mounts: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a project that lies at another path here than on the host.

    Compose makes absolute paths of relative bind mounts, and Docker takes those as the host's: at another path it would
    create empty directories there and mount them.

    Args:
        directory: of the project, as we see it.
        mounts: of our own container, as Docker describes them.

    Raises:
        ConfigError: the paths differ, or the project is not mounted at all.
    """
    covering = [mount for mount in mounts if directory.is_relative_to(mount["Destination"])]
    if not covering:
        raise ConfigError(f"{directory} is not mounted here; add the volume {directory}:{directory}:ro")
    mount = max(covering, key=lambda mount: len(mount["Destination"]))
    source = Path(mount["Source"]) / directory.relative_to(mount["Destination"])
    if mount.get("Type") != "bind" or source != directory:
        raise ConfigError(
            f"{directory} is {source} on the host; Compose needs it at one path on both sides:"
            f" mount {source}:{source}:ro and use --project-directory {source}"
        )


def adopted(compose: Compose, labels: Mapping[str, str]) -> Compose:
    """The project as the container we run in was started with, where its files or its name were given by hand then.

    Whoever ran `docker compose -f a -f b -p name up` gave this to Compose and not to us; reading the project without it
    would describe other engines.

    Args:
        compose: what we were told.
        labels: of our own container.
    """
    if labels.get("com.docker.compose.project.working_dir") != str(compose.directory):
        return compose
    named = [Path(file) for file in labels.get("com.docker.compose.project.config_files", "").split(",") if file]
    if compose.files or tuple(named) == sources.default_files(compose):
        named = list(compose.files)
    return replace(compose, files=tuple(named), name=compose.name or labels.get("com.docker.compose.project"))


def _plain(field: str) -> str:
    """mountinfo writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
