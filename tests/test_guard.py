"""Writes into read-only weights are seen before a kernel runs."""

import pytest
import torch

from weightkeeper.errors import UnsupportedError
from weightkeeper.guard import ReadOnly


@pytest.fixture
def weight():
    return torch.arange(16.0).view(4, 4)


def guard(tensor: torch.Tensor) -> ReadOnly:
    return ReadOnly(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.fill_(1),
        lambda weight: weight.add_(1),
        lambda weight: weight[2].mul_(2),
        lambda weight: weight.copy_(torch.zeros(4, 4)),
        lambda weight: torch.add(torch.ones(4, 4), 1, out=weight),
        lambda weight: weight.data.zero_(),
        lambda weight: torch._foreach_add_([weight], 1.0),
    ],
    ids=["fill", "add", "a row", "other bytes copied", "out=", "through .data", "a list of tensors"],
)
def test_a_write_into_the_range_is_refused_and_nothing_changes(weight, write):
    """C05: with the operation, the shape and the remedy."""
    before = weight.clone()
    with guard(weight), pytest.raises(UnsupportedError, match=r"shared, read-only .* use `mode: copy`"):
        write(weight)
    assert torch.equal(weight, before)


def test_a_copy_of_what_is_there_is_skipped(weight):
    """Multi-head latent attention copies in place what the loader has copied before."""
    with guard(weight) as active:
        weight.copy_(weight.clone().to(torch.float64))
        weight[1].copy_(torch.tensor([4.0, 5.0, 6.0, 7.0]))
    assert active.skipped == 2


def test_everything_else_goes_on_as_usual(weight):
    """Reads, and writes elsewhere."""
    other = torch.zeros(4, 4)
    with guard(weight):
        other.copy_(weight)
        other.add_(weight @ weight)
    assert torch.equal(other, weight + weight @ weight)
