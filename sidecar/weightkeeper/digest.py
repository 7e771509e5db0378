"""A digest of bytes where they lie, on the CPU or a GPU, by torch's integer arithmetic alone, so that both agree.

An integrity check against corruption, not a cryptographic one: the multipliers are fixed and known, so who wants to
can make two contents with one digest. What happens by accident does not stay hidden. Each block of 256 KiB is two sums
mod 2^64 of its 32-bit words times odd 64-bit multipliers, one for each place in the block ("multilinear hashing",
Lemire and Kaser 2014). One changed word always changes both sums; other changes go unseen with about 2^-64. The sums
of all blocks in order, and the length, are then hashed with BLAKE3 to 32 hex digits.
"""

import contextlib
import functools
import struct
from collections.abc import Iterator

import torch
from blake3 import blake3

BLOCK_BYTES = 256 << 10
"""Under one pair of sums. Multipliers for it take 1 MiB, once on each device."""

BATCH_BYTES = {"cpu": 2 << 20, "cuda": 8 << 20}
"""Type of device → read at once: what stays in its cache, or what keeps it busy. Products take twice as much."""

DIGEST_BYTES = 16

_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""Where the two rows of multipliers start: the first fractional bits of pi."""


def digest(data: torch.Tensor) -> str:
    """32 hex digits over all bytes of `data`, a contiguous one-dimensional uint8 tensor on any device.

    Besides `data`, under 32 MiB of memory are used on its device, whatever its size. One thread on the CPU.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"a digest is taken over contiguous bytes, found {data.dtype} of shape {list(data.shape)}")
    total = blake3(struct.pack("<Q", data.numel()))
    with _one_thread():
        found = _sums(data).t().flatten().tolist()
    total.update(struct.pack(f"<{len(found)}q", *found))
    return total.hexdigest(length=DIGEST_BYTES)


def _sums(data: torch.Tensor) -> torch.Tensor:
    """Both sums of each block, one column a block; the last block is filled up with zeros."""
    whole = data.numel() // BLOCK_BYTES * BLOCK_BYTES
    batch = BATCH_BYTES[data.device.type]
    found = torch.empty((2, -(-data.numel() // BLOCK_BYTES)), dtype=torch.int64, device=data.device)
    products = torch.empty(min(max(whole, BLOCK_BYTES), batch) // 4, dtype=torch.int64, device=data.device)
    for start in range(0, whole, batch):
        _sum_blocks(data[start : min(start + batch, whole)], products, found[:, start // BLOCK_BYTES :])
    if whole < data.numel():
        last = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        last[: data.numel() - whole] = data[whole:]
        _sum_blocks(last, products, found[:, whole // BLOCK_BYTES :])
    return found


def _sum_blocks(data: torch.Tensor, products: torch.Tensor, found: torch.Tensor) -> None:
    """Write both sums of each block of `data`, whole blocks, to the columns of `found`."""
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    words = data.view(torch.int32).view(-1, BLOCK_BYTES // 4)
    if data.device.type == "cpu":
        words = words.long()  # a GPU widens them on the way
    products = products[: words.numel()].view(words.shape)
    for row, multipliers in enumerate(_multipliers(data.device)):
        torch.mul(words, multipliers, out=products)  # int32 times int64 is int64, which wraps
        torch.sum(products, dim=1, out=found[row, : words.shape[0]])


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> torch.Tensor:
    """Two rows of odd 64-bit numbers, one for each word of a block."""
    count = BLOCK_BYTES // 4
    rows = [_splitmix(torch.arange(count, dtype=torch.int64, device="cpu"), seed) for seed in _SEEDS]
    return (torch.stack(rows) | 1).to(device)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Steps this short get slower with more threads, where other programs use the cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _splitmix(index: torch.Tensor, seed: int) -> torch.Tensor:
    """The numbers of the SplitMix64 generator at these places (Steele, Lea and Flood 2014), as signed 64 bits."""
    z = (index + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in; torch's own shift brings the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
