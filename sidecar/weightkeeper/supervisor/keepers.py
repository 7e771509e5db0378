"""Which service's keeper holds the weights of an engine, and whether it can load what the engine asks for. Pure."""

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weightkeeper.options import SOCKET_DIR
from weightkeeper.supervisor import arguments, programs, variables
from weightkeeper.supervisor.programs import Program

POLICY_LABEL = "weightkeeper.weights"
"""On an engine: what to do where old and new weights do not fit beside each other."""

FORMATS = ("weightkeeper", "ipc_cache")
"""Load formats that are served by a keeper."""

Policy = Literal["refuse", "swap"]
"""Keep the old engine; or stop it, release its weights, load the new ones and start it."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """A service that runs a keeper.

    Attributes:
        program: in its container.
        config: the config file that it loads from, seen from here; None where it has none.
        variables: those of its container's environment that may shape weights, as Compose resolves them.
    """

    service: str
    program: Program
    config: Path | None
    variables: Mapping[str, str] = field(default_factory=dict)


def of_engine(definition: Mapping[str, Any], resolved: Mapping[str, Any]) -> Keeper | None:
    """The keeper whose sockets an engine sees."""
    sockets = _source(definition, _socket_dir(definition, None))
    for keeper, other in _keepers(resolved):
        if sockets is not None and sockets == _source(other, _socket_dir(other, keeper.program)):
            return keeper
    return None


def policy(definition: Mapping[str, Any]) -> Policy:
    """As its label says; `refuse` where there is none, or another word on it."""
    return "swap" if (definition.get("labels") or {}).get(POLICY_LABEL) == "swap" else "refuse"


def uses_keeper(values: Mapping[str, Any]) -> bool:
    """Whether an engine with these options takes its weights from a keeper."""
    return values.get("load-format") in FORMATS


def loader_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our own loader's options, as far as they can be read; the engine says what is wrong with them."""
    extra = values.get("model-loader-extra-config")
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            return {}
    return extra if isinstance(extra, Mapping) else {}


def _keepers(resolved: Mapping[str, Any]) -> Iterator[tuple[Keeper, Mapping[str, Any]]]:
    for name, definition in (resolved.get("services") or {}).items():
        program = programs.find(arguments.words(definition), "serve")
        if program is not None:
            shaping = variables.shaping(variables.of_definition(definition))
            yield Keeper(name, program, _config(definition, program, resolved), shaping), definition


def _config(definition: Mapping[str, Any], program: Program, resolved: Mapping[str, Any]) -> Path | None:
    named = program.option("--config") or (definition.get("environment") or {}).get("WEIGHTKEEPER_CONFIG")
    return arguments.place(named, definition, resolved).path if named else None


def _socket_dir(definition: Mapping[str, Any], program: Program | None) -> str:
    given = program.option("--socket-dir") if program else ""
    return given or (definition.get("environment") or {}).get("WEIGHTKEEPER_SOCKET_DIR") or SOCKET_DIR


def _source(definition: Mapping[str, Any], directory: str) -> tuple[str, str] | None:
    """What is mounted at a directory: the same for two services that share it."""
    mounts = {posixpath.normpath(mount["target"]): mount for mount in definition.get("volumes") or ()}
    mount = mounts.get(posixpath.normpath(directory))
    return (mount.get("type", "volume"), str(mount.get("source"))) if mount else None
