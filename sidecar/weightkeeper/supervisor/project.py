"""A compose project at one moment, as plain values that can be compared."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError
from weightkeeper.quantities import one_line
from weightkeeper.supervisor import arguments, files, keepers, programs, variables
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.keepers import Keeper
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.variables import EnvFile

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
        text: what it holds, as far as it could be read.
    """

    path: Path
    values: Mapping[str, Any] | None
    fault: str = ""
    text: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class Service:
    """One service of the project.

    Attributes:
        definition: what Compose resolves for it, with the `configs:` and `secrets:` that it uses.
        is_engine: carries LABEL.
        config: an engine's vLLM config file; None where its command has none that can be seen from here.
        launcher: our launcher in an engine's container; None where it runs something else.
        keeper: that an engine can take its weights from.
        hash: Compose's own of the definition, as it is on a container's label; "" where it is not known.
        env_files: what an engine's launcher reads its environment from, a later one over an earlier one.
    """

    name: str
    definition: Mapping[str, Any]
    is_engine: bool = False
    config: ConfigFile | None = None
    launcher: Program | None = None
    keeper: Keeper | None = None
    hash: str = ""
    env_files: tuple[EnvFile, ...] = ()

    @property
    def files(self) -> tuple[ConfigFile | EnvFile, ...]:
        """Every file that the engine reads itself and that can be seen from here."""
        return (*((self.config,) if self.config else ()), *self.env_files)

    @property
    def fault(self) -> str:
        """Why a file that the engine reads cannot be used, in one line; "" where all can."""
        return "; ".join(file.fault for file in self.files if file.fault)

    @property
    def key(self) -> str:
        """Equal for two moments in which the definition, and the text of the files that it reads, are the same."""
        texts = [file.text + file.fault.encode() for file in (self.config, *self.env_files) if file] or [b""]
        definition = msgspec.json.encode(self.definition, order="deterministic")
        return hashlib.sha256(b"\0".join([definition, *texts])).hexdigest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole project.

    Attributes:
        services: by name, in Compose's order.
        shared: the sections of SHARED.
        notices: what a person should know about it: Compose's warnings, files that cannot be watched.
        resolved: the project as Compose gave it; Compose takes it back as a file.
    """

    name: str
    services: Mapping[str, Service]
    shared: Mapping[str, Any]
    notices: tuple[str, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def engines(self) -> list[Service]:
        return [service for service in self.services.values() if service.is_engine]

    @property
    def config_files(self) -> frozenset[Path]:
        """Every file that an engine reads itself."""
        return frozenset(file.path for service in self.engines for file in service.files)


def read(compose: Compose) -> Snapshot:
    """Resolve the project and read the files of its engines.

    Raises:
        ComposeError: Compose refuses the project. A file of an engine that cannot be used is only its service's fault.
    """
    resolved, warnings = compose.config()
    return snapshot(resolved, warnings, compose.hashes(resolved))


def snapshot(
    resolved: Mapping[str, Any], warnings: tuple[str, ...] = (), hashes: Mapping[str, str] | None = None
) -> Snapshot:
    """As `read`, for a project that is resolved already; `hashes` are service → Compose's hash."""
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
            env_files, others = _env_files(name, given, resolved)
            notices += more + others
            services[name] = Service(
                name, definition, True, config,
                launcher=_launcher(given),
                keeper=keepers.of_engine(given, resolved),
                hash=(hashes or {}).get(name, ""),
                env_files=env_files,
            )  # fmt: skip
        else:
            services[name] = Service(name, definition, hash=(hashes or {}).get(name, ""))
    shared = {section: resolved.get(section) or {} for section in SHARED}
    return Snapshot(resolved["name"], services, shared, tuple(dict.fromkeys(notices)), resolved)


def _launcher(definition: Mapping[str, Any]) -> Program | None:
    program = programs.find(arguments.words(definition), "engine")
    return None if program and program.has("--no-control") else program


def _config(
    name: str, definition: Mapping[str, Any], resolved: Mapping[str, Any]
) -> tuple[ConfigFile | None, list[str]]:
    named = arguments.config(arguments.words(definition))
    if named is None:
        return None, [
            f"{name} has no `--config FILE` in its command; its options are watched in its compose definition only"
        ]
    notices = []
    if not named.is_read:
        notices.append(f"{name}: vLLM ignores `--config={named.path}`; write two arguments, `--config {named.path}`")
    path, notice = arguments.seen(named.path, definition, resolved, f"{name}: its config file")
    notices += [notice] if notice else []
    return (read_config(path) if path else None), notices


def _env_files(
    name: str, definition: Mapping[str, Any], resolved: Mapping[str, Any]
) -> tuple[tuple[EnvFile, ...], list[str]]:
    program = programs.find(arguments.words(definition), "engine")
    found, notices = [], []
    for given in program.every("--env-file") if program else ():
        path, notice = arguments.seen(given, definition, resolved, f"{name}: its env file")
        notices += [notice] if notice else []
        found += [variables.read(path)] if path else []
    return tuple(found), notices


def read_config(path: Path, source: Path | None = None) -> ConfigFile:
    """The config file at `path`, with the content of `source` where that is given."""
    try:
        text = files.read(source or path)
    except ConfigError as error:
        return ConfigFile(path, None, one_line(str(error)))
    return parse_config(path, text, source)


def parse_config(path: Path, text: bytes, source: Path | None = None) -> ConfigFile:
    """A config file that holds this text, which was read from `source` where that is given."""
    named = source or path
    try:
        return ConfigFile(path, engine_config.parse(text, str(named)), text=text)
    except ConfigError as error:
        return ConfigFile(path, None, one_line(str(error)), text)
    except (ValueError, RecursionError) as error:  # a date like 2026-13-01; a thousand brackets
        return ConfigFile(path, None, one_line(f"{named}: not readable as YAML: {error}"), text)
