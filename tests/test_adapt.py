"""What post-processing did to the loader's model is done to the engine's skeleton."""

import os

import pytest
import torch
from torch import nn

from weightkeeper import adapt
from weightkeeper.capture import pack
from weightkeeper.errors import SlotsError
from weightkeeper.memory.host import HostMemory
from weightkeeper.restore import bind, check
from weightkeeper.slots import slots
from weightkeeper.tensors import bytes_of


class Layer(nn.Module):
    """A quantized layer as it is before post-processing."""

    def __init__(self, scales: int = 2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(scales), requires_grad=False)
        self.register_buffer("zero", torch.empty(1))


def process(layer: Layer) -> None:
    """Repacks the weight to another shape and type, merges scales, drops one tensor and makes others."""
    values = torch.arange(32.0)
    layer.weight = nn.Parameter(values.view(2, 16).to(torch.bfloat16), requires_grad=False)
    layer.merged = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    layer.register_buffer("table", torch.arange(4), persistent=False)
    layer.workspace = torch.full((3,), 7.0)
    del layer.scale
    layer.zero.fill_(5)


def build(scales: int = 2) -> nn.Module:
    return nn.Sequential(Layer(scales), Layer(scales))


@pytest.fixture
def held():
    """The layout of a processed model, and its bytes."""
    model = build()
    before = adapt.skeleton(slots(model))
    for layer in model:
        process(layer)
    expected = {slot.path: slot.tensor.detach().clone() for slot in slots(model)}
    layout, arena = pack(model, HostMemory(), {}, skeleton=before)
    arena.seal()
    descriptors = arena.export()
    whole = bytes_of(HostMemory().map(descriptors, arena.sizes))
    for descriptor in descriptors:
        os.close(descriptor)
    arena.close()
    return layout, whole, expected


def skeleton(scales: int = 2) -> nn.Module:
    with torch.device("meta"):
        return build(scales)


def test_a_skeleton_becomes_what_the_loader_had_and_is_filled(held):
    """Other shapes and types, new parameters, buffers and attributes; consumed ones are gone."""
    layout, whole, expected = held
    model = skeleton()
    adapt.adapt(model, layout)
    bind(model, layout, whole, share=True)
    check(model, layout)
    found = {slot.path: slot for slot in slots(model)}
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert torch.equal(found[path].tensor, tensor), path
    assert not hasattr(model[0], "scale")
    assert not found["0.table"].persistent
    inside = whole.data_ptr() <= model[1].merged.data_ptr() < whole.data_ptr() + whole.nbytes
    assert inside and isinstance(model[1].merged, nn.Parameter)


def test_a_model_that_was_another_before_processing_is_refused(held):
    """C02: a dropped slot has to be one that processing consumed, not one that the loader never had."""
    layout, _, _ = held
    with pytest.raises(SlotsError) as caught:
        adapt.adapt(skeleton(scales=3), layout)
    assert "0.scale: parameter float32 [2] in the keeper, parameter float32 [3] here" in str(caught.value)


def test_a_tie_that_processing_made_is_made_here(held):
    """Two names of one object stay two names of one object."""
    model = build()
    before = adapt.skeleton(slots(model))
    for layer in model:
        process(layer)
    model[1].weight = model[0].weight
    layout, arena = pack(model, HostMemory(), {}, skeleton=before)
    arena.seal()
    again = skeleton()
    adapt.adapt(again, layout)
    bind(again, layout, bytes_of(HostMemory().map(arena.export(), arena.sizes)), share=True)
    check(again, layout)
    assert again[1].weight is again[0].weight


def test_a_tensor_that_did_not_come_back_is_named(held):
    """Every slot is accounted for, also those that processing should have made."""
    layout, whole, _ = held
    model = skeleton()
    adapt.adapt(model, layout)
    bind(model, layout, whole, share=True)
    del model[1].workspace
    with pytest.raises(SlotsError, match=r"1 tensors of the keeper have no place in this model: 1\.workspace"):
        check(model, layout)
