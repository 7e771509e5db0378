"""The hashes of a checkpoint's files, taken beside everything else that a load does."""

import threading
from collections.abc import Callable

from weightkeeper import identity
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.protocol import Receipt


def _nothing(*_: int) -> None:
    pass


class Receipts:
    """A thread that takes the receipts of a checkpoint; it holds up nobody's end.

    Args:
        progress: called with the bytes done and the bytes in all.
        finished: called once after the last byte, not after an error.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        progress: Callable[[int, int], None] = _nothing,
        finished: Callable[[], None] = _nothing,
    ):
        self._checkpoint, self._progress, self._finished = checkpoint, progress, finished
        self._receipts: tuple[Receipt, ...] = ()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._take, name="hashing", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        try:
            self._receipts = identity.take(self._checkpoint, lambda _, done, total: self._progress(done, total))
            self._finished()
        except BaseException as error:
            self._error = error

    def get(self) -> tuple[Receipt, ...]:
        """Wait for the receipts; what went wrong is raised here."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._receipts

    def join(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join()
