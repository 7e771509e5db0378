"""GPU memory from the driver's virtual memory management: segments of at most 1 GiB at one reserved address range.

Its descriptors outlive the process that made them, cross every namespace, and can be mapped read-only. It is apart from
torch's caching allocator, so PYTORCH_CUDA_ALLOC_CONF does not touch it.
"""

import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from weightkeeper.errors import MemoryKindError
from weightkeeper.memory import MemoryKind
from weightkeeper.memory.cuda_driver import Driver, open_driver

SEGMENT_BYTES = 1 << 30
"""Of one allocation, and so what packing may need beyond the model: one segment."""


class CudaRegion:
    """A reserved range with segments mapped from its start."""

    def __init__(self, driver: Driver, address: int, nbytes: int, writable: bool):
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self.device = driver.torch_device
        self._driver = driver
        self._mapped: list[tuple[int, int]] = []
        self._is_open = True

    def add(self, handle: Any, nbytes: int) -> None:
        """Map one more segment behind the last one."""
        start = self.address + sum(size for _, size in self._mapped)
        self._driver.map(start, nbytes, handle)
        self._mapped.append((start, nbytes))
        self._driver.allow(start, nbytes, self.writable)

    def close(self) -> None:
        """Wait for the device, which may still be reading, then unmap everything."""
        if not self._is_open:
            return
        self._is_open = False
        self._driver.synchronize()
        for start, nbytes in self._mapped:
            self._driver.unmap(start, nbytes)
        self._driver.free_range(self.address, self.nbytes)


class CudaArena:
    """Segments made one by one as `back` asks for them, so that what is packed can be freed meanwhile."""

    def __init__(self, driver: Driver, nbytes: int, before_allocation: Callable[[], None]):
        self.sizes = _segments(nbytes, driver.granularity)
        total = sum(self.sizes)
        self._driver = driver
        self._before_allocation = before_allocation
        self._handles: list[Any] = []
        self.region = CudaRegion(driver, driver.reserve(total), total, writable=True)

    def back(self, nbytes: int) -> None:
        while sum(self.sizes[: len(self._handles)]) < nbytes:
            size = self.sizes[len(self._handles)]
            self._before_allocation()
            handle = self._driver.create(size)
            self._handles.append(handle)
            self.region.add(handle, size)

    def seal(self) -> None:
        """Unmap; later mappings in all processes are read-only, which is all that this kind can do."""
        self.back(self.region.nbytes)
        self.region.close()

    def export(self) -> list[int]:
        descriptors: list[int] = []
        try:
            for handle in self._handles:
                descriptors.append(self._driver.export(handle))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    def close(self) -> None:
        self.region.close()
        while self._handles:
            self._driver.release(self._handles.pop())


class CudaMemory:
    """Memory of one GPU.

    Args:
        driver: of the device.
        before_allocation: called before each segment is made; gives cached memory back to the driver.
    """

    kind: MemoryKind = "cuda-vmm"

    def __init__(self, driver: Driver, before_allocation: Callable[[], None] = lambda: None):
        self._driver = driver
        self._before_allocation = before_allocation

    def create(self, nbytes: int) -> CudaArena:
        if nbytes <= 0:
            raise MemoryKindError(f"an arena of {nbytes} bytes cannot be made")
        return CudaArena(self._driver, nbytes, self._before_allocation)

    def check(self, descriptor: int, nbytes: int) -> None:
        check_descriptor(descriptor, nbytes)

    def map(self, descriptors: Sequence[int], sizes: Sequence[int]) -> CudaRegion:
        for descriptor, nbytes in zip(descriptors, sizes, strict=True):
            self.check(descriptor, nbytes)
            if nbytes % self._driver.granularity:
                raise MemoryKindError(
                    f"a segment of {nbytes} bytes is no multiple of the {self._driver.granularity} bytes in which "
                    f"{self._driver.uuid} maps memory; is it from another kind of GPU?"
                )
        total = sum(sizes)
        region = CudaRegion(self._driver, self._driver.reserve(total), total, writable=False)
        try:
            for descriptor, nbytes in zip(descriptors, sizes, strict=True):
                handle = self._driver.import_(descriptor)
                try:
                    region.add(handle, nbytes)
                finally:
                    self._driver.release(handle)  # the mapping keeps the memory
        except BaseException:
            region.close()
            raise
        return region


def check_descriptor(descriptor: int, nbytes: int) -> None:
    """What can be said of a descriptor of GPU memory without CUDA: it is nothing that lies in a file system.

    Raises:
        MemoryKindError: it is a file, pipe, socket or directory, or the size cannot be one of a segment.
    """
    if not 0 < nbytes <= SEGMENT_BYTES:
        raise MemoryKindError(f"a segment of {nbytes} bytes; GPU segments have 1 to {SEGMENT_BYTES} bytes")
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError as error:
        raise MemoryKindError(f"descriptor {descriptor} is not usable: {error.strerror}") from error
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISDIR(mode):
        raise MemoryKindError(f"descriptor {descriptor} is a file, pipe or socket, expected GPU memory")


def open_device(ordinal: int, before_allocation: Callable[[], None] = lambda: None) -> CudaMemory:
    """Memory of a device by its ordinal in this process, through NVIDIA's own bindings.

    Raises:
        MemoryKindError: no driver, no such device, or it refused.
    """
    return CudaMemory(open_driver(ordinal), before_allocation)


def _segments(nbytes: int, granularity: int) -> tuple[int, ...]:
    total = -(-nbytes // granularity) * granularity
    segment = SEGMENT_BYTES // granularity * granularity
    whole, rest = divmod(total, segment)
    return (segment,) * whole + ((rest,) if rest else ())
