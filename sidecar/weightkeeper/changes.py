"""What happened to a checkpoint's files since an earlier moment, told by `stat` and by the folder's listing."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightkeeper.checkpoint import Checkpoint, File
from weightkeeper.errors import CheckpointChangedError, CheckpointError
from weightkeeper.files import Stamp, shown
from weightkeeper.weight_set import choose


def stamp_now(path: Path) -> Stamp | None:
    """The file's stamp; None where there is no file, or none that this user may see."""
    try:
        return Stamp.of(os.stat(path))
    except OSError:
        return None


def since(directory: Path, files: Iterable[File], then: Mapping[str, Stamp]) -> list[str]:
    """A sentence for each of `files` that is not what it was `then` (file name → stamp)."""
    found = []
    for file in files:
        path = directory / file.name
        now, before = stamp_now(path), then.get(file.name)
        if now is None:
            found.append(f"{shown(path)}: it is gone")
        elif before is None:
            found.append(f"{shown(path)}: it was not there when the content was hashed")
        elif words := before.changes(now):
            found.append(f"{shown(path)}: {words}")
    return found


def since_opened(directory: Path, files: Iterable[File]) -> list[str]:
    """As `since`, against the moment when the checkpoint was opened."""
    files = tuple(files)
    return since(directory, files, {file.name: file.stamp for file in files})


def appeared(checkpoint: Checkpoint) -> list[str]:
    """A sentence for each file that vLLM would read now and that was not there when the checkpoint was opened."""
    known = {file.name for file in checkpoint.files}
    try:
        chosen = choose(checkpoint.path)
    except CheckpointError as error:
        return [str(fault) for fault in error.faults]
    names = sorted({*chosen.weights, *chosen.configs} - known)
    return [f"{shown(checkpoint.path / name)}: it appeared since the checkpoint was opened" for name in names]


def refuse(sentences: Iterable[str]) -> None:
    """Nothing where there are no sentences.

    Raises:
        CheckpointChangedError: with all of them.
    """
    if lines := "".join(f"\n  - {sentence}" for sentence in sentences):
        raise CheckpointChangedError(
            f"the checkpoint changed while it was in use; start again when its files are complete:{lines}"
        )
