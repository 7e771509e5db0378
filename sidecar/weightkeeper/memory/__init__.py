"""Shared memory that holds weights, behind one interface for every kind.

An arena is created and filled by one process, sealed, and exported as file descriptors; any process that receives
those maps them read-only at one contiguous range. Who only keeps descriptors needs nothing from this package but
`check`, and never maps.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from weightkeeper.errors import MemoryKindError

MemoryKind = Literal["host", "cuda-vmm", "cuda-ipc"]


class Region(Protocol):
    """A contiguous range of mapped memory.

    Attributes:
        address: of the first byte, in this process (a device address for CUDA kinds).
        nbytes: size of the range.
        writable: whether a store into it is allowed.
        device: torch's name of where it is, `cpu` or `cuda:0`.
    """

    address: int
    nbytes: int
    writable: bool
    device: str

    def close(self) -> None:
        """Unmap. The memory itself lives on while any process holds a descriptor or a mapping."""


class Arena(Protocol):
    """Memory being filled by its creator.

    Attributes:
        region: writable until `seal`.
        sizes: bytes of each segment, in order; their sum is at least what was asked for.
    """

    region: Region
    sizes: tuple[int, ...]

    def back(self, nbytes: int) -> None:
        """Make sure that the first `nbytes` bytes have memory behind them; kinds that need it allocate no sooner.

        Raises:
            MemoryKindError: there is no room for the next segment.
        """

    def seal(self) -> None:
        """End all writing, for good and for everybody, where the kind can. `region` is unmapped."""

    def export(self) -> list[int]:
        """New file descriptors, one a segment, that the caller owns."""

    def close(self) -> None:
        """Give up the creator's own hold."""


class Memory(Protocol):
    """One way to share memory on one device."""

    kind: MemoryKind

    def create(self, nbytes: int) -> Arena:
        """Allocate at least `nbytes` bytes of zeroed memory.

        Raises:
            MemoryKindError: the system or driver refused; nothing stays allocated.
        """

    def check(self, descriptor: int, nbytes: int) -> None:
        """Refuse a descriptor that is not a sealed segment of exactly `nbytes` bytes of this kind.

        Raises:
            MemoryKindError: it is not; the message says what it is instead.
        """

    def map(self, descriptors: Sequence[int], sizes: Sequence[int]) -> Region:
        """Map segments read-only, one behind the other. The descriptors stay the caller's.

        Raises:
            MemoryKindError: a segment fails `check`, or the mapping was refused; nothing stays mapped.
        """


def of_kind(kind: MemoryKind, ordinal: int = 0) -> Memory:
    """The memory of a kind, with only its own imports.

    Args:
        kind: as a keeper names it.
        ordinal: of the GPU in this process, for the kinds that need one.

    Raises:
        MemoryKindError: this version cannot map that kind.
    """
    if kind == "cuda-vmm":
        from weightkeeper.memory.cuda_vmm import open_device

        return open_device(ordinal)
    if kind == "host":
        from weightkeeper.memory.host import HostMemory

        return HostMemory()
    raise MemoryKindError(f"memory of kind {kind} cannot be mapped by this version of weightkeeper")


def checker_of(kind: MemoryKind) -> Callable[[int, int], None]:
    """What refuses a descriptor that is no segment of so many bytes of this kind; needs no GPU and no driver.

    Raises:
        MemoryKindError: this version cannot hold that kind.
    """
    if kind == "host":
        from weightkeeper.memory.host import HostMemory

        return HostMemory().check
    if kind == "cuda-vmm":
        from weightkeeper.memory.cuda_vmm import check_descriptor

        return check_descriptor
    raise MemoryKindError(f"memory of kind {kind} cannot be held by this version of weightkeeper")
