"""Ordinary memory in a sealed memfd: one segment an arena, writable by its creator until `seal`, by nobody after."""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence

from weightkeeper.errors import MemoryKindError
from weightkeeper.memory import MemoryKind
from weightkeeper.memory.available import available

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can write, shrink or grow the memory, map it writable, or take a seal away."""

MAX_BYTES = 1 << 46
"""In one segment: half of what a process on x86-64 or arm64 can address."""

_MFD_NOEXEC_SEAL = 0x8
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostRegion:
    """A mapped range. It stays mapped until `close`; addresses taken from it are dead afterwards."""

    device = "cpu"

    def __init__(self, address: int, nbytes: int, writable: bool):
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self.device = "cpu"
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _libc.munmap(self.address, self.nbytes)


class HostArena:
    """One memfd and its creator's writable mapping."""

    def __init__(self, descriptor: int, nbytes: int):
        self.sizes = (nbytes,)
        self._descriptor = descriptor
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.region = HostRegion(_mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor), nbytes, True)

    def back(self, nbytes: int) -> None:
        """Nothing to do: the kernel adds each page when it is written first, and `create` saw that there is room."""

    def seal(self) -> None:
        self.region.close()
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            why = "it is still mapped writable somewhere" if error.errno == errno.EBUSY else error.strerror
            raise MemoryKindError(f"{self.sizes[0]} bytes of shared memory could not be sealed: {why}") from error

    def export(self) -> list[int]:
        return [_read_only(self._descriptor)]

    def close(self) -> None:
        self.region.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HostMemory:
    """Shared memory of the machine.

    Args:
        freed_while_filling: bytes that the creator gives back to the system while it fills its arena.
    """

    kind: MemoryKind = "host"

    def __init__(self, freed_while_filling: int = 0):
        self._freed_while_filling = freed_while_filling

    def create(self, nbytes: int) -> HostArena:
        if not 0 < nbytes <= MAX_BYTES:
            raise MemoryKindError(f"an arena of {nbytes} bytes cannot be made: give 1 to {MAX_BYTES} bytes")
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._check_room(nbytes)
        try:
            descriptor = _memfd()
            try:
                os.ftruncate(descriptor, nbytes)
                return HostArena(descriptor, nbytes)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise MemoryKindError(f"{nbytes} bytes of shared memory could not be made: {error.strerror}") from error

    def check(self, descriptor: int, nbytes: int) -> None:
        try:
            state = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) if stat.S_ISREG(state.st_mode) else None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise MemoryKindError(f"descriptor {descriptor} is not usable: {error.strerror}") from error
            seals = None
        if seals is None:
            what = _file_type(state.st_mode)
            raise MemoryKindError(f"descriptor {descriptor} is a {what}, expected sealed shared memory")
        if seals & SEALS != SEALS:
            raise MemoryKindError(f"descriptor {descriptor} is shared memory that can still be written or resized")
        if state.st_size != nbytes:
            raise MemoryKindError(f"descriptor {descriptor} holds {state.st_size} bytes, expected {nbytes}")

    def map(self, descriptors: Sequence[int], sizes: Sequence[int]) -> HostRegion:
        if not sizes or len(descriptors) != len(sizes):
            raise MemoryKindError(
                f"{len(descriptors)} descriptor(s) for {len(sizes)} segment(s); expected equal counts"
            )
        for descriptor, nbytes in zip(descriptors, sizes, strict=True):
            self.check(descriptor, nbytes)
            if nbytes <= 0 or nbytes % mmap.PAGESIZE:
                raise MemoryKindError(f"a segment of {nbytes} bytes is not a whole number of memory pages")
        total = sum(sizes)
        if total > MAX_BYTES:
            raise MemoryKindError(f"{total} bytes are more than the {MAX_BYTES} that can be mapped")
        try:
            # The whole range is reserved first, so that segments lie one behind the other and over nothing else.
            start = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
            region = HostRegion(start, total, False)
            try:
                _map_segments(start, descriptors, sizes)
            except BaseException:
                region.close()
                raise
        except OSError as error:
            raise MemoryKindError(f"{total} bytes of shared memory could not be mapped: {error.strerror}") from error
        return region

    def _check_room(self, nbytes: int) -> None:
        room = available()
        if nbytes > room.nbytes + self._freed_while_filling:
            raise MemoryKindError(
                f"{nbytes} bytes of shared memory wanted, {room.nbytes} available ({room.bound}); "
                "end other programs, raise the limit or serve a smaller model"
            )


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("weightkeeper", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # kernels before 6.3 do not know the flag
            raise
        return os.memfd_create("weightkeeper", flags)


def _map_segments(start: int, descriptors: Sequence[int], sizes: Sequence[int]) -> None:
    for descriptor, nbytes in zip(descriptors, sizes, strict=True):
        own = _read_only(descriptor)
        try:
            _mmap(start, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, own)
        finally:
            os.close(own)
        start += nbytes


def _read_only(descriptor: int) -> int:
    """A new read-only descriptor of the same memory.

    Kernels before 6.7 refuse any shared mapping of write-sealed memory through a descriptor that is open for writing.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryKindError(
            f"shared memory could not be opened again for reading through /proc/self/fd: {error.strerror}"
        ) from error


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _file_type(mode: int) -> str:
    names = {
        stat.S_IFREG: "regular file",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFDIR: "directory",
        stat.S_IFCHR: "character device",
    }
    return names.get(stat.S_IFMT(mode), "descriptor of another kind")
