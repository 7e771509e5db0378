"""A model's tensors → one packed arena and its layout. Used where weights have just been loaded."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from weightkeeper.digest import digest
from weightkeeper.errors import UnverifiedQuantizationError
from weightkeeper.layout import Digest, Layout, Tensor, aligned
from weightkeeper.memory import Arena, Memory
from weightkeeper.slots import Slot, plain_values, slots
from weightkeeper.tensors import bytes_of, dtype_name, span


@dataclass(slots=True)
class _Storage:
    """Tensors that share one storage, and the part of it that they cover, in bytes."""

    tensors: list[Slot]
    start: int
    stop: int
    offset: int = 0


def pack(
    model: nn.Module,
    memory: Memory,
    before: dict[str, bool | int | float | str | None],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    skeleton: dict[str, str] | None = None,
) -> tuple[Layout, Arena]:
    """Copy every tensor of `model` into new memory and free the original as soon as it is over.

    Args:
        model: loaded; afterwards its tensors are empty and it cannot be used.
        memory: where the arena is made; one storage starts at each multiple of ALIGNMENT bytes.
        before: `plain_values` from before the weights were loaded; what differs now is part of the layout.
        skeleton: where vLLM's post-processing has run on the model, its slots before that.
        progress: called with (bytes packed, bytes in all).

    Returns:
        The layout, with digests of what the arena then holds; and the arena, filled and not yet sealed.

    Raises:
        UnverifiedQuantizationError: a tensor is of a class that has no plain bytes.
        MemoryKindError: the arena could not be made; the model is untouched.
    """
    found = slots(model)
    _check_classes(found)
    storages = _storages(found)
    nbytes = 0
    for storage in storages:
        storage.offset = nbytes
        nbytes = aligned(nbytes + storage.stop - storage.start)
    layout = _layout(model, found, storages, nbytes, before, skeleton)
    arena = memory.create(max(nbytes, 1))
    try:
        arena.back(1)
        target = bytes_of(arena.region)
        done = 0
        for storage in storages:
            size = storage.stop - storage.start
            arena.back(storage.offset + size)
            source = torch.empty(0, dtype=torch.uint8, device=storage.tensors[0].tensor.device)
            source.set_(storage.tensors[0].tensor.untyped_storage(), storage.start, (size,), (1,))
            target[storage.offset : storage.offset + size].copy_(source)
            del source
            for slot in storage.tensors:
                slot.tensor.data = torch.empty(0, dtype=slot.tensor.dtype, device=slot.tensor.device)
            done += size
            progress(done, nbytes)
        layout = msgspec.structs.replace(layout, digests=_digests(storages, target))
        del target
    except BaseException:
        arena.close()
        raise
    return layout, arena


def _digests(storages: list[_Storage], target: torch.Tensor) -> tuple[Digest, ...]:
    """Of each storage's bytes as they lie in the arena; no memory that packing has just freed is needed for it."""
    found = []
    for storage in storages:
        size = storage.stop - storage.start
        value = digest(target[storage.offset : storage.offset + size])
        found.append(Digest(storage.tensors[0].path, storage.offset, size, value))
    return tuple(found)


def _check_classes(found: list[Slot]) -> None:
    for slot in found:
        if type(slot.tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or slot.tensor.is_quantized:
            raise UnverifiedQuantizationError(
                f"{slot.path} is a {type(slot.tensor).__name__}, which has no plain bytes to share; "
                "serve this model with vLLM's own load format"
            )


def _storages(found: list[Slot]) -> list[_Storage]:
    storages: dict[tuple[torch.device, int], _Storage] = {}
    for slot in found:
        start, stop = span(slot.tensor)
        if start == stop:
            continue
        key = (slot.tensor.device, slot.tensor.untyped_storage().data_ptr())
        known = storages.get(key)
        if known is None:
            storages[key] = _Storage([slot], start, stop)
        else:
            known.tensors.append(slot)
            known.start, known.stop = min(known.start, start), max(known.stop, stop)
    for storage in storages.values():
        storage.start -= storage.start % _widest(storage.tensors)
    return list(storages.values())


def _widest(found: list[Slot]) -> int:
    """Bytes of the largest element, so that every view stays aligned to its own elements."""
    return max(slot.tensor.element_size() for slot in found)


def _layout(
    model: nn.Module,
    found: list[Slot],
    storages: list[_Storage],
    nbytes: int,
    before: dict[str, bool | int | float | str | None],
    skeleton: dict[str, str] | None,
) -> Layout:
    offsets = {
        id(slot.tensor): storage.offset + span(slot.tensor)[0] - storage.start
        for storage in storages
        for slot in storage.tensors
    }
    tensors = tuple(
        Tensor(
            path=slot.path,
            kind=slot.kind,
            dtype=dtype_name(slot.tensor.dtype),
            shape=tuple(slot.tensor.shape),
            stride=tuple(slot.tensor.stride()),
            offset=offsets.get(id(slot.tensor), 0),
            persistent=slot.persistent,
        )
        for slot in found
    )
    aliases = {alias: slot.path for slot in found for alias in slot.aliases}
    now = plain_values(model)
    values = {path: value for path, value in now.items() if path not in before or before[path] != value}
    return Layout(
        tensors=tensors,
        aliases=aliases,
        values=values,
        nbytes=nbytes,
        processed=skeleton is not None,
        skeleton=skeleton or {},
    )
