"""A compose project at one moment, as plain values that can be compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError
from weightkeeper.supervisor import arguments, files
from weightkeeper.supervisor.compose import Compose

LABEL = "weightkeeper.supervise"
"""A service whose label has the value `true` is an engine; nothing else is ever acted upon."""

SHARED = ("networks", "volumes")
"""Sections beside `services:` that several services use; a change in them is never applied here."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """An engine's vLLM config file.

    Attributes:
        path: where it lies, seen from here.
        values: option → value; None while the file cannot be used.
        fault: why it cannot be used, in one line; empty otherwise.
    """

    path: Path
    values: Mapping[str, Any] | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """One service of the project.

    Attributes:
        definition: what Compose resolves for it, with the `configs:` and `secrets:` that it uses.
        is_engine: carries LABEL.
        config: an engine's vLLM config file; None where its command has none that can be seen from here.
    """

    name: str
    definition: Mapping[str, Any]
    is_engine: bool = False
    config: ConfigFile | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole project.

    Attributes:
        services: by name, in Compose's order.
        shared: the sections of SHARED.
        notices: what a person should know about it: Compose's warnings, files that cannot be watched.
    """

    name: str
    services: Mapping[str, Service]
    shared: Mapping[str, Any]
    notices: tuple[str, ...] = ()

    @property
    def engines(self) -> list[Service]:
        return [service for service in self.services.values() if service.is_engine]

    @property
    def config_files(self) -> frozenset[Path]:
        return frozenset(service.config.path for service in self.engines if service.config)


def read(compose: Compose) -> Snapshot:
    """Resolve the project and read the config files of its engines.

    Raises:
        ComposeError: Compose refuses the project. A config file that cannot be used is only its service's fault.
    """
    resolved, warnings = compose.config()
    return snapshot(resolved, warnings)


def snapshot(resolved: Mapping[str, Any], warnings: tuple[str, ...] = ()) -> Snapshot:
    """As `read`, for a project that is resolved already."""
    services: dict[str, Service] = {}
    notices = list(warnings)
    for name, given in (resolved.get("services") or {}).items():
        definition = dict(given)
        for section in ("configs", "secrets"):
            if used := definition.get(section):
                shared = resolved.get(section) or {}
                definition[section] = [[entry, shared.get(entry["source"])] for entry in used]
        if str((definition.get("labels") or {}).get(LABEL, "")).lower() == "true":
            config, more = _config(name, given, resolved)
            notices += more
            services[name] = Service(name, definition, True, config)
        else:
            services[name] = Service(name, definition)
    shared = {section: resolved.get(section) or {} for section in SHARED}
    return Snapshot(resolved["name"], services, shared, tuple(dict.fromkeys(notices)))


def _config(
    name: str, definition: Mapping[str, Any], resolved: Mapping[str, Any]
) -> tuple[ConfigFile | None, list[str]]:
    named = arguments.config(arguments.words(definition))
    if named is None:
        return None, [f"{name} has no `--config FILE` in its command; only its compose definition is watched"]
    notices = []
    if not named.is_read:
        notices.append(f"{name}: vLLM ignores `--config={named.path}`; write two arguments, `--config {named.path}`")
    place = arguments.place(named.path, definition, resolved)
    if place.path is None:
        return None, [*notices, f"{name}: its config file is not watched: {place.reason}"]
    if place.is_single:
        notices.append(
            f"{name} mounts the single file {place.path}: after a save by rename it sees the old one until it is"
            " restarted; mount the directory"
        )
    return _read_config(place.path), notices


def _read_config(path: Path) -> ConfigFile:
    try:
        return ConfigFile(path, engine_config.parse(files.read(path), str(path)))
    except ConfigError as error:
        return ConfigFile(path, None, one_line(str(error)))
    except (ValueError, RecursionError) as error:  # a date like 2026-13-01; a thousand brackets
        return ConfigFile(path, None, one_line(f"{path}: not readable as YAML: {error}"))


def one_line(text: str) -> str:
    """Text for one log line."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
