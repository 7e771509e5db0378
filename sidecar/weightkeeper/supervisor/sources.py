"""Which files a project is made of, so that they can be watched. Only names are read here, never a value.

Compose does not say which files it read. The nodes of the YAML are walked without building values from them, so
that Compose's own tags (`!override`, `!reset`) and YAML 1.1 readings do not matter.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from weightkeeper.errors import ConfigError
from weightkeeper.supervisor import files
from weightkeeper.supervisor.compose import Compose

MAIN_FILES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
"""What Compose looks for where no file is given, the first one counts. All are watched: any may appear."""

OVERRIDE_FILES = (
    "compose.override.yml", "compose.override.yaml", "docker-compose.override.yml", "docker-compose.override.yaml",
)  # fmt: skip
"""As MAIN_FILES, for the file that Compose reads on top."""

MAX_FILES = 200
"""Watched in one project. A project of a thousand files is more likely an `include` of the wrong thing."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a project.

    Attributes:
        files: every file whose content can change what Compose resolves, there or not.
        notices: what cannot be watched, in words.
    """

    files: frozenset[Path]
    notices: tuple[str, ...]


def find(compose: Compose) -> Sources:
    """The compose files, what they include and extend, and every environment file."""
    environment = _environment(compose)
    mains = compose.files or _named_in(environment[0], compose.directory)
    mains = mains or tuple(compose.directory / name for name in MAIN_FILES + OVERRIDE_FILES)
    found = set(environment)
    notices: list[str] = []
    pending = [(file, compose.directory) for file in mains]
    while pending and len(found) < MAX_FILES:
        file, base = pending.pop(0)
        if file in found:
            continue
        found.add(file)
        for name, is_compose in _names(file):
            if "$" in name:
                notices.append(f"{file}: {name} is not watched, its name has a variable")
                continue
            path = _absolute(base, name)
            if is_compose:
                pending.append((path, path.parent))
            else:
                found.add(path)
    if pending:
        notices.append(f"{compose.directory}: over {MAX_FILES} files take part, the rest is not watched")
    return Sources(frozenset(found), tuple(sorted(set(notices))))


def default_files(compose: Compose) -> tuple[Path, ...]:
    """The compose files that Compose takes where it is given none."""
    if named := _named_in(_environment(compose)[0], compose.directory):
        return named
    found = []
    for names in (MAIN_FILES, OVERRIDE_FILES):
        there = [compose.directory / name for name in names if (compose.directory / name).exists()]
        found += there[:1]
    return tuple(found)


def _environment(compose: Compose) -> tuple[Path, ...]:
    return compose.env_files or (compose.directory / ".env",)


def _named_in(env_file: Path, directory: Path) -> tuple[Path, ...]:
    """The compose files that COMPOSE_FILE in `.env` names."""
    try:
        text = files.read(env_file).decode("utf-8", "replace")
    except ConfigError:
        return ()
    named = re.findall(r"^\s*(?:export\s+)?COMPOSE_FILE\s*=\s*[\"']?([^\"'#\n]*)", text, re.MULTILINE)
    names = [name.strip() for name in (named or [""])[-1].split(":")]
    return tuple(_absolute(directory, name) for name in names if name)


def _names(file: Path) -> Iterator[tuple[str, bool]]:
    """Names of files in one compose file, and whether each is a compose file."""
    try:
        root = yaml.compose(files.read(file), Loader=yaml.SafeLoader)
    except (ConfigError, yaml.YAMLError, RecursionError):
        return  # Compose says what is wrong with it
    for include in _values(root, "include"):
        for item in _items(include):
            for name in _texts(item, "path"):
                yield name, True
            for value in _values(item, "env_file"):
                yield from ((name, False) for name in _texts(value, "path"))
    for services in _values(root, "services"):
        for _, service in services.value if isinstance(services, yaml.MappingNode) else ():
            for extends in _values(service, "extends"):
                for value in _values(extends, "file"):
                    yield from ((name, True) for name in _texts(value, "path"))
            for key in ("env_file", "label_file"):
                for value in _values(service, key):
                    yield from ((name, False) for name in _texts(value, "path"))


def _values(node: yaml.Node | None, key: str) -> Iterator[yaml.Node]:
    """Values of a key in a mapping, those merged into it with `<<` included."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value in node.value:
        if key_node.value == key:
            yield value
        elif key_node.tag == "tag:yaml.org,2002:merge":
            for merged in _items(value):
                yield from _values(merged, key)


def _items(node: yaml.Node) -> list[yaml.Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _texts(node: yaml.Node, key: str) -> Iterator[str]:
    """Names written as a text, a list of them, or mappings that have them under `key`."""
    for item in _items(node):
        if isinstance(item, yaml.ScalarNode):
            yield item.value
        else:
            for value in _values(item, key):
                yield from _texts(value, key)


def _absolute(base: Path, name: str) -> Path:
    return base / Path(name).expanduser()
