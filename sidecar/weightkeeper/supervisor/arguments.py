"""Where the files lie that an engine reads: named in its command as the container sees them, translated to here."""

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHELLS = ("sh", "bash", "dash", "ash")


@dataclass(frozen=True, slots=True)
class Named:
    """A config file in a command.

    Attributes:
        path: as the container sees it.
        is_read: False for the spelling `--config=FILE`, which vLLM accepts and does not read.
    """

    path: str
    is_read: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A container's path, seen from here.

    Attributes:
        path: None where it cannot be seen; `reason` says why.
        is_single: the mount is this file alone, not its directory.
    """

    path: Path | None
    reason: str = ""
    is_single: bool = False


def words(definition: Mapping[str, Any]) -> list[str]:
    """Entrypoint and command of a resolved service as arguments; the text of `sh -c` is split as sh does."""
    given = [*(definition.get("entrypoint") or ()), *(definition.get("command") or ())]
    found: list[str] = []
    for word in (word.replace("$$", "$") for word in given):
        # `bash -c TEXT`, `sh -ec TEXT`, `bash -e -c TEXT`
        is_script = bool(found) and re.fullmatch(r"-[a-z]*c", found[-1]) is not None
        if is_script and any(posixpath.basename(earlier) in SHELLS for earlier in found[:-1]):
            found += _script(word)
        else:
            found.append(word)
    return found


def config(arguments: Sequence[str]) -> Named | None:
    """The vLLM config file named in a command, in either spelling; where both are there, the one that vLLM reads."""
    for position, word in enumerate(arguments[:-1]):
        if word == "--config":
            return Named(arguments[position + 1], is_read=True)
    for word in arguments:
        if word.startswith("--config=") and len(word) > len("--config="):
            return Named(word.removeprefix("--config="), is_read=False)
    return None


def place(path: str, definition: Mapping[str, Any], project: Mapping[str, Any]) -> Place:
    """Translate a container's path through the service's bind mounts and its `configs:` and `secrets:`.

    Args:
        path: as the container sees it.
        definition: of the service, as Compose resolves it.
        project: the whole resolved project.
    """
    if "$" in path:
        return Place(None, f"{path}: only the container knows this name; write it without a variable")
    inside = posixpath.normpath(posixpath.join(definition.get("working_dir") or "", path))
    if not inside.startswith("/"):
        return Place(None, f"{path}: no absolute path; write it as the container sees it, from /")
    mounts = [*_mounts(definition), *_files(definition, project)]
    covering = [mount for mount in mounts if f"{inside}/".startswith(f"{mount[0].rstrip('/')}/")]
    if not covering:
        return Place(None, f"{inside}: part of the image, it never changes; mount a directory to edit it")
    target, source, kind = max(covering, key=lambda mount: len(mount[0]))
    if source is None:
        return Place(None, f"{inside}: in a {kind}, out of our sight; bind-mount a directory of the project")
    relative = posixpath.relpath(inside, target)
    return Place(Path(source) if relative == "." else Path(source) / relative, is_single=relative == ".")


def seen(path: str, definition: Mapping[str, Any], project: Mapping[str, Any], whose: str) -> tuple[Path | None, str]:
    """As `place`, with what a person should know about watching it; "" where there is nothing.

    Args:
        whose: the service and what the file is to it, as in "engine: its config file".
    """
    found = place(path, definition, project)
    if found.path is None:
        return None, f"{whose} is not watched: {found.reason}"
    if found.is_single:
        return found.path, (
            f"{whose.partition(':')[0]} mounts the single file {found.path}: after a save by rename it sees the old one"
            " until it is restarted; mount the directory"
        )
    return found.path, ""


def _mounts(definition: Mapping[str, Any]) -> list[tuple[str, str | None, str]]:
    """(target, source or None, kind) of each of a service's volumes."""
    found: list[tuple[str, str | None, str]] = []
    for mount in definition.get("volumes") or ():
        kind = mount.get("type", "volume")
        source = mount.get("source") if kind == "bind" else None
        found.append((posixpath.normpath(mount["target"]), source, kind))
    for target in definition.get("tmpfs") or ():
        found.append((posixpath.normpath(target.split(":")[0]), None, "tmpfs"))
    return found


def _files(definition: Mapping[str, Any], project: Mapping[str, Any]) -> list[tuple[str, str | None, str]]:
    """As `_mounts`, for `configs:` and `secrets:`; each is a file of its own."""
    found: list[tuple[str, str | None, str]] = []
    for section, parent in (("configs", "/"), ("secrets", "/run/secrets")):
        for entry in definition.get(section) or ():
            target = posixpath.join(parent, entry.get("target") or entry["source"])
            source = ((project.get(section) or {}).get(entry["source"]) or {}).get("file")
            found.append((posixpath.normpath(target), source, section.removesuffix("s")))
    return found


def _script(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return [text]
