"""The loaders of ranks 1, 2, … beside rank 0's: one process each, all ended together."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from weightkeeper.errors import LoadFailedError

WAIT_SECONDS = 600.0
"""For the other ranks to publish once rank 0 has; they load the same files at the same time."""


class Ranks:
    """Starts the other ranks with `with`, and ends them there if they still run.

    Args:
        command: argument list of a loader; `--rank R` is added.
        world_size: number of ranks, rank 0 included.
        channel: descriptor that they inherit.
        scratch: directory in which a rank leaves the cause of its failure.
        failed: called with the cause, from a thread, when a rank fails: rank 0 may be waiting for it in a collective.
    """

    def __init__(
        self, command: Sequence[str], world_size: int, channel: int, scratch: Path, failed: Callable[[str], None]
    ):
        self._command = list(command)
        self._numbers = range(1, world_size)
        self._channel = channel
        self._scratch = scratch
        self._failed = failed
        self._processes: dict[int, subprocess.Popen] = {}
        self._watchers: list[threading.Thread] = []
        self._is_over = False

    def __enter__(self) -> "Ranks":
        for rank in self._numbers:
            self._processes[rank] = subprocess.Popen(
                [*self._command, "--rank", str(rank)], pass_fds=[self._channel], stdin=subprocess.DEVNULL
            )
            watcher = threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True)
            self._watchers.append(watcher)
            watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for process in self._processes.values():
            process.kill()
            process.wait()

    def wait(self) -> None:
        """Return when every other rank has ended well.

        Raises:
            LoadFailedError: one takes longer than WAIT_SECONDS.
        """
        for rank, process in self._processes.items():
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise LoadFailedError(f"rank {rank} had not published {WAIT_SECONDS:g} s after rank 0") from error
        for watcher in self._watchers:
            watcher.join()

    def _watch(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if code != 0 and not self._is_over:
            self._failed(f"rank {rank}: {cause_of(self._scratch, rank) or f'its loader ended with status {code}'}")


def leave_cause(scratch: Path, rank: int, text: str) -> None:
    """In a rank's own process: say why it fails."""
    (scratch / f"rank-{rank}").write_text(text)


def cause_of(scratch: Path, rank: int) -> str:
    """What a rank left, or nothing."""
    file = scratch / f"rank-{rank}"
    return file.read_text() if file.exists() else ""


def command_of(config: str, channel: int, scratch: Path) -> list[str]:
    """Argument list of a rank's loader, without its number."""
    command = [sys.executable, "-m", "weightkeeper.loader", "--config", config]
    return [*command, "--channel", str(channel), "--scratch", os.fspath(scratch)]
