"""A model's files and the page cache: how fast they are read from either, and putting them out of it."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

CHUNK_BYTES = 16 * 1024 * 1024
SPEED_BYTES = 2_000_000_000
"""Read at most for one speed."""

TRIES = 10
PAUSE_SECONDS = 0.02
"""Between tries: pages stay for a moment after they were written or read."""

_LOOKS = 64


def drop(files: Sequence[Path]) -> float | None:
    """Put files out of the page cache; needs no privilege, but pages that a process has mapped stay.

    Returns:
        The share of them that is still there, or None where the file system does not tell.
    """
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE_SECONDS)
        for file in files:
            with file.open("rb") as stream:
                os.fdatasync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not (left := cached_share(files)):
            break
    return left


def cached_share(files: Sequence[Path]) -> float | None:
    """Of pages looked at here and there, those that can be read without waiting for the disk."""
    there = looked = 0
    buffer = bytearray(1)
    for file in files:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            for number in range(_LOOKS if size else 0):
                try:
                    os.preadv(stream.fileno(), [buffer], size * number // _LOOKS, os.RWF_NOWAIT)
                    there += 1
                except BlockingIOError:
                    pass
                except OSError:
                    return None
                looked += 1
    return there / looked if looked else None


def speeds(files: Sequence[Path]) -> tuple[float | None, float | None]:
    """Bytes a second from the disk and from the page cache; None for a disk past which the cache cannot be put."""
    left = drop(files)
    disk = _read(files)
    return disk if left is not None and left < 0.05 else None, _read(files)


def _read(files: Sequence[Path]) -> float | None:
    done = 0
    buffer = bytearray(CHUNK_BYTES)
    begun = time.monotonic()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while done < SPEED_BYTES and (count := stream.readinto(buffer)):
                done += count
    seconds = time.monotonic() - begun
    return round(done / seconds) if done and seconds else None
