"""Where each tensor of a model lies inside an arena. Plain data, no torch: it crosses the socket as JSON."""

from typing import Literal

import msgspec

ALIGNMENT = 512
"""Bytes. Every storage starts at a multiple of it; what CUDA kernels and AVX-512 loads ask for is smaller."""

Kind = Literal["parameter", "buffer", "attribute"]


class Tensor(msgspec.Struct, frozen=True):
    """One tensor that can be reached from the model.

    Attributes:
        path: dotted path from the model, `model.layers.0.mlp.gate_up_proj.weight`; items of containers as `[key]`.
        kind: a registered parameter, a registered buffer, or a tensor held in any other way.
        dtype: torch's name without the prefix, `bfloat16`.
        shape: elements in each dimension.
        stride: elements between neighbours in each dimension.
        offset: bytes from the start of the arena to the first element.
        persistent: False for a buffer that is not part of the state dict.
    """

    path: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    persistent: bool = True


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of one storage were when they were packed.

    Attributes:
        path: of the storage's first tensor.
        offset: bytes from the start of the arena.
        nbytes: under the digest; all tensors of the storage lie inside.
        value: 32 hex digits, see `weightkeeper.digest`.
    """

    path: str
    offset: int
    nbytes: int
    value: str


class Layout(msgspec.Struct, frozen=True):
    """A whole model in one arena.

    Attributes:
        tensors: each distinct tensor once; views of one storage overlap in the arena.
        aliases: path → path of the tensor that is the same object (tied weights).
        values: path → plain value that loading set on a module (`has_own_lm_head`, say).
        nbytes: size of the arena in bytes.
        processed: the tensors are as vLLM's post-processing left them, not as they were loaded.
        skeleton: where processed, path → kind, dtype and shape of each slot before loading.
        digests: one for each storage, for `weightkeeper verify`; none from loaders that took none.
    """

    tensors: tuple[Tensor, ...]
    aliases: dict[str, str]
    values: dict[str, bool | int | float | str | None]
    nbytes: int
    processed: bool = False
    skeleton: dict[str, str] = {}
    digests: tuple[Digest, ...] = ()


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment
