"""The launcher's environment files, parsed as the launcher does, and what a change of a variable asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightkeeper.errors import ConfigError
from weightkeeper.harmless import HARMLESS
from weightkeeper.launcher import environment
from weightkeeper.supervisor import files
from weightkeeper.supervisor.options import Effect

FINGERPRINTED = "VLLM_"
"""How the variables begin that are part of the fingerprint, but for those of HARMLESS."""


@dataclass(frozen=True, slots=True)
class EnvFile:
    """A file that is given to the launcher with `--env-file`.

    Attributes:
        path: where it lies, seen from here.
        values: variable → value; None while the file cannot be used.
        fault: why it cannot be used, in one line and without a value; empty otherwise.
        text: what it holds, as far as it could be read.
    """

    path: Path
    values: Mapping[str, str] | None
    fault: str = ""
    text: bytes = field(default=b"", compare=False, repr=False)


def read(path: Path, source: Path | None = None) -> EnvFile:
    """The file at `path`, with the content of `source` where that is given."""
    try:
        text = files.read(source or path)
    except ConfigError as error:
        return EnvFile(path, None, str(error))
    return parse(path, text, source)


def parse(path: Path, text: bytes, source: Path | None = None) -> EnvFile:
    """A file that holds this text, which was read from `source` where that is given."""
    named = source or path
    if len(text) > environment.MAX_BYTES:
        return EnvFile(path, None, f"{named}: over {environment.MAX_BYTES} bytes; the launcher does not read it", text)
    try:
        return EnvFile(path, environment.parse(text.decode(), str(named)), text=text)
    except UnicodeDecodeError as error:
        return EnvFile(path, None, f"{named}: not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8", text)
    except ConfigError as error:
        return EnvFile(path, None, str(error), text)


def merged(env_files: Iterable[EnvFile]) -> dict[str, str]:
    """The variables of all files that can be used, the later file over the earlier."""
    found: dict[str, str] = {}
    for file in env_files:
        found.update(file.values or {})
    return found


def of_definition(definition: Mapping[str, Any]) -> dict[str, str]:
    """The variables that a resolved service gives its container; Compose writes `$$` there for `$`."""
    given = definition.get("environment") or {}
    return {name: str(value).replace("$$", "$") for name, value in given.items() if value is not None}


def effect(name: str) -> Effect:
    """What a change of a variable asks for. Those that may shape weights are part of the fingerprint."""
    if name in HARMLESS:
        return Effect("reload", HARMLESS[name])
    if name.startswith(FINGERPRINTED):
        return Effect("weights", "is none of vLLM's variables that are known to leave the weights alone")
    return Effect("reload", "is no variable of vLLM's, and reaches no weight")


def shaping(given: Mapping[str, str]) -> dict[str, str]:
    """Those of some variables that may shape weights."""
    return {name: value for name, value in given.items() if effect(name).kind == "weights"}
