"""The KV cache's size that a good start measured, kept in a file for the next start of exactly the same.

The file's name is a digest of everything that the size depends on. While a start uses it, a marker lies beside it; a
marker that is still there at the next start means that the one before did not come up, and the size is forgotten.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weightkeeper import fingerprint

SCHEMA = 1
MAX_BYTES = 1 << 20
"""Of a file. One has some 5 kB."""

MAX_FILES = 100
"""Sizes that are kept; a new one removes the oldest."""

SLACK_BYTES = 64 << 20
"""How much less memory may be free than when it was measured. The size follows from what the engine may use, which is
part of the key, and not from what is free; so this only tells another tenant from the noise of a driver's contexts."""


class Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a file.

    Attributes:
        fields: what the size depends on; name → value.
        kv_cache_bytes: that this rank's KV cache may have.
        free_bytes: of the GPU, before the model was loaded.
    """

    schema: int
    fields: dict[str, str]
    kv_cache_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is known; `nbytes` is 0 where nothing can be used, and `why` says the cause."""

    nbytes: int
    why: str = ""


class KvSize:
    """The file of one rank's size.

    Args:
        directory: of all such files; made when one is written.
        fields: everything that the size depends on.
        free: bytes of the GPU that are free now, measured as in every other start.
    """

    def __init__(self, directory: Path, fields: Mapping[str, str], free: int):
        self._fields = dict(fields)
        self._free = free
        self.path = directory / f"{fingerprint.digest(fields)[:32]}.json"
        self._marker = self.path.with_suffix(".starting")

    def recall(self) -> Recalled:
        """The size of the last good start, if it can be used now."""
        if self._marker.exists():
            self.forget()
            return Recalled(0, "the last start with it did not come up")
        try:
            with open(self.path, "rb") as stream:
                found = msgspec.json.decode(stream.read(MAX_BYTES), type=Remembered)
        except FileNotFoundError:
            return Recalled(0, "no good start of this configuration is known")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            return Recalled(0, f"{self.path} cannot be read ({error})")
        if found.schema != SCHEMA or found.fields != self._fields or found.kv_cache_bytes <= 0:
            return Recalled(0, f"{self.path} is of another kind")
        if self._free < found.free_bytes - SLACK_BYTES:
            return Recalled(0, f"{self._free} bytes of the GPU are free, {found.free_bytes} were when it was measured")
        return Recalled(found.kv_cache_bytes)

    def begin(self) -> None:
        """A start with the recalled size begins.

        Raises:
            OSError: nothing can be written here; the size must not be used then.
        """
        self._marker.touch(mode=0o600)

    def good(self) -> None:
        """The start has come up."""
        self._marker.unlink(missing_ok=True)

    def keep(self, kv_cache_bytes: int) -> None:
        """Remember what this start has measured, now that it has come up.

        Raises:
            OSError: it cannot be written.
        """
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.path.with_suffix(f".{os.getpid()}.new")
        content = Remembered(SCHEMA, self._fields, kv_cache_bytes, self._free)
        try:
            new.write_bytes(msgspec.json.encode(content))
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)
        self.good()
        self._prune()

    def forget(self) -> None:
        """Let the next start measure again. The file goes first: a marker alone is harmless."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self._marker.unlink(missing_ok=True)

    def _prune(self) -> None:
        with contextlib.suppress(OSError):  # another engine may be doing the same
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-MAX_FILES]:
                file.unlink(missing_ok=True)
