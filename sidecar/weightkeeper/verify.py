"""What a keeper holds, read through a mapping, against the digests that were taken when it was packed."""

import bisect
import os
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from weightkeeper import client, memory
from weightkeeper.digest import digest
from weightkeeper.errors import MemoryKindError, ProtocolError
from weightkeeper.layout import Digest, Layout, Tensor
from weightkeeper.memory import MemoryKind
from weightkeeper.protocol import Grant
from weightkeeper.tensors import bytes_of, dtype_of

LEASE_NAME = "verify"
"""How `status` shows who is reading."""


class Difference(msgspec.Struct, frozen=True):
    """One storage whose bytes are not what was packed.

    Attributes:
        paths: of the tensors that lie in it, the one that names it first.
        offset: bytes from the start of the arena.
        expected: digest taken at load.
        found: digest of what is there now.
    """

    paths: tuple[str, ...]
    offset: int
    nbytes: int
    expected: str
    found: str


class Verified(msgspec.Struct, frozen=True):
    """What verifying one device came to.

    Attributes:
        nbytes: that were read.
        storages: digests compared.
        seconds: for reading, without connecting and mapping.
        differences: empty where everything is as it was packed.
        unchecked: paths of tensors that no digest covers.
    """

    device: str
    generation: int
    kind: MemoryKind
    nbytes: int
    storages: int
    seconds: float
    differences: tuple[Difference, ...]
    unchecked: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.differences and not self.unchecked


def verify(
    socket_dir: str, device: str, timeout_s: float, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Map what the keeper holds on `device`, and compare every digest.

    Args:
        timeout_s: for the keeper to answer.
        progress: called with (bytes read, bytes in all).

    Raises:
        MemoryKindError: the memory cannot be mapped or read here; for a GPU, that it is not visible.
        CacheUnusableError: the keeper's answer, by its class.
    """
    with client.open_session(
        socket_dir, device, name=LEASE_NAME, connect_timeout_s=timeout_s, state_timeout_s=timeout_s
    ) as session:
        granted = session.map({}, "verify")
        try:
            region = _memory(granted.grant.kind, device).map(granted.descriptors, granted.grant.sizes)
        finally:
            for descriptor in granted.descriptors:
                os.close(descriptor)
        whole = bytes_of(region)  # unmapped with its last view
        try:
            return _compare(device, granted.grant, whole, progress)
        except RuntimeError as error:
            raise MemoryKindError(f"{device} could not be read: {error}; `dmesg` has what the driver saw") from error


def _memory(kind: MemoryKind, device: str) -> memory.Memory:
    if kind == "host":
        return memory.of_kind(kind)
    from weightkeeper.memory.cuda_devices import ordinal_of

    ordinal = ordinal_of(device)
    torch.empty(1, device=f"cuda:{ordinal}")  # torch's context is the one that is mapped into
    return memory.of_kind(kind, ordinal)


def _compare(device: str, grant: Grant, whole: torch.Tensor, progress: Callable[[int, int], None]) -> Verified:
    layout, started = grant.layout, time.monotonic()
    total = sum(each.nbytes for each in layout.digests)
    done = 0
    differences = []
    for each in layout.digests:
        if not 0 <= each.offset <= each.offset + each.nbytes <= whole.numel():
            raise ProtocolError(f"the digest of {each.path} is over bytes outside the keeper's {whole.numel()}")
        found = digest(whole[each.offset : each.offset + each.nbytes])
        if found != each.value:
            paths = tuple(_paths(layout, each))
            differences.append(Difference(paths, each.offset, each.nbytes, each.value, found))
        done += each.nbytes
        progress(done, total)
    return Verified(
        device=device,
        generation=grant.generation,
        kind=grant.kind,
        nbytes=total,
        storages=len(layout.digests),
        seconds=time.monotonic() - started,
        differences=tuple(differences),
        unchecked=tuple(_unchecked(layout)),
    )


def _paths(layout: Layout, found: Digest) -> Iterator[str]:
    """The storage's own name, then every other tensor and tie that lies in it."""
    inside = {found.path} | {each.path for each in layout.tensors if _covers(found, *_extent(each))}
    yield found.path
    yield from (each.path for each in layout.tensors if each.path in inside - {found.path})
    yield from (alias for alias, path in layout.aliases.items() if path in inside)


def _unchecked(layout: Layout) -> Iterator[str]:
    """Tensors with bytes that lie under no digest. Storages do not overlap, so only one can cover a tensor."""
    digests = sorted(layout.digests, key=lambda each: each.offset)
    offsets = [each.offset for each in digests]
    for tensor in layout.tensors:
        start, stop = _extent(tensor)
        before = bisect.bisect_right(offsets, start)
        if start < stop and not (before and _covers(digests[before - 1], start, stop)):
            yield tensor.path


def _covers(found: Digest, start: int, stop: int) -> bool:
    return start < stop and found.offset <= start and stop <= found.offset + found.nbytes


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte in the arena, and the byte after the last one; equal where it has none."""
    if 0 in tensor.shape:
        return tensor.offset, tensor.offset
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset, tensor.offset + (last + 1) * dtype_of(tensor).itemsize
