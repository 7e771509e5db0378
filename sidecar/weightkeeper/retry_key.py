"""Whether a failed load could end differently now: a key that costs a read of the config file and one stat a file."""

import os

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError

MAX_FILES = 10_000
"""Files of a model directory that take part; a checkpoint has some hundred."""

Key = tuple[bytes | str, tuple[tuple[str, int, int, int, int], ...]]
"""Content of the config file, or why it cannot be read; and name, size, mtime, ctime and inode of the model's files."""


def key_of(config: str) -> Key:
    """Two keys differ where the config file or a file of the model that it names has changed between them."""
    try:
        with open(config, "rb") as stream:
            raw = stream.read(engine_config.MAX_CONFIG_BYTES)
    except OSError as error:
        return str(error), ()
    try:
        model = engine_config.parse(raw, config).get("model")
    except ConfigError:
        model = None
    is_path = isinstance(model, str) and "\0" not in model
    return raw, tuple(_files(model)) if is_path else ()


def _files(model: str) -> list[tuple[str, int, int, int, int]]:
    """A model's name that is no path has no files here."""
    paths = [model]
    for directory, subdirectories, names in os.walk(model):
        subdirectories.sort()
        paths += [os.path.join(directory, name) for name in sorted(names)]
        if len(paths) > MAX_FILES:
            break
    found = []
    for path in paths[:MAX_FILES]:
        try:
            state = os.stat(path)
        except OSError as error:
            found.append((f"{path}: {error}", 0, 0, 0, 0))
        else:
            found.append((path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return found
