"""How much memory this process can still use: the machine's, and every control group's above the process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Bytes. Version 1 control groups say "no limit" with a number near 2**63."""

_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_NAMES = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class Available:
    """Attributes:
    nbytes: that can be used before something has to give.
    bound: what sets the bound, for people.
    """

    nbytes: int
    bound: str


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Available:
    """The smallest of the machine's available memory and what is left under each memory limit.

    Page cache that can be dropped counts as available. Sources: proc(5) MemAvailable, and the kernel's
    documents cgroup-v1/memory and cgroup-v2.
    """
    found = [Available(_mem_available(proc / "meminfo"), "the machine's available memory")]
    for directory, names in _limited_groups(proc / "self/cgroup", groups):
        left = _left(directory, names)
        if left is not None:
            found.append(Available(left, f"the memory limit in {directory / names[0]}"))
    return min(found, key=lambda each: each.nbytes)


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED  # a kernel older than 3.14 does not say


def _limited_groups(cgroup: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Directories of the process's memory groups and all groups above them, with their version's file names."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, _V2_NAMES
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", _V1_NAMES
        else:
            continue
        inside = Path(path.lstrip("/"))
        if ".." in inside.parts:  # a group outside this namespace's root
            inside = Path()
        for part in (inside, *inside.parents):
            yield root / part, names


def _left(directory: Path, names: tuple[str, str, str]) -> int | None:
    """Bytes until the limit of one group; None where it has none or cannot be read."""
    limit_name, usage_name, cache_name = names
    try:
        limit = (directory / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((directory / usage_name).read_text())
        cache = 0
        for line in (directory / "memory.stat").read_text().splitlines():
            if line.split()[0] == cache_name:
                cache = int(line.split()[1])
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + min(cache, used))
