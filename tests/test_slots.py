"""What the walk over a model finds."""

import functools

import pytest
import torch
from torch import nn

from weightkeeper.slots import plain_values, set_value, slots


class Helper:
    __slots__ = ("bias",)

    def __init__(self, bias: torch.Tensor):
        self.bias = bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.ones(4), persistent=False)


def paths(model: nn.Module) -> dict[str, str]:
    return {slot.path: slot.kind for slot in slots(model)}


def test_parameters_and_buffers_are_found_with_their_kind_and_persistence():
    """Registered tensors come under their dotted names."""
    model = nn.Sequential(Layer())
    found = {slot.path: (slot.kind, slot.persistent) for slot in slots(model)}
    assert found == {"0.weight": ("parameter", True), "0.scale": ("buffer", True), "0.cache": ("buffer", False)}


def test_a_tied_weight_is_one_slot_with_an_alias():
    """Two names of one object are one tensor."""
    model = nn.ModuleDict({"embed": Layer(), "head": Layer()})
    model["head"].weight = model["embed"].weight
    (slot,) = [slot for slot in slots(model) if slot.tensor is model["embed"].weight]
    assert slot.path == "embed.weight"
    assert slot.aliases == ("head.weight",)


@pytest.mark.parametrize(
    ("hold", "path"),
    [
        (lambda tensor: tensor, "held"),
        (lambda tensor: [0, tensor], "held[1]"),
        (lambda tensor: {"key": (tensor,)}, "held['key'][0]"),
        (Helper, "held.bias"),
        (lambda tensor: functools.partial(print, tensor), "held(1)"),
        (lambda tensor: lambda: tensor, "held<tensor>"),
        (lambda tensor: Helper(tensor).__init__.__func__.__get__(Helper(tensor)), "held.__self__.bias"),
    ],
    ids=["attribute", "list", "dict of tuples", "object with slots", "partial", "closure", "bound method"],
)
def test_a_tensor_outside_the_registries_is_found(hold, path):
    """No way of holding a tensor hides it."""
    model = Layer()
    hidden = torch.zeros(5)
    model.held = hold(hidden)
    (slot,) = [slot for slot in slots(model) if slot.tensor is hidden]
    assert (slot.path, slot.kind) == (path, "attribute")


def test_a_tensor_on_a_parameter_is_found():
    """Weight loaders hang attributes on parameters."""
    model = Layer()
    model.weight.scale_of_it = torch.zeros(1)
    assert paths(model)["weight.scale_of_it"] == "attribute"


def test_a_cycle_ends():
    """Layers refer to their parents."""
    model = nn.Sequential(Layer())
    object.__setattr__(model[0], "parent", [model])
    assert len(slots(model)) == 3


def test_a_reference_to_a_parameter_is_no_second_slot():
    """What a layer holds of its own weight is the weight."""
    model = Layer()
    model.__dict__["same"] = [model.weight]
    assert "same[0]" not in paths(model)


def test_plain_values_can_be_read_and_set_again():
    """Flags that loading sets travel as data."""
    model = nn.Sequential(Layer())
    model[0].has_own_head = False
    assert plain_values(model)["0.has_own_head"] is False
    set_value(model, "0.has_own_head", True)
    assert model[0].has_own_head is True
