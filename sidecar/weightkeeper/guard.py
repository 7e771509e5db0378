"""Stops writes into read-only weights before a kernel runs, where the GPU itself would only fault."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightkeeper.errors import UnsupportedError


class ReadOnly(TorchDispatchMode):
    """While active, an operation that would write into a range of memory is skipped or refused.

    A copy of bytes that are already there is skipped: layers that derive weights from others (multi-head latent
    attention) write what the loader's copy of them has written before.

    Args:
        start: first address of the range.
        nbytes: its size.
    """

    def __init__(self, start: int, nbytes: int):
        super().__init__()
        self._start, self._stop = start, start + nbytes
        self.skipped = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if self._covers(tensor):
                    return self._written(func, tensor, args)
        return func(*args, **kwargs)

    def _covers(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() == 0:
            return False
        return self._start <= tensor.data_ptr() < self._stop

    def _written(self, func: Any, tensor: torch.Tensor, args: Any) -> torch.Tensor:
        if func is torch.ops.aten.copy_.default:
            source = args[1].to(device=tensor.device, dtype=tensor.dtype).expand_as(tensor)
            if torch.equal(tensor, source):
                self.skipped += 1
                return tensor
        raise UnsupportedError(
            f"{func} would write into a shared, read-only {tensor.dtype} weight of shape {list(tensor.shape)}; "
            "use `mode: copy` for this model"
        )
