"""The digest that `verify` compares: any change by accident shows, wherever the bytes lie."""

import struct

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightkeeper.digest import BATCH_BYTES, BLOCK_BYTES, digest

LENGTHS = [0, 1, 3, 4, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, BATCH_BYTES["cpu"] + BLOCK_BYTES + 7]


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def multiplier(seed: int, place: int) -> int:
    """One number of SplitMix64, by Python's own integers."""
    mask = (1 << 64) - 1
    z = (seed + (place + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return (z ^ z >> 31) | 1


@pytest.mark.parametrize("nbytes", [0, 1, 5, BLOCK_BYTES + 9])
def test_it_is_what_its_description_says(nbytes):
    """Two sums of signed 32-bit words times odd numbers a block, then BLAKE3 over length and sums."""
    data = bytes(random_bytes(nbytes).tolist())
    expected = blake3(struct.pack("<Q", nbytes))
    for start in range(0, nbytes, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        words = struct.unpack(f"<{-(-len(block) // 4)}i", block + bytes(-len(block) % 4))
        for seed in (0x243F6A8885A308D3, 0x13198A2E03707344):
            total = sum(word * multiplier(seed, place) for place, word in enumerate(words))
            expected.update(struct.pack("<Q", total % (1 << 64)))
    assert digest(random_bytes(nbytes)) == expected.hexdigest(length=16)


@given(st.sampled_from(LENGTHS[1:]), st.data())
def test_one_changed_byte_changes_it(nbytes, data):
    """At every place, by every value."""
    whole = random_bytes(nbytes)
    before = digest(whole)
    whole[data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    assert digest(whole) != before


@given(st.integers(2, 3 * BLOCK_BYTES // 4), st.data())
def test_two_exchanged_words_change_it(count, data):
    """Order matters, also where the words differ in their highest bit alone."""
    words = random_bytes(count * 4).view(torch.int32)
    one = data.draw(st.integers(0, count - 2))
    other = data.draw(st.integers(one + 1, count - 1))
    words[other] = words[one] ^ data.draw(st.sampled_from([1, 1 << 15, -(1 << 31), -1]))
    before = digest(words.view(torch.uint8))
    words[one], words[other] = words[other].item(), words[one].item()
    assert digest(words.view(torch.uint8)) != before


@given(st.integers(0, 2 * BLOCK_BYTES), st.integers(1, 64))
def test_length_counts(nbytes, more):
    """Zeros at the end are not the same as nothing."""
    whole = torch.zeros(nbytes + more, dtype=torch.uint8)
    assert digest(whole) != digest(whole[:nbytes])


def test_exchanged_blocks_change_it():
    """Each block has the same multipliers; their order counts all the same."""
    whole = random_bytes(2 * BLOCK_BYTES)
    turned = torch.cat([whole[BLOCK_BYTES:], whole[:BLOCK_BYTES]])
    assert digest(whole) != digest(turned)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_does_not_depend_on_where_the_bytes_lie(nbytes):
    """The same at odd addresses, and on one thread or several, which stay as many as they were."""
    data = random_bytes(nbytes)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    threads = torch.get_num_threads()
    assert digest(shifted) == digest(data)
    assert torch.get_num_threads() == threads


def test_only_contiguous_bytes_have_one():
    """Anything else is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"over contiguous bytes, found torch\.float32 of shape \[2\]"):
        digest(torch.zeros(2))
    with pytest.raises(ValueError, match="contiguous"):
        digest(torch.zeros(8, dtype=torch.uint8)[::2])
