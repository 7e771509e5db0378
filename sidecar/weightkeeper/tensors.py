"""Torch tensors over memory that torch did not allocate, and names and extents of tensors."""

import ctypes
import weakref

import torch

from weightkeeper.errors import MemoryKindError, SlotsError
from weightkeeper.layout import Tensor
from weightkeeper.memory import Region


def bytes_of(region: Region) -> torch.Tensor:
    """All bytes of a region as one uint8 tensor. The region is unmapped when its last view is gone."""
    if region.nbytes <= 0:
        raise MemoryKindError(f"a region of {region.nbytes} bytes has nothing to view")
    if region.device != "cpu":
        owner = _DeviceBytes(region)
        weakref.finalize(owner, region.close)
        return torch.as_tensor(owner, device=region.device)
    array = (ctypes.c_char * region.nbytes).from_address(region.address)
    weakref.finalize(array, region.close)
    return torch.frombuffer(array, dtype=torch.uint8)


class _DeviceBytes:
    """Device memory in the form that torch takes without a copy (the CUDA Array Interface, version 3)."""

    def __init__(self, region: Region):
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),  # torch refuses True; the mapping itself is what is read-only
            "version": 3,
        }


def view(whole: torch.Tensor, record: Tensor) -> torch.Tensor:
    """The tensor that `record` describes, inside the arena's bytes `whole`; nothing is copied.

    Raises:
        SlotsError: the record does not lie inside the arena, or torch has no such dtype.
    """
    dtype = dtype_of(record)
    count = 1
    for size in record.shape:
        count *= size
    if count == 0:
        return torch.empty_strided(record.shape, record.stride, dtype=dtype, device=whole.device)
    width = torch.empty(0, dtype=dtype).element_size()
    last = sum((size - 1) * step for size, step in zip(record.shape, record.stride, strict=True))
    if record.offset % width or record.offset < 0 or record.offset + (last + 1) * width > whole.nbytes:
        raise SlotsError(f"{record.path} lies outside the {whole.nbytes} bytes that the keeper sent")
    empty = torch.empty(0, dtype=dtype, device=whole.device)
    return empty.set_(whole.untyped_storage(), record.offset // width, record.shape, record.stride)


def swap(target: torch.Tensor, source: torch.Tensor) -> None:
    """Let the object `target` be over the bytes of `source`, with its own class and attributes."""
    new = torch.Tensor._make_subclass(type(target), source, False)
    new.__dict__.update(target.__dict__)
    torch.utils.swap_tensors(target, new)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one that `tensor` covers in its storage; equal when it has none."""
    if tensor.numel() == 0:
        return 0, 0
    width = tensor.element_size()
    start = tensor.storage_offset() * width
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * width


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(record: Tensor) -> torch.dtype:
    """The torch dtype of a record.

    Raises:
        SlotsError: this torch has no dtype of that name.
    """
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SlotsError(f"{record.path} has the dtype {record.dtype}, which torch {torch.__version__} does not know")
    return dtype
