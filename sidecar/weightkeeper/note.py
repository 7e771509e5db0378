"""What a keeper leaves in its socket directory for the one after it: what engines compute on, and what it was made of.

The file is there while engines map what is offered, and stays when the keeper ends before they do. It holds digests,
never values: options of a config file may be secrets.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec
from blake3 import blake3

logger = logging.getLogger(__name__)

NAME = "engines.json"
MAX_BYTES = 1 << 20
"""Some hundred bytes for each device, option and engine."""


class Note(msgspec.Struct, frozen=True):
    """One generation that was offered.

    Attributes:
        parts: device → hex digest of the fingerprint of what was held there.
        options: those of the config file that shape weights, as they were when these were made: name → hex digest.
        engines: names of those that compute on it, for people.
        released: somebody forced the release of it, so nothing is to be adopted; the rest is empty then.
    """

    parts: dict[str, str]
    options: dict[str, str]
    engines: tuple[str, ...]
    released: bool = False


def digests(options: Mapping[str, Any]) -> dict[str, str]:
    """Option → hex digest of its value, as two keepers can compare them."""
    return {name: blake3(repr(value).encode(errors="replace")).hexdigest() for name, value in options.items()}


def read(directory: str) -> Note | None:
    """What a keeper before left; None where there is nothing that can be believed."""
    path = os.path.join(directory, NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: not read: %s", path, error.strerror)
        return None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
            logger.warning("%s: not read: it is no file that only we can write", path)
            return None
        return msgspec.json.decode(os.read(descriptor, MAX_BYTES), type=Note)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        logger.warning("%s: not read: %s", path, error)
        return None
    finally:
        os.close(descriptor)


def write(directory: str, note: Note | None) -> str:
    """Leave this, whole or not at all; with None, leave nothing. Returns why that failed, on a full disk say, or ""."""
    path = os.path.join(directory, NAME)
    try:
        if note is None:
            _remove(path)
            return ""
        unborn = f"{path}.new"
        _remove(unborn)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(unborn, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(note))
        os.rename(unborn, path)
    except (OSError, ValueError) as error:
        return f"{path}: not written, so a keeper after this one may not know of engines: {error}"
    return ""


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
