"""Which weights count as the same, and how a difference reads."""

import pytest

from weightkeeper import fingerprint
from weightkeeper.errors import Difference, MismatchError

DIGESTS = {"b.safetensors": "b" * 64, "a.safetensors": "a" * 64}
CONDITIONS = {"dtype": "torch.bfloat16", "rank": "0"}


def test_equal_fields_have_no_differences_in_any_order():
    """Fields are compared by name."""
    one = fingerprint.compose(DIGESTS, CONDITIONS)
    other = fingerprint.compose(dict(reversed(DIGESTS.items())), dict(reversed(CONDITIONS.items())))
    assert fingerprint.differences(one, other) == []
    assert fingerprint.digest(one) == fingerprint.digest(other)


def test_other_bytes_in_one_file_are_named_first():
    """C01: two fine-tunes of one base never pass for each other, and the file that differs is said."""
    keeper = fingerprint.compose(DIGESTS, CONDITIONS)
    engine = fingerprint.compose(DIGESTS | {"b.safetensors": "c" * 64}, CONDITIONS | {"dtype": "torch.float16"})
    assert fingerprint.differences(keeper, engine) == [
        Difference("content of b.safetensors", "blake3 bbbbbbbbbbbbbbbb…", "blake3 cccccccccccccccc…"),
        Difference("dtype", "torch.bfloat16", "torch.float16"),
    ]
    assert fingerprint.digest(keeper) != fingerprint.digest(engine)


def test_a_field_that_one_side_lacks_is_a_difference():
    """A variable that only the engine has set counts."""
    (difference,) = fingerprint.differences({}, {"variable VLLM_MOE_PADDING": "1"})
    assert str(difference) == "variable VLLM_MOE_PADDING: the keeper has nothing, the engine has 1"


def test_a_mismatch_reads_as_one_line_with_every_field():
    """The user sees both values of each field."""
    error = MismatchError([Difference("dtype", "a", "b"), Difference("rank", "0", "1")])
    assert error.code == "mismatch"
    assert str(error) == "dtype: the keeper has a, the engine has b; rank: the keeper has 0, the engine has 1"


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("rank", "CUDA_VISIBLE_DEVICES"),
        ("device", "start the engine on a device that the keeper has"),
        ("dtype", "`make load`"),
        ("variable VLLM_MOE_PADDING", "belong on both sides"),
    ],
)
def test_a_mismatch_ends_with_the_device_and_the_remedy(field, remedy):
    """What the engine logs when it goes to disk."""
    _, _, said = str(MismatchError([Difference(field, "0", "1")], "GPU-7f")).rpartition("; GPU-7f: ")
    assert remedy in said


def test_a_long_value_is_cut_in_the_message_only():
    """Values are compared whole."""
    keeper, engine = "x" * 500 + "1", "x" * 500 + "2"
    (difference,) = fingerprint.differences({"hf overrides": keeper}, {"hf overrides": engine})
    assert difference.keeper == "x" * 120 + "… (501 characters)"
