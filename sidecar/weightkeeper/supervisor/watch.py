"""Tells when the content of watched files has changed and come to rest.

Directories are watched, never files: a save by rename, a swapped link and a file that comes back are all changes of
names in a directory. An event only wakes; what counts is the content before and after. Where no events arrive, a
periodic look bounds the delay.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import watchfiles

from weightkeeper.supervisor import files
from weightkeeper.supervisor.place import single_mounts
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)
logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts every event of the directory at INFO

SAMPLES = 5
"""Looks at the content in one settle time."""

TICK_MS = 250
"""How often a watch without events returns, to see whether a look is due."""

GROUP_MS = 200
"""Longest that a storm of events in a directory is gathered before we look."""


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds.

    Attributes:
        settle: the content has to rest that long.
        bound: after which a content that never rests is taken as it is.
        check: between looks where no event arrives.
        poll: between looks where events are not used at all, or a file is a mount point of its own.
        is_polling: never use events.
    """

    settle: float = 0.5
    bound: float = 5.0
    check: float = 5.0
    poll: float = 0.5
    is_polling: bool = False


class Watch:
    """The files that take part, and what they held when their last change was told.

    Args:
        is_wanted: asked at looks that find no change; where it is so, a change of no file is told.
    """

    def __init__(self, timing: Timing, stop: Stop, is_wanted: Callable[[], bool] = lambda: False) -> None:
        self._timing = timing
        self._stop = stop
        self._is_wanted = is_wanted
        self._known: dict[Path, str] = {}
        self._is_polling = timing.is_polling
        self._check_seconds = timing.check

    @property
    def files(self) -> frozenset[Path]:
        return frozenset(self._known)

    def take_part(self, paths: Iterable[Path]) -> None:
        """Watch exactly these from now on. A new one counts as known with the content of this moment."""
        self._known = {path: self._known.get(path) or files.digest(path) for path in paths}
        self._check_seconds = self._timing.poll if single_mounts(self._known) else self._timing.check

    def digest(self, paths: Iterable[Path]) -> tuple[str | None, ...]:
        """What these held when their last change was told."""
        return tuple(self._known.get(path) for path in paths)

    def has_changed(self) -> bool:
        """Whether a change waits to be told."""
        return self._look() != self._known

    def changes(self) -> Iterator[frozenset[Path]]:
        """Yield the files whose content changed, after each change that came to rest, until told to stop."""
        while not self._stop.is_set():
            directories = self._directories()
            with closing(self._wakes(list(directories))) as wakes:
                for _ in wakes:
                    if self.has_changed() and (changed := self.settle()):
                        yield changed
                    elif self._is_wanted():
                        yield frozenset()
                    if self._directories() != directories:
                        break  # a file takes part that did not, a link leads elsewhere, a directory came back

    def settle(self) -> frozenset[Path]:
        """Wait for the content to rest, take it as known, and return the files that differ from before."""
        began = rested_since = time.monotonic()
        seen = self._look()
        while not self._stop.wait(self._timing.settle / SAMPLES):
            now = time.monotonic()
            if (current := self._look()) != seen:
                seen, rested_since = current, now
            elif now - rested_since >= self._timing.settle:
                break
            if now - began >= self._timing.bound:
                log.warning("files never come to rest, taken as they are after %.1f s", now - began)
                break
        changed = frozenset(path for path, content in seen.items() if content != self._known.get(path))
        self._known = seen
        return changed

    def _wakes(self, directories: list[Path]) -> Iterator[None]:
        """Yield when it is time to look at the content; once soon after the start, for what happened before it."""
        due = 0.0
        if not self._is_polling:
            try:
                for events in watchfiles.watch(
                    *directories, watch_filter=None, recursive=False, debounce=GROUP_MS, step=50,
                    rust_timeout=TICK_MS, yield_on_timeout=True, stop_event=self._stop, force_polling=False,
                ):  # fmt: skip
                    if events or time.monotonic() >= due:
                        yield
                        due = time.monotonic() + self._check_seconds
            except FileNotFoundError:
                self._stop.wait(self._timing.poll)  # a directory went away meanwhile
            except (OSError, RuntimeError) as error:  # the latter is what watchfiles makes of "too many open files"
                self._is_polling = True
                log.warning(
                    "no file events (%s), the content is looked at every %.1f s instead; raise"
                    " fs.inotify.max_user_watches or max_user_instances",
                    error, self._timing.poll,
                )  # fmt: skip
            return
        while not self._stop.wait(self._timing.poll):
            yield

    def _look(self) -> dict[Path, str]:
        return {path: files.digest(path) for path in self._known}

    def _directories(self) -> dict[Path, tuple[int, int]]:
        """The directories to watch, each with its device and inode: one that was made anew needs a new watch."""
        found: dict[Path, tuple[int, int]] = {}
        for directory in frozenset().union(*map(files.directories, self._known)):
            try:
                status = directory.stat()
            except OSError:
                continue
            found[directory] = status.st_dev, status.st_ino
        return found
