"""GPU memory from the driver's virtual memory management: segments of at most 1 GiB at one reserved address range.

Its descriptors outlive the process that made them, cross every namespace, and can be mapped read-only. It is apart from
torch's caching allocator, so PYTORCH_CUDA_ALLOC_CONF does not touch it. Source of the calls: CUDA driver API,
"Virtual Memory Management". A CUDA context has to be current in the calling thread (torch makes one).
"""

import ctypes
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from weightkeeper.errors import CudaCallError, MemoryKindError
from weightkeeper.memory import MemoryKind

SEGMENT_BYTES = 1 << 30
"""Of one allocation, and so what packing may need beyond the model: one segment."""


class Driver:
    """The driver's calls, with every return code checked.

    Args:
        api: the module `cuda.bindings.driver`, or what stands in for it in tests.
        ordinal: of the device in this process.
    """

    def __init__(self, api: Any, ordinal: int):
        self.api = api
        self.ordinal = ordinal
        self.torch_device = f"cuda:{ordinal}"
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self.uuid = gpu_uuid(self._call("cuDeviceGetUuid", self._device).bytes)
        self._property = self._allocation_property()
        self.granularity = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._property,
                api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )

    def _allocation_property(self) -> Any:
        prop = self.api.CUmemAllocationProp()
        prop.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.ordinal
        prop.requestedHandleTypes = self._descriptor_type
        return prop

    @property
    def _descriptor_type(self) -> Any:
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def make_current(self) -> None:
        """Make the device's primary context current in this thread, where none is (programs without torch)."""
        current = self._call("cuCtxGetCurrent")
        if int(current) == 0:
            self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0, nbytes=nbytes))

    def free_range(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        return self._call("cuMemCreate", nbytes, self._property, 0, nbytes=nbytes)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int, writable: bool) -> None:
        """Set what this process may do in a mapped range: read, or read and write."""
        access = self.api.CUmemAccessDesc()
        access.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        flags = self.api.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, nbytes, [access], 1, nbytes=nbytes)

    def export(self, handle: Any) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))

    def import_(self, descriptor: int) -> Any:
        return self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor_type)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device, and wait until it is there."""
        source = (ctypes.c_char * len(data)).from_buffer_copy(data)
        self._call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data), nbytes=len(data))
        self.synchronize()

    def read(self, address: int, nbytes: int) -> bytes:
        target = (ctypes.c_char * nbytes)()
        self._call("cuMemcpyDtoH", ctypes.addressof(target), address, nbytes, nbytes=nbytes)
        return target.raw

    def _call(self, name: str, *arguments: Any, nbytes: int | None = None) -> Any:
        size = "" if nbytes is None else f" for {nbytes} bytes"
        return call(self.api, name, *arguments, what=f"{size} failed on {getattr(self, 'uuid', self.torch_device)}")


def call(api: Any, name: str, *arguments: Any, what: str = " failed") -> Any:
    """The result of a call of the driver, None where it has none.

    Raises:
        CudaCallError: with the driver's own words and number.
    """
    code, *results = getattr(api, name)(*arguments)
    if int(code) != 0:
        _, text = api.cuGetErrorString(code)
        text = text.decode() if isinstance(text, bytes) else str(text)
        raise CudaCallError(f"{name}{what}: {text} (CUDA error {int(code)})", int(code))
    return results[0] if results else None


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


def open_driver(ordinal: int) -> Driver:
    """The driver for a device by its ordinal in this process.

    Raises:
        MemoryKindError: see `open_device`.
    """
    return Driver(bindings(), ordinal)


def bindings() -> Any:
    """NVIDIA's module of driver calls, with the driver loaded and initialized.

    Raises:
        MemoryKindError: the module or the driver's library is missing, or the driver refused.
    """
    try:
        from cuda.bindings import driver as api

        call(api, "cuInit", 0)
    except (ImportError, RuntimeError) as error:
        raise MemoryKindError(f"the CUDA driver cannot be used: {error}; is libcuda.so.1 in this container?") from error
    return api


def gpu_uuid(raw: bytes) -> str:
    """`GPU-xxxxxxxx-xxxx-…` from the driver's 16 bytes, as nvidia-smi writes it."""
    digits = bytes(raw).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _segments(nbytes: int, granularity: int) -> tuple[int, ...]:
    total = -(-nbytes // granularity) * granularity
    segment = SEGMENT_BYTES // granularity * granularity
    whole, rest = divmod(total, segment)
    return (segment,) * whole + ((rest,) if rest else ())
