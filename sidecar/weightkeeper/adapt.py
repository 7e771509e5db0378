"""Gives a freshly built model the slots that post-processing left in the loader's: other shapes, new and gone tensors.

Everything is done with meta tensors; `restore.bind` then fills them. That both models were alike before
post-processing is checked first, so that a slot is dropped only where post-processing consumed it.
"""

from typing import Any

import torch
from torch import nn

from weightkeeper.errors import SlotsError
from weightkeeper.layout import Layout, Tensor
from weightkeeper.slots import Slot, slots
from weightkeeper.tensors import dtype_name, dtype_of, swap


def skeleton(found: list[Slot]) -> dict[str, str]:
    """Path → kind, dtype and shape of every slot, as `Layout.skeleton` keeps them."""
    return {
        slot.path: f"{slot.kind} {dtype_name(slot.tensor.dtype)} {list(slot.tensor.shape)}"
        for slot in found
        if slot.kind != "attribute"
    }


def adapt(model: nn.Module, layout: Layout) -> None:
    """Let `model`, on the meta device, have exactly the slots of a processed layout, as far as they can be set.

    Raises:
        SlotsError: the model differs from the loader's as it was before post-processing.
    """
    found = slots(model)
    _check_alike(skeleton(found), layout.skeleton)
    ours = {slot.path: slot for slot in found}
    for record in layout.tensors:
        slot = ours.get(record.path)
        if slot is None:
            _add(model, record)
        elif slot.kind != record.kind:
            _drop(model, slot.path)
            _add(model, record)
        elif (tuple(slot.tensor.shape), dtype_name(slot.tensor.dtype)) != (record.shape, record.dtype):
            swap(slot.tensor, _empty(record))
    kept = {record.path for record in layout.tensors}
    for slot in found:
        for path in (slot.path, *slot.aliases):
            if path not in kept and path not in layout.aliases:
                _drop(model, path)
    for alias, path in layout.aliases.items():
        _tie(model, alias, path)


def _check_alike(ours: dict[str, str], theirs: dict[str, str]) -> None:
    if ours == theirs:
        return
    names = sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
    told = [f"{path}: {theirs.get(path, 'nothing')} in the keeper, {ours.get(path, 'nothing')} here" for path in names]
    more = f"; and {len(told) - 12} more" if len(told) > 12 else ""
    raise SlotsError(f"the keeper loaded another model: {'; '.join(told[:12])}{more}; load it again (`make load`)")


def _owner(model: nn.Module, path: str) -> tuple[Any, str]:
    prefix, _, leaf = path.rpartition(".")
    owner: Any = model
    for name in prefix.split(".") if prefix else ():
        owner = owner[int(name)] if isinstance(owner, nn.ModuleList) else getattr(owner, name)
    return owner, leaf


def _empty(record: Tensor) -> torch.Tensor:
    return torch.empty_strided(record.shape, record.stride, dtype=dtype_of(record), device="meta")


def _add(model: nn.Module, record: Tensor) -> None:
    try:
        owner, leaf = _owner(model, record.path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return  # inside an object that post-processing makes; `restore.check_processed` looks for it afterwards
    if record.kind == "parameter":
        owner.__dict__.pop(leaf, None)
        owner.register_parameter(leaf, nn.Parameter(_empty(record), requires_grad=False))
    elif record.kind == "buffer":
        owner.__dict__.pop(leaf, None)
        owner.register_buffer(leaf, _empty(record), persistent=record.persistent)
    elif leaf.isidentifier():
        setattr(owner, leaf, _empty(record))


def _drop(model: nn.Module, path: str) -> None:
    try:
        owner, leaf = _owner(model, path)
        delattr(owner, leaf)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return  # held in a container; `restore.bind` refuses a meta tensor that is left


def _tie(model: nn.Module, alias: str, path: str) -> None:
    owner, leaf = _owner(model, alias)
    source, name = _owner(model, path)
    tensor = getattr(source, name)
    if getattr(owner, leaf, None) is tensor:
        return
    registry = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    owner._parameters.pop(leaf, None)
    owner._buffers.pop(leaf, None)
    registry[leaf] = tensor
