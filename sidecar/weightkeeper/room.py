"""Whether what an engine wants fits beside weights that the keeper holds."""

import math
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
from weightkeeper.memory.available import Available, available

HOLDING = (MismatchError, SlotsError, BuildFailedError, StillLoadingError)
"""Causes after which the keeper goes on holding, or making, its copy."""


def second_copy(cause: WeightkeeperError) -> bool:
    """Whether loading from disk after `cause` puts a second copy of the weights beside the keeper's."""
    return isinstance(cause, HOLDING)


def check(path: str | os.PathLike[str], cause: WeightkeeperError, on_device: int | None = None) -> None:
    """Refuse a disk load that would not fit.

    Args:
        on_device: bytes free on the GPU that the weights would go to; None where they go to host memory.

    Raises:
        NoRoomError: with what is needed, what is free, and why the keeper's copy is not used.
    """
    try:
        needed = open_checkpoint(path).nbytes
    except CheckpointError:
        return  # vLLM's own loader says what it thinks of the files
    room = available() if on_device is None else Available(on_device, "on the GPU")
    if needed > room.nbytes:
        raise NoRoomError(
            f"loading {path} from disk needs {needed} bytes beside the keeper's copy, {room.nbytes} are free "
            f"({room.bound}); "
            f"the keeper's copy is not used because of code={cause.code}: {cause}; "
            "`make load` replaces what it holds"
        ) from cause


def requested(total: int, free: int, utilization: float, held: int, mode: str, device: str) -> int:
    """Bytes that the engine may use itself.

    Args:
        total: of the device.
        free: now, with the keeper's copy in it.
        utilization: the user's `--gpu-memory-utilization`.
        held: by the keeper on this device.
        mode: `zero_copy` uses the held bytes, `copy` releases them once they are copied.

    Raises:
        NoRoomError: it does not fit; with the total, what the keeper holds and what others hold.
    """
    wanted = math.ceil(total * utilization)
    allowed = wanted - held if mode == "zero_copy" else wanted
    there = free if mode == "zero_copy" else free + held
    if allowed <= 0 or there < allowed:
        others = max(0, total - free - held)
        raise NoRoomError(
            f"{device} has {total} bytes, {held} are held by the keeper and {others} by others; {free} are free and "
            f"--gpu-memory-utilization {utilization} asks for {wanted} with the weights; "
            "lower it, or free memory on this GPU"
        )
    return allowed
