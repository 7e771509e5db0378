"""What a user can say about weightkeeper in vLLM's `--model-loader-extra-config`."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightkeeper.errors import ConfigError

SOCKET_DIR = "/run/weightkeeper"
"""Where the images put the sockets' volume."""


def default_socket_dir() -> str:
    """WEIGHTKEEPER_SOCKET_DIR, or where the images put it."""
    return os.environ.get("WEIGHTKEEPER_SOCKET_DIR", SOCKET_DIR)


def default_name() -> str:
    """WEIGHTKEEPER_ENGINE_NAME, or this host's name (in a container, its id)."""
    return os.environ.get("WEIGHTKEEPER_ENGINE_NAME") or os.uname().nodename


@dataclass(frozen=True, slots=True)
class Options:
    """The keys of the extra config. The first six mean what they mean for vLLM's own `ipc_cache`.

    Attributes:
        socket_path: the engine socket itself, instead of the one for this device in `socket_dir`.
        socket_dir: directory of the keeper's sockets.
        mode: `zero_copy` computes on the keeper's memory, `copy` clones it into the engine's.
        fallback: load from disk when the keeper cannot be used, instead of ending.
        connect_timeout_s: seconds for one connection or short answer.
        state_timeout_s: seconds to wait for a keeper that is still loading.
        is_draft: this is the draft of a speculative pair; vLLM adds it by itself.
        publish: when the keeper does not have these weights, give it what this engine loads from disk.
        release: copy mode: ask the keeper to give its copy back afterwards.
        disk_load_format: vLLM's load format for loading from disk, on both sides.
        disk_extra_config: the extra config of that format.
    """

    socket_path: str | None = None
    socket_dir: str = field(default_factory=default_socket_dir)
    mode: str = "zero_copy"
    fallback: bool = True
    connect_timeout_s: float = 5.0
    state_timeout_s: float = 300.0
    is_draft: bool = False
    publish: bool = False
    release: bool = True
    disk_load_format: str = "auto"
    disk_extra_config: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[str, tuple[type, ...]] = {
    "socket_path": (str, type(None)), "socket_dir": (str,), "mode": (str,), "fallback": (bool,),
    "connect_timeout_s": (int, float), "state_timeout_s": (int, float), "is_draft": (bool,),
    "publish": (bool,), "release": (bool,), "disk_load_format": (str,), "disk_extra_config": (dict,),
}  # fmt: skip


def read(extra_config: Mapping[str, Any] | None) -> Options:
    """Check the extra config whole and return it with its defaults.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one out of range; all of them in one message.
    """
    given = dict(extra_config or {})
    known = [entry.name for entry in dataclasses.fields(Options)]
    faults = [f"unknown key {key!r} (known: {', '.join(known)})" for key in given if key not in known]
    for key, value in given.items():
        types = _TYPES.get(key)
        if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            faults.append(f"{key} is {value!r}, expected a {types[0].__name__}")
    if not faults:
        options = Options(**given)
        if options.mode not in ("zero_copy", "copy"):
            faults.append(f"mode is {options.mode!r}, expected zero_copy or copy")
        for key in ("connect_timeout_s", "state_timeout_s"):
            if not 0 < getattr(options, key) <= 86_400:
                faults.append(f"{key} is {getattr(options, key)!r}, expected seconds between 0 and 86400")
        if options.disk_load_format in ("weightkeeper", "ipc_cache"):
            faults.append(f"disk_load_format is {options.disk_load_format!r}, expected a format that reads a disk")
        if options.is_draft and options.socket_path is not None:
            faults.append("socket_path cannot be combined with a draft model; use socket_dir")
    if faults:
        raise ConfigError(f"--model-loader-extra-config: {'; '.join(faults)}")
    return options
