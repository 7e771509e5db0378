"""A packed arena and its layout → the tensors of a model that was built on the meta device.

Every tensor object of the model stays the same object (`torch.utils.swap_tensors`), because attention layers and
routers hold references to them outside the module tree.
"""

from dataclasses import dataclass

import torch
from torch import nn

from weightkeeper.errors import SlotsError
from weightkeeper.layout import Layout, Tensor
from weightkeeper.slots import Slot, set_value, slots
from weightkeeper.tensors import dtype_name, swap, view

MAX_NAMED = 12
"""Slots that one message names; the count of all is in it too."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What binding did, in bytes: parameters on the shared mapping, and private copies."""

    tensors: int
    mapped_bytes: int
    copied_bytes: int


def bind(model: nn.Module, layout: Layout, whole: torch.Tensor, *, share: bool) -> Bound:
    """Give every tensor of `model` its bytes. For a processed layout, `adapt` goes before and `check` behind.

    Args:
        model: built on the meta device; tensors that its constructor made for real are overwritten in place.
        layout: the keeper's.
        whole: uint8, all bytes of the arena.
        share: parameters stay views of `whole` (zero-copy); otherwise they are cloned one by one.

    Raises:
        SlotsError: a slot of the model has no tensor in the layout, or the other way round, or they differ in
            dtype, shape or kind; nothing was bound. Also when a meta tensor is left afterwards.
    """
    found = slots(model)
    if not layout.processed:
        _compare(found, layout)
    records = {record.path: record for record in layout.tensors}
    mapped = copied = 0
    for slot in found:
        record = records.get(slot.path)
        if record is None or (layout.processed and _fault(slot, record)):
            continue  # post-processing makes it anew
        source = view(whole, record)
        if not slot.tensor.is_meta:
            slot.tensor.data.copy_(source)
            copied += source.nbytes
            continue
        if not share or record.kind != "parameter":
            source = source.clone()
            copied += source.nbytes
        else:
            mapped += source.nbytes
        swap(slot.tensor, source)
    for path, value in layout.values.items():
        set_value(model, path, value)
    if not layout.processed:
        check(model, layout)
    return Bound(tensors=len(found), mapped_bytes=mapped, copied_bytes=copied)


def rebind(model: nn.Module, layout: Layout, whole: torch.Tensor) -> Bound:
    """Give a model whose tensors `capture.pack` has taken its bytes back: parameters on `whole`, the rest as copies."""
    records = {record.path: record for record in layout.tensors}
    mapped = copied = 0
    for slot in slots(model):
        source = view(whole, records[slot.path])
        if slot.kind == "parameter":
            mapped += source.nbytes
        else:
            source = source.clone()
            copied += source.nbytes
        slot.tensor.data = source
    return Bound(tensors=len(records), mapped_bytes=mapped, copied_bytes=copied)


def check(model: nn.Module, layout: Layout) -> None:
    """Account for every slot of a model that is ready to compute.

    Raises:
        SlotsError: a meta tensor can be reached by any path, or a tensor of the layout is not there as it was.
    """
    found = slots(model)
    left = [slot.path for slot in found if slot.tensor.is_meta]
    if left:
        raise SlotsError(f"{len(left)} tensors have no bytes after binding: {_some(left)}")
    ours = {slot.path: slot for slot in found}
    gone = [record.path for record in layout.tensors if record.path not in ours or _fault(ours[record.path], record)]
    if gone:
        raise SlotsError(f"{len(gone)} tensors of the keeper have no place in this model: {_some(gone)}")


def _compare(found: list[Slot], layout: Layout) -> None:
    records = {record.path: record for record in layout.tensors}
    ours = {slot.path: slot for slot in found}
    faults = [f"{path} is missing" for path in ours if path not in records]
    faults += [f"{path} is too many" for path in records if path not in ours]
    faults += [fault for path, slot in ours.items() if path in records and (fault := _fault(slot, records[path]))]
    aliases = {alias: slot.path for slot in found for alias in slot.aliases}
    if aliases != layout.aliases:
        changed = sorted(aliases.items() ^ layout.aliases.items())
        faults += [f"{alias} is tied to {path} on one side only" for alias, path in changed]
    if faults:
        raise SlotsError(
            f"the keeper's {len(records)} tensors do not fit this model's {len(ours)}: {_some(faults)}; "
            "load the keeper again with this engine's options (`make load`)"
        )


def _fault(slot: Slot, record: Tensor) -> str | None:
    tensor = slot.tensor
    mine = (slot.kind, dtype_name(tensor.dtype), tuple(tensor.shape))
    theirs = (record.kind, record.dtype, record.shape)
    if mine == theirs:
        return None
    return f"{slot.path} is {_words(*theirs)} in the keeper and {_words(*mine)} here"


def _words(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"a {dtype} {kind} of shape {list(shape)}"


def _some(faults: list[str]) -> str:
    more = len(faults) - MAX_NAMED
    return "; ".join(faults[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
