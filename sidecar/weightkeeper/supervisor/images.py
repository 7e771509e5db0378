"""Asks Docker which versions are in the images of an engine and of its keeper, before the engine gets another one."""

from docker.models.containers import Container

from weightkeeper.errors import ServiceError
from weightkeeper.supervisor import builds
from weightkeeper.supervisor.builds import Build, Pair
from weightkeeper.supervisor.connection import Connection, docker_answers
from weightkeeper.supervisor.engines import ONE_OFF_LABEL, PROJECT_LABEL, SERVICE_LABEL
from weightkeeper.supervisor.project import Service, Snapshot


def pairs(old: Snapshot, new: Snapshot, connection: Connection) -> dict[str, Pair]:
    """Service → versions of its new image and of its keeper, for each engine with a keeper whose image changes.

    An image that is not here has no versions: Compose pulls it when it makes the container.

    Raises:
        DockerLostError: Docker does not answer. Nothing is asked where no image changes.
    """
    found: dict[str, Pair] = {}
    for engine in new.engines:
        before = old.services.get(engine.name)
        if before is None or engine.keeper is None or _image(before) == _image(engine):
            continue
        keeper = _of_container(new.name, engine.keeper.service, connection)
        if keeper is None:
            keeper = _of_image(_image(new.services[engine.keeper.service]), connection)
        found[engine.name] = Pair(_of_image(_image(engine), connection), keeper)
    return found


def _image(service: Service) -> str:
    return str(service.definition.get("image") or "")


def _of_image(name: str, connection: Connection) -> Build:
    if not name:
        return Build()
    try:
        with docker_answers():
            return builds.of_labels(connection.client().images.get(name).labels)
    except ServiceError:
        return Build()


def _of_container(project: str, service: str, connection: Connection) -> Build | None:
    """What the keeper's container has: the labels of the image that it was made from, whatever the tag means now."""
    labels = [f"{PROJECT_LABEL}={project}", f"{SERVICE_LABEL}={service}", f"{ONE_OFF_LABEL}=False"]
    try:
        with docker_answers():
            running: list[Container] = connection.client().containers.list(filters={"label": labels})
            return builds.of_labels(running[0].labels) if running else None
    except ServiceError:
        return None
