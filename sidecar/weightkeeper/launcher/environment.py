"""Files of environment variables, read over the inherited environment at the start and at each reload."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightkeeper.errors import ConfigError

MAX_BYTES = 1024 * 1024

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read(files: Iterable[Path], inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The inherited environment with the variables of `files`, the later file over the earlier.

    Raises:
        ConfigError: a file cannot be read or a line is none of `NAME=VALUE`; with file and line.
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
            raise ConfigError(f"{name}, line {number}: expected NAME=VALUE, found {line!r:.80}")
        if "\0" in value:
            raise ConfigError(f"{name}, line {number}: the value of {key} has a zero byte in it")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        values[key] = value
    return values


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of the variables that differ."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{file}: over {MAX_BYTES} bytes; is this a file of NAME=VALUE lines?")
        return raw.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; --env-file has to name a file of NAME=VALUE lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from error
