"""The file that vLLM reads as `--config`, as plain values. It is read here and never rewritten."""

import os
from pathlib import Path
from typing import Any

import yaml

from weightkeeper.errors import ConfigError

MAX_CONFIG_BYTES = 64 * 1024
"""A config file is some hundred bytes; a larger one is a mistake in the path. PyYAML takes a second for this."""

MAX_VALUES = 20_000
"""With each alias and merge key counted as what it stands for: a few lines can stand for billions of values."""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Option name (with dashes) → value, as PyYAML reads it.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, is empty, or names an option twice.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; the engine's options belong in this file") from error
    return parse(raw, str(file))


def parse(raw: bytes, name: str) -> dict[str, Any]:
    """As `read`, for the content of a file; `name` is used in messages."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name}: over {MAX_CONFIG_BYTES} bytes; is this the engine's config file?")
    try:
        values = yaml.load(raw, Loader=_OnceLoader)  # noqa: S506  a SafeLoader underneath
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not readable as YAML: {error}") from error
    if values is None:
        raise ConfigError(f"{name}: empty; vLLM refuses an empty config file, remove --config instead")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected `option: value` lines, found a {type(values).__name__}")
    named: dict[str, Any] = {}
    for key, value in values.items():
        option = str(key).replace("_", "-")
        if option in named:
            raise ConfigError(f"{name}: the option {option} is given twice, with a dash and with an underscore")
        named[option] = value
    return named


def required(values: dict[str, Any], option: str, path: str) -> str:
    """The text of an option that has to be there.

    Raises:
        ConfigError: it is missing or empty.
    """
    value = values.get(option)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: `{option}:` is missing; add it, the sidecar and the engine both read it there")
    return value


class _OnceLoader(yaml.SafeLoader):
    """A SafeLoader that refuses what YAML forbids and PyYAML lets pass: the same key twice in one mapping.

    It also refuses a document that stands for more than MAX_VALUES, before anything is made of it.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"over {MAX_VALUES} values, with each alias counted as what it stands for")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                known = key in seen
            except TypeError:
                break  # SafeLoader says better what an unhashable key is
            if known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for; one that contains itself stands for too many."""
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # until it is known
        below = () if isinstance(node, yaml.ScalarNode) else node.value
        children = (child for each in below for child in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]
