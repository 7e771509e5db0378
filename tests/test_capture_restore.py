"""A model goes into an arena and comes back in another process's model, bit by bit."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from weightkeeper import layout
from weightkeeper.capture import pack
from weightkeeper.errors import SlotsError
from weightkeeper.memory.host import HostMemory
from weightkeeper.restore import bind
from weightkeeper.slots import plain_values, slots
from weightkeeper.tensors import bytes_of


class Weight(nn.Parameter):
    """A parameter class with attributes of its own, as vLLM's are."""

    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data, requires_grad=False)


class Model(nn.Module):
    """Every way in which a tensor is held that capture has to bring back."""

    def __init__(self, rows: int = 7):
        super().__init__()
        self.embed = nn.Embedding(rows, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, rows, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.matrix = Weight(torch.empty(6, 4))
        self.matrix.loader = "kept"
        self.register_buffer("scale", torch.empty((), dtype=torch.float64))
        self.register_buffer("angles", torch.empty(3, dtype=torch.float16), persistent=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.holder = [self.matrix]
        self.lookup = {"ids": torch.empty(4, dtype=torch.int64)}
        self.is_loaded = False


def load(model: Model, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slot in slots(model):
        values = torch.randn(slot.tensor.shape, generator=generator) * 100
        slot.tensor.data = values.to(slot.tensor.dtype)
    base = torch.randn(8, 8, generator=generator)
    model.matrix.data = base[1:5, 2:8].t()
    model.is_loaded = True


def mapped(model: Model):
    """The layout and all bytes, through a sealed arena and a read-only mapping."""
    before = plain_values(Model())
    record, arena = pack(model, HostMemory(), before)
    arena.seal()
    descriptors = arena.export()
    region = HostMemory().map(descriptors, arena.sizes)
    for descriptor in descriptors:
        os.close(descriptor)
    arena.close()
    return record, region


def skeleton(rows: int = 7) -> Model:
    with torch.device("meta"):
        return Model(rows)


@pytest.fixture
def loaded():
    model = Model()
    load(model)
    expected = {slot.path: slot.tensor.detach().clone() for slot in slots(model)}
    record, region = mapped(model)
    return expected, record, region


def test_every_tensor_comes_back_equal(loaded):
    """Names, shapes, strides, dtypes and bits."""
    expected, record, region = loaded
    model = skeleton()
    bind(model, record, bytes_of(region), share=True)
    for slot in slots(model):
        assert torch.equal(slot.tensor, expected[slot.path]), slot.path
        assert slot.tensor.dtype == expected[slot.path].dtype
    assert model.matrix.stride() == (1, 8)
    assert model.is_loaded is True


def test_parameters_lie_on_the_mapping_and_everything_else_is_private(loaded):
    """Counted by address, not by what binding says."""
    _, record, region = loaded
    model = skeleton()
    bound = bind(model, record, bytes_of(region), share=True)
    inside = {
        slot.path for slot in slots(model) if region.address <= slot.tensor.data_ptr() < region.address + region.nbytes
    }
    assert inside == {"embed.weight", "matrix"}
    assert bound.mapped_bytes == model.embed.weight.nbytes + model.matrix.nbytes


def test_copy_leaves_nothing_on_the_mapping(loaded):
    """Copy mode owns its bytes."""
    _, record, region = loaded
    model = skeleton()
    bound = bind(model, record, bytes_of(region), share=False)
    start, stop = region.address, region.address + region.nbytes
    assert not [slot.path for slot in slots(model) if start <= slot.tensor.data_ptr() < stop]
    assert bound.mapped_bytes == 0


def test_identity_class_ties_and_attributes_are_kept(loaded):
    """Whoever held a reference to a parameter sees its bytes."""
    _, record, region = loaded
    model = skeleton()
    matrix, holder, tied = model.matrix, model.holder, model.embed.weight
    bind(model, record, bytes_of(region), share=True)
    assert model.matrix is matrix
    assert holder[0] is matrix
    assert model.head.weight is model.embed.weight is tied
    assert type(matrix) is Weight
    assert matrix.loader == "kept"
    assert not matrix.is_meta


def test_a_storage_shared_by_views_is_packed_once():
    """Two views of one storage overlap in the arena."""
    model = nn.Module()
    base = torch.arange(64.0)
    model.first = nn.Parameter(base[:48], requires_grad=False)
    model.second = nn.Parameter(base[16:], requires_grad=False)
    record, region = mapped(model)
    assert record.nbytes == layout.aligned(64 * 4)
    again = nn.Module()
    again.first = nn.Parameter(torch.empty(48, device="meta"), requires_grad=False)
    again.second = nn.Parameter(torch.empty(48, device="meta"), requires_grad=False)
    bind(again, record, bytes_of(region), share=True)
    assert torch.equal(again.first, base[:48])
    assert torch.equal(again.second, base[16:])
    assert again.second.data_ptr() - again.first.data_ptr() == 16 * 4


def test_a_slice_of_a_large_storage_costs_only_its_own_bytes():
    """What no tensor of the model covers is not packed."""
    model = nn.Module()
    model.part = nn.Parameter(torch.empty(1 << 20)[1000:1010], requires_grad=False)
    record, _ = mapped(model)
    assert record.nbytes == layout.aligned(40)


def test_packing_empties_the_original():
    """The peak is the model plus one tensor, not twice the model."""
    model = Model()
    load(model)
    pack(model, HostMemory(), {})
    assert sum(slot.tensor.untyped_storage().nbytes() for slot in slots(model)) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.register_buffer("extra", torch.empty(1, device="meta")), "extra is missing"),
        (lambda model: model.__delattr__("matrix"), "matrix is too many"),
        (
            lambda model: setattr(model, "matrix", nn.Parameter(torch.empty(6, 4, dtype=torch.half, device="meta"))),
            "matrix is a float32 parameter of shape [6, 4] in the keeper and a float16 parameter of shape [6, 4] here",
        ),
        (
            lambda model: setattr(model.head, "weight", nn.Parameter(torch.empty(7, 5, device="meta"))),
            "head.weight is tied to embed.weight on one side only",
        ),
    ],
    ids=["missing", "too many", "other dtype", "untied"],
)
def test_slots_that_do_not_fit_are_named_and_nothing_is_bound(loaded, change, words):
    """C02: the sidecar loaded the model with other switches."""
    _, record, region = loaded
    model = skeleton()
    if "too many" in words:
        model.holder = []
    change(model)
    with pytest.raises(SlotsError) as caught:
        bind(model, record, bytes_of(region), share=True)
    assert words in str(caught.value)
    assert model.embed.weight.is_meta


