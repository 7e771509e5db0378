"""Every tensor that a model can reach: parameters, buffers, and what lies in other attributes.

Attention layers and routers keep references outside the module tree, in lists, helper objects and closures. The walk
follows those too, so that no tensor of the model is missed, and names each distinct tensor once.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightkeeper.layout import Kind

MAX_OBJECTS = 2_000_000
"""Objects that one walk may visit. A 100-layer model has some 50,000; past this the walk has left the model."""

_MODULE_REGISTRIES = frozenset(name for name in nn.Module().__dict__ if name.startswith("_"))
_LEAVES = (
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    type(None),
    type,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """One distinct tensor of a model.

    Attributes:
        path: the first path by which it was met; the module tree comes before everything else.
        kind: how it is held at that path.
        tensor: the object itself; binding keeps this identity.
        persistent: False for a buffer outside the state dict.
        aliases: further names of the same object in the module tree.
    """

    path: str
    kind: Kind
    tensor: torch.Tensor
    persistent: bool
    aliases: tuple[str, ...] = ()


def slots(model: nn.Module) -> list[Slot]:
    """All distinct tensors, in a repeatable order: module tree first, then other attributes.

    Raises:
        RuntimeError: the walk visited MAX_OBJECTS objects, so something outside the model is reachable from it.
    """
    found: dict[int, Slot] = {}
    for name, kind, tensor, persistent in _registered(model):
        known = found.get(id(tensor))
        if known is None:
            found[id(tensor)] = Slot(name, kind, tensor, persistent)
        elif name != known.path:
            aliases = (*known.aliases, name)
            found[id(tensor)] = Slot(known.path, known.kind, tensor, known.persistent, aliases)
    for path, tensor in _attributes(model):
        if id(tensor) not in found:
            found[id(tensor)] = Slot(path, "attribute", tensor, persistent=False)
    return list(found.values())


def _registered(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor, bool]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield dotted + leaf, "parameter", parameter, True
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                yield dotted + leaf, "buffer", buffer, leaf not in module._non_persistent_buffers_set


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors outside the registries, breadth first, so that a path is the shortest there is."""
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque(model.named_modules())
    queue.extend((path, tensor) for path, _, tensor, _ in _registered(model))
    while queue:
        path, thing = queue.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if len(seen) > MAX_OBJECTS:
            raise RuntimeError(f"over {MAX_OBJECTS} objects hang on this model, the last one at {path}")
        if isinstance(thing, torch.Tensor):
            yield path, thing
        queue.extend((p, child) for p, child in _children(path, thing) if not isinstance(child, _LEAVES))


def _children(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    dotted = f"{path}." if path else ""
    if isinstance(thing, dict):
        yield from ((f"{path}[{key!r}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(thing))
    elif isinstance(thing, functools.partial):
        yield from ((f"{path}({index})", v) for index, v in enumerate((thing.func, *thing.args, thing.keywords)))
    elif isinstance(thing, types.MethodType):
        yield f"{path}.__self__", thing.__self__
        yield from _children(path, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _closure(path, thing)
    else:
        yield from ((dotted + name, value) for name, value in _fields(thing))


def _fields(thing: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict):
        skipped = _MODULE_REGISTRIES if isinstance(thing, nn.Module) else frozenset()
        yield from ((name, value) for name, value in list(attributes.items()) if name not in skipped)
    for cls in type(thing).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _closure(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{path}<{name}>", cell.cell_contents
        except ValueError:
            continue  # a name that is not bound yet
    yield from ((f"{path}<default {i}>", value) for i, value in enumerate(function.__defaults__ or ()))


def plain_values(model: nn.Module) -> dict[str, bool | int | float | str | None]:
    """Path → plain attribute of every module; loading sets some of them (`has_own_lm_head`, say)."""
    values: dict[str, bool | int | float | str | None] = {}
    for prefix, module in model.named_modules():
        dotted = f"{prefix}." if prefix else ""
        for name, value in module.__dict__.items():
            if type(value) in (bool, int, float, str, type(None)):
                values[dotted + name] = value
    return values


def set_value(model: nn.Module, path: str, value: bool | int | float | str | None) -> None:
    """Set one of `plain_values` on the module that has it."""
    prefix, _, name = path.rpartition(".")
    setattr(model.get_submodule(prefix) if prefix else model, name, value)
