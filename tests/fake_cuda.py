"""Stands in for `cuda.bindings.driver` where there is no GPU: the calls that weightkeeper makes, over memfds.

A device address is an address of this process. A reserved range has no access until `cuMemSetAccess` gives it, so a
write through a read-only mapping kills the writer here too. Errors have the driver's own codes. Used for nothing but
the calls; a GPU test stands beside each test that uses it.
"""

import ctypes
import enum
import mmap
import os
from types import SimpleNamespace

GRANULARITY = 2 << 20
UUID = bytes(range(16))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class CUcomputemode(enum.IntEnum):
    CU_COMPUTEMODE_DEFAULT = 0
    CU_COMPUTEMODE_PROHIBITED = 2
    CU_COMPUTEMODE_EXCLUSIVE_PROCESS = 3


class FakeCuda:
    """One device with `total` bytes of memory.

    Attributes:
        calls: names of the calls made, in order.
        fail: name of a call → code that its next use returns.
        used: bytes that some handle or mapping of this process keeps alive.
    """

    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUmemAccess_flags = CUmemAccess_flags
    CUdevice_attribute = CUdevice_attribute
    CUcomputemode = CUcomputemode

    def __init__(self, total: int = 64 << 30):
        self.total = total
        self.calls: list[str] = []
        self.fail: dict[str, CUresult] = {}
        self._handles: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._writable: dict[int, bool] = {}
        self._context = 0
        self._next = 1

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=SimpleNamespace())

    @property
    def handles(self) -> int:
        return len(self._handles)

    @property
    def mappings(self) -> int:
        return len(self._mapped)

    @property
    def ranges(self) -> int:
        return len(self._reserved)

    @property
    def allocated(self) -> int:
        return sum(size for _, size in self._handles.values())

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found
        self.calls.append(name)
        code = self.fail.pop(name, None)
        return found if code is None else lambda *_: (code,)

    def cuInit(self, flags):
        return (CUresult(flags),)

    def cuGetErrorString(self, code):
        return CUresult.CUDA_SUCCESS, CUresult(code).name.removeprefix("CUDA_ERROR_").lower().encode()

    def cuDriverGetVersion(self):
        return CUresult.CUDA_SUCCESS, 13010

    def cuDeviceGetCount(self):
        return CUresult.CUDA_SUCCESS, 1

    def cuDeviceGetName(self, nbytes, device):
        return CUresult(device), b"NVIDIA Stand-in".ljust(nbytes, b"\0")

    def cuDeviceTotalMem(self, device):
        return CUresult(device), self.total

    def cuDeviceGetAttribute(self, attribute, device):
        return CUresult(device), int(attribute != CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)

    def cuCtxGetCurrent(self):
        return CUresult.CUDA_SUCCESS, self._context

    def cuDevicePrimaryCtxRetain(self, device):
        return CUresult(device), 1

    def cuCtxSetCurrent(self, context):
        self._context = context
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, address, source, nbytes):
        if not self._holds(address, nbytes, self._writable):
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        ctypes.memmove(address, source, nbytes)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, target, address, nbytes):
        if not self._holds(address, nbytes, self._mapped):
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        ctypes.memmove(target, address, nbytes)
        return (CUresult.CUDA_SUCCESS,)

    def _holds(self, address, nbytes, ranges) -> bool:
        """Whether one mapped segment has all these bytes, and `ranges` has that segment with something true."""
        starts = [
            start for start, size in self._mapped.items() if start <= address and address + nbytes <= start + size
        ]
        return bool(starts) and bool(ranges.get(starts[0]))

    def cuDeviceGet(self, ordinal):
        return (CUresult.CUDA_SUCCESS, 0) if ordinal == 0 else (CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetUuid(self, device):
        return CUresult(device), SimpleNamespace(bytes=UUID)

    def cuMemGetAllocationGranularity(self, prop, option):
        return CUresult.CUDA_SUCCESS, GRANULARITY if prop.requestedHandleTypes and option else 0

    def cuCtxSynchronize(self):
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):
        if nbytes <= 0 or nbytes % GRANULARITY or alignment or address or flags:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        start = _libc.mmap(None, nbytes, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        self._reserved[start] = nbytes
        return CUresult.CUDA_SUCCESS, start

    def cuMemAddressFree(self, address, nbytes):
        if self._reserved.get(address) != nbytes or any(address <= start < address + nbytes for start in self._mapped):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self._reserved[address]
        _libc.munmap(address, nbytes)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemCreate(self, nbytes, prop, flags):
        if nbytes <= 0 or nbytes % GRANULARITY or flags or prop.location.id != 0:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if self.allocated + nbytes > self.total:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        descriptor = os.memfd_create("fake GPU memory", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return CUresult.CUDA_SUCCESS, self._handle(descriptor, nbytes)

    def cuMemRelease(self, handle):
        if handle not in self._handles:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        os.close(self._handles.pop(handle)[0])
        return (CUresult.CUDA_SUCCESS,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        inside = any(start <= address and address + nbytes <= start + size for start, size in self._reserved.items())
        if offset or flags or not inside or self._handles.get(handle, (0, 0))[1] != nbytes or address in self._mapped:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        _libc.mmap(address, nbytes, _NONE, mmap.MAP_SHARED | _FIXED, self._handles[handle][0], 0)
        self._mapped[address] = nbytes
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, nbytes):
        if self._mapped.get(address) != nbytes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self._mapped[address]
        self._writable.pop(address, None)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _libc.mmap(address, nbytes, _NONE, flags, -1, 0)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, nbytes, descriptions, count):
        if self._mapped.get(address) != nbytes or count != len(descriptions) or descriptions[0].location.id != 0:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        writable = descriptions[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._writable[address] = writable
        _libc.mprotect(address, nbytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        if handle not in self._handles or int(kind) != 1 or flags:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return CUresult.CUDA_SUCCESS, os.dup(self._handles[handle][0])

    def cuMemImportFromShareableHandle(self, descriptor, kind):
        try:
            own = os.dup(int(descriptor))
        except OSError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return CUresult.CUDA_SUCCESS, self._handle(own, os.fstat(own).st_size if int(kind) == 1 else 0)

    def _handle(self, descriptor: int, nbytes: int) -> int:
        number, self._next = self._next, self._next + 1
        self._handles[number] = (descriptor, nbytes)
        return number
