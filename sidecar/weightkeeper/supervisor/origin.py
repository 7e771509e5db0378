"""Whether a container was made from what Compose resolves here: Compose interpolates with its caller's environment."""

from collections.abc import Mapping
from typing import Any

from docker.models.containers import Container

from weightkeeper.supervisor.project import Service

HASH_LABEL = "com.docker.compose.config-hash"


def is_made_from(container: Container, service: Service) -> bool:
    """Whether Compose made the container from this definition; True where one side has no hash to compare."""
    made = container.labels.get(HASH_LABEL, "")
    return not made or not service.hash or made == service.hash


def differences(container: Container, service: Service) -> str:
    """What differs between a container and a definition, by name; values of variables are not shown."""
    config: Mapping[str, Any] = container.attrs["Config"]
    there = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    found = []
    wanted = service.definition.get("environment") or {}
    if names := sorted(name for name, value in wanted.items() if value is not None and there.get(name) != str(value)):
        found.append(f"environment {' '.join(names)}")
    if (image := service.definition.get("image")) and image != config.get("Image"):
        found.append(f"image {config.get('Image')}, not {image}")
    command = service.definition.get("command")
    if command and [word.replace("$$", "$") for word in command] != (config.get("Cmd") or []):
        found.append("command")
    wanted_labels, labels = service.definition.get("labels") or {}, config.get("Labels") or {}
    if names := sorted(name for name, value in wanted_labels.items() if labels.get(name) != str(value)):
        found.append(f"labels {' '.join(names)}")
    published = {
        f"{each.get('HostPort')}:{port.split('/')[0]}"
        for port, hosts in (container.attrs["HostConfig"].get("PortBindings") or {}).items()
        for each in hosts or ()
    }
    ports = {f"{each.get('published')}:{each.get('target')}" for each in service.definition.get("ports") or ()}
    if published != ports:
        found.append("ports")
    return "; ".join(found) or "something that Docker does not show by name"
