"""Whether a disk load fits beside weights that the keeper holds."""

import os

from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.errors import (
    BuildFailedError,
    CheckpointError,
    MismatchError,
    NoRoomError,
    SlotsError,
    StillLoadingError,
    WeightkeeperError,
)
from weightkeeper.memory.available import available

HOLDING = (MismatchError, SlotsError, BuildFailedError, StillLoadingError)
"""Causes after which the keeper goes on holding, or making, its copy."""


def second_copy(cause: WeightkeeperError) -> bool:
    """Whether loading from disk after `cause` puts a second copy of the weights beside the keeper's."""
    return isinstance(cause, HOLDING)


def check(path: str | os.PathLike[str], cause: WeightkeeperError) -> None:
    """Refuse a disk load that would not fit.

    Raises:
        NoRoomError: with what is needed, what is free, and why the keeper's copy is not used.
    """
    try:
        needed = open_checkpoint(path).nbytes
    except CheckpointError:
        return  # vLLM's own loader says what it thinks of the files
    room = available()
    if needed > room.nbytes:
        raise NoRoomError(
            f"loading {path} from disk needs {needed} bytes beside the keeper's copy, {room.nbytes} are free "
            f"({room.bound}); "
            f"the keeper's copy is not used because of code={cause.code}: {cause}; "
            "`make load` replaces what it holds"
        ) from cause
