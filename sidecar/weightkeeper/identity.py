"""What the bytes of a checkpoint are: BLAKE3 of its files, and receipts by which a later `stat` can replace a hash.

A receipt proves nothing where a file was changed an instant before it was hashed: times are coarse, and a second
change could leave them equal. Such a file is waited for, or else its receipt is not trusted. What programs change
through shared mappings is flushed first, so that their next store shows in the file's times. Only tmpfs has no such
moment: a program that goes on writing through a mapping there is not seen.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from weightkeeper import changes
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.files import Stamp, open_regular, shown
from weightkeeper.hashing import Progress, hash_files
from weightkeeper.protocol import Receipt

logger = logging.getLogger(__name__)

SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which an equal stamp means equal content. FAT counts in steps of 2 s."""

PATIENCE_NS = 3_000_000_000
"""How long one `take` waits for young files, all together."""


@dataclass(frozen=True, slots=True)
class Digests:
    """The content of every file that counts.

    Attributes:
        by_name: file name inside the checkpoint → BLAKE3 in hex.
        hashed: names of the files that were read in full; for the others a receipt held.
    """

    by_name: dict[str, str]
    hashed: tuple[str, ...]


def take(checkpoint: Checkpoint, progress: Progress | None = None) -> tuple[Receipt, ...]:
    """Hash every file once, and note what `stat` says of it.

    Waits for files that changed less than 2 s ago, 3 s at most.

    Raises:
        CheckpointChangedError: a file is not what it was when the checkpoint was opened, before or after hashing.
        CheckpointError: a file can no longer be read.
    """
    trusted = _settle(checkpoint)
    by_name = hash_files(checkpoint.path, checkpoint.files, progress)
    return tuple(
        Receipt(file.name, *file.stamp, blake3=by_name[file.name], trusted=file.name in trusted)
        for file in checkpoint.files
    )


def check_unchanged(checkpoint: Checkpoint, receipts: Iterable[Receipt]) -> None:
    """Make sure that whoever read the checkpoint since `take` has read what was hashed.

    Files whose receipts are not trusted are hashed again.

    Raises:
        CheckpointChangedError: with every file that changed, went or appeared, and how.
        CheckpointError: a file can no longer be read.
    """
    known = {receipt.name: receipt for receipt in receipts}
    then = {name: _stamp(receipt) for name, receipt in known.items()}
    changes.refuse(changes.since(checkpoint.path, checkpoint.files, then) or changes.appeared(checkpoint))
    doubtful = [file for file in checkpoint.files if not known[file.name].trusted]
    changes.refuse(
        f"{shown(checkpoint.path / name)}: its content changed, although its times are equal"
        for name, digest in hash_files(checkpoint.path, doubtful).items()
        if digest != known[name].blake3
    )


def digests(checkpoint: Checkpoint, known: Iterable[Receipt], progress: Progress | None = None) -> Digests:
    """The content of every file: by one `stat` where a trusted receipt is unchanged, else by hashing it.

    Raises:
        CheckpointChangedError: a file without such a receipt changed since the checkpoint was opened.
        CheckpointError: a file can no longer be read.
    """
    receipts = {receipt.name: receipt for receipt in known if receipt.trusted}
    held: dict[str, str] = {}
    for file in checkpoint.files:
        receipt = receipts.get(file.name)
        if receipt and _stamp(receipt) == changes.stamp_now(checkpoint.path / file.name):
            held[file.name] = receipt.blake3
    unknown = [file for file in checkpoint.files if file.name not in held]
    by_name = held | hash_files(checkpoint.path, unknown, progress)
    return Digests(by_name, tuple(file.name for file in unknown))


def _stamp(receipt: Receipt) -> Stamp:
    return Stamp(receipt.size, receipt.mtime_ns, receipt.ctime_ns, receipt.inode)


def _settle(checkpoint: Checkpoint) -> set[str]:
    """Wait for files that are too young. Returns the names of those whose stamps will tell every later change."""
    patience = PATIENCE_NS
    trusted = set()
    for file in checkpoint.files:
        path = checkpoint.path / file.name
        with open_regular(path) as (descriptor, _):
            flushed, young = _flush(descriptor), _youth(descriptor)
            if 0 < young <= patience:
                time.sleep(young / 1e9)
                patience -= young
                flushed, young = _flush(descriptor), _youth(descriptor)
        if flushed and young <= 0:
            trusted.add(file.name)
        else:
            logger.warning("%s: changed too lately, or in the future by this clock: starts will hash it", shown(path))
    return trusted


def _flush(descriptor: int) -> bool:
    """Write out what mappings have changed; whether that is done."""
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        return error.errno in (errno.EINVAL, errno.EROFS)  # a file system that is only ever read
    return True


def _youth(descriptor: int) -> int:
    """Nanoseconds until the file's last change is old enough."""
    status = os.fstat(descriptor)
    return max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED_NS - time.time_ns()
