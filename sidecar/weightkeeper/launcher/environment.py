"""Files of environment variables, read over the inherited environment at the start and at each reload."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import reading

MAX_BYTES = 1024 * 1024

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN = re.compile(r"[A-Z_][A-Z0-9_. -]{0,63}|[a-z_][a-z0-9_. -]{0,63}")
"""A name with a mistake in it. What mixes upper and lower case may be a token."""


def read(files: Iterable[Path], inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The inherited environment with the variables of `files`, the later file over the earlier.

    Raises:
        ConfigError: a file cannot be read or a line is none of `NAME=VALUE`; with file and line, never with a value.
    """
    environment = dict(os.environ if inherited is None else inherited)
    for file in files:
        environment.update(parse(_text(file), str(file)))
    return environment


def parse(text: str, name: str) -> dict[str, str]:
    """`NAME=VALUE` lines; empty lines and lines with # at their start do not count.

    The value is what follows, without blanks around it and without one pair of quotes around all of it; nothing in it
    is replaced. `name` is used in messages.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.removeprefix("export ").partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not _NAME.fullmatch(key):
            raise ConfigError(f"{name}, line {number}: expected NAME=VALUE{_found(key, value)}")
        if "\0" in value:
            raise ConfigError(f"{name}, line {number}: the value of {key} has a zero byte in it")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        values[key] = value
    return values


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of the variables that differ."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _found(key: str, value: str) -> str:
    """What may be shown of a wrong line: never a value, and a name only where it cannot be the end of a secret."""
    is_name = value.strip("= ") and _SHOWN.fullmatch(key)
    return f", found {key}=…" if is_name else ""


def _text(file: Path) -> str:
    purpose = "--env-file has to name a file of NAME=VALUE lines"
    raw = reading.regular(str(file), MAX_BYTES, purpose, "is this a file of NAME=VALUE lines?")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from error
