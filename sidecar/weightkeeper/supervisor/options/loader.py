"""Keys of our own loader's extra config that leave the weights as they are."""

_WHERE = "where and how the keeper is asked"
_MEMORY = "how the same weights are used"

LOADER_KEYS: dict[str, str] = {
    "socket_path": _WHERE,
    "socket_dir": _WHERE,
    "connect_timeout_s": _WHERE,
    "state_timeout_s": _WHERE,
    "mode": _MEMORY,
    "fallback": _MEMORY,
    "publish": _MEMORY,
    "release": _MEMORY,
}
"""Key → why. The others decide which files are read, and how."""
