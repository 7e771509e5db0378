"""The calls of the CUDA driver that we make, each with its return code checked, through NVIDIA's own bindings.

Source of the calls: CUDA driver API, "Virtual Memory Management". A CUDA context has to be current in the calling
thread (torch makes one).
"""

import ctypes
from typing import Any

from weightkeeper.errors import CudaCallError, MemoryKindError


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