def test_a_layout_that_points_outside_the_arena_is_refused(loaded):
    """What a keeper says is checked before it is believed."""
    _, record, region = loaded
    beyond = [
        layout.Tensor(t.path, t.kind, t.dtype, t.shape, t.stride, t.offset + (1 << 20), t.persistent)
        for t in record.tensors
    ]
    moved = layout.Layout(tuple(beyond), record.aliases, record.values, record.nbytes)
    with pytest.raises(SlotsError, match="lies outside"):
        bind(skeleton(), moved, bytes_of(region), share=True)


def test_a_write_to_a_mapped_weight_ends_the_writer_alone(tmp_path: Path):
    """C05: the mapping is read-only; the other mapping of the same memory keeps its bytes."""
    model = Model()
    load(model)
    expected = model.embed.weight.detach().clone()
    record, arena = pack(model, HostMemory(), {})
    arena.seal()
    (descriptor,) = arena.export()
    mine = bytes_of(HostMemory().map([descriptor], arena.sizes))
    offset = next(t.offset for t in record.tensors if t.path == "embed.weight")
    script = f"""
        from weightkeeper.memory.host import HostMemory
        from weightkeeper.tensors import bytes_of
        whole = bytes_of(HostMemory().map([{descriptor}], [{arena.sizes[0]}]))
        print("mapped", flush=True)
        whole[{offset}:].fill_(1)
        print("written", flush=True)
    """
    writer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], pass_fds=[descriptor], capture_output=True, text=True
    )
    assert writer.stdout == "mapped\n"
    assert writer.returncode == -11, writer.stderr
    start = expected.numel() * 2
    assert torch.equal(mine[offset : offset + start].view(torch.bfloat16).view_as(expected), expected)
    os.close(descriptor)


def test_the_mapping_goes_with_its_last_tensor(loaded):
    """A model that is gone leaves no mapping behind."""
    _, record, region = loaded
    address = f"{region.address:x}-"
    model = skeleton()
    bind(model, record, bytes_of(region), share=True)
    gc.collect()
    assert address in Path("/proc/self/maps").read_text()
    del model
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text()
