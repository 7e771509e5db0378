"""A model loaded from disk through vLLM, and then packed into memory that can be shared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightkeeper import adapt, identity, vllm_api
from weightkeeper.capture import pack
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.errors import UnverifiedQuantizationError
from weightkeeper.layout import Layout
from weightkeeper.memory import Arena, Memory, cuda_vmm
from weightkeeper.memory.host import HostMemory
from weightkeeper.options import Options
from weightkeeper.protocol import Receipt
from weightkeeper.slots import plain_values, slots
from weightkeeper.vllm_api import ModelConfig, VllmConfig

Progress = Callable[[str, int, int], None]
"""Told (stage, bytes done, bytes in all)."""

SHARED_BEFORE_PROCESSING = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Quantization method classes behind the methods of `verified.CPU`."""

SHARED_PROCESSED = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Quantization method classes behind the methods of `verified.CUDA`."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What loading and packing gave.

    Attributes:
        model: its tensors are empty; on a GPU its weights were post-processed before they were packed.
        arena: filled, not yet sealed.
    """

    model: nn.Module
    layout: Layout
    arena: Arena
    memory: Memory


def load_packed(
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    options: Options,
    checkpoint: Checkpoint,
    receipts: Callable[[], tuple[Receipt, ...]],
    progress: Progress,
    prefix: str = "",
) -> Packed:
    """Load one rank of a model inside vLLM's process group, and pack it.

    Args:
        receipts: gives those of the checkpoint's files, taken before they were read; asked for once they were.

    Raises:
        UnverifiedQuantizationError: a layer's method has no evidence; nothing was read.
        CheckpointChangedError: a file is not what its receipt says.
        MemoryKindError: there is no room.
    """
    on_cpu = vllm_api.is_cpu()
    device = vllm_api.load_device(vllm_config, vllm_config.load_config)
    model = vllm_api.build(vllm_config, model_config, prefix, device)
    check_methods(model, on_cpu)
    before = plain_values(model)
    skeleton = None if on_cpu else adapt.skeleton(slots(model))
    load_format = options.disk_load_format
    if load_format == "auto":
        load_format = checkpoint.load_format  # the files that were hashed, and no others
    disk = vllm_api.disk_loader(vllm_config.load_config, load_format, options.disk_extra_config)
    with vllm_api.default_dtype(model_config), _counted(model, checkpoint.nbytes, progress):
        disk.load_weights(model, model_config)
    identity.check_unchanged(checkpoint, receipts())
    if on_cpu:
        memory: Memory = HostMemory(freed_while_filling=checkpoint.nbytes)
    else:
        progress("post-processing", 0, 0)
        vllm_api.process_weights(model, model_config, device)
        memory = cuda_vmm.open_device(vllm_api.device_ordinal(), vllm_api.free_cached_memory)
    layout, arena = pack(model, memory, before, lambda *bytes_: progress("packing", *bytes_), skeleton=skeleton)
    return Packed(model, layout, arena, memory)


def check_methods(model: nn.Module, on_cpu: bool) -> None:
    """Refuse a model with a layer whose quantization method has no evidence.

    Raises:
        UnverifiedQuantizationError: with the layer and the verified methods.
    """
    allowed = SHARED_BEFORE_PROCESSING if on_cpu else SHARED_PROCESSED
    methods = vllm_api.quantization_methods(model)
    refused = {method: layer for method, layer in methods.items() if method not in allowed}
    if not on_cpu:
        refused |= vllm_api.unprocessable_methods(model)
    for method, layer in refused.items():
        raise UnverifiedQuantizationError(
            f"{layer} uses {method}, which is not verified for sharing on this kind of device "
            f"(verified: {', '.join(sorted(allowed))}); "
            "serve this model with vLLM's own load format, without the sidecar"
        )


class _counted:
    """While it lasts, tells how many bytes of the checkpoint have gone into the model."""

    def __init__(self, model: nn.Module, total: int, progress: Progress):
        self._model, self._total, self._progress = model, total, progress

    def __enter__(self) -> None:
        load_weights = self._model.load_weights

        def counting(weights: Any, *args: Any, **kwargs: Any) -> Any:
            return load_weights(self._count(weights), *args, **kwargs)

        self._model.load_weights = counting

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights

    def _count(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        done = 0
        for name, tensor in weights:
            yield name, tensor
            done += tensor.nbytes
            self._progress("reading", min(done, self._total), self._total)
