"""Whether descriptors that came from two processes are of one memory. Needs no CUDA and maps nothing."""

import fcntl
import os
import signal
from collections.abc import Sequence

from weightkeeper.memory import MemoryKind

_MARKS = (signal.SIGRTMIN + 5, signal.SIGRTMIN + 9)


def is_same(kind: MemoryKind, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two lists of descriptors are of the same segments in the same order; False where that cannot be shown.

    A memfd is known by its inode. Every segment of GPU memory is an open file of one device and has that device's
    inode, so there it is the open file itself that has to be the same: it is when both descriptors are copies of the
    one that the publisher exported, however many processes they went through. A second export of the same memory is
    another open file, and is taken for other memory.
    """
    if len(one) != len(other):
        return False
    same = _same_inode if kind == "host" else _same_open_file
    return all(same(*pair) for pair in zip(one, other, strict=True))


def _same_inode(one: int, other: int) -> bool:
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def _same_open_file(one: int, other: int) -> bool:
    """By a setting that belongs to the open file, not to the descriptor: see F_SETSIG in fcntl(2).

    It is put back, and means nothing where O_ASYNC is not set. kcmp(2) would say the same, and Docker's seccomp
    profile refuses it.
    """
    if not _same_inode(one, other):
        return False
    try:
        before = fcntl.fcntl(one, fcntl.F_GETSIG)
        try:
            return all(_is_marked(one, other, mark) for mark in _MARKS)
        finally:
            fcntl.fcntl(one, fcntl.F_SETSIG, before)
    except OSError:
        return False


def _is_marked(one: int, other: int, mark: int) -> bool:
    fcntl.fcntl(one, fcntl.F_SETSIG, mark)
    return fcntl.fcntl(other, fcntl.F_GETSIG) == mark
