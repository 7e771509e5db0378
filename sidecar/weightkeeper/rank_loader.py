"""One rank's weights through vLLM: build, read, pack, publish. Importing this imports vLLM."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightkeeper import adapt, fingerprint, identity, verified, vllm_api
from weightkeeper.capture import pack
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.errors import ConfigError, UnverifiedQuantizationError
from weightkeeper.layout import Layout
from weightkeeper.memory import Arena, Memory, MemoryKind, cuda_vmm
from weightkeeper.memory.host import HostMemory
from weightkeeper.options import Options
from weightkeeper.protocol import Publish, Receipt
from weightkeeper.slots import plain_values, slots

Progress = Callable[[str, int, int], None]

SHARED_BEFORE_PROCESSING = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Quantization method classes behind the method `none` of `verified.CPU`."""


SHARED_PROCESSED = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Fp8LinearMethod", "Fp8KVCacheMethod"}
)
"""Quantization method classes behind the methods of `verified.CUDA`."""


class RankLoader:
    """Loads ranks of the model that vLLM's config file names; one a process.

    Args:
        config: path of the file.
        receipts: of the checkpoint's files, taken before; they have to be true still when vLLM has read them.
        scratch: directory in which the ranks of one load meet.

    Attributes:
        world_size: number of ranks.

    Raises:
        WeightkeeperError: vLLM refuses the options, or the quantization is not verified.
    """

    def __init__(
        self, config: str, options: Options, checkpoint: Checkpoint, receipts: tuple[Receipt, ...], scratch: Path
    ):
        self._config = _vllm_config(config)
        self._options = options
        self._checkpoint = checkpoint
        self._receipts = receipts
        self._scratch = scratch
        self._on_cpu = vllm_api.is_cpu()
        verified.check(self._config.model_config.quantization, "cpu" if self._on_cpu else "cuda")
        parallel = self._config.parallel_config
        self.world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if parallel.data_parallel_size > 1:
            raise ConfigError(f"{config}: data-parallel-size {parallel.data_parallel_size} is not supported yet; use 1")

    def load(self, rank: int, progress: Progress, publish: Callable[[Publish, list[int]], None]) -> None:
        """Load one rank and publish it.

        Args:
            rank: 0 ≤ rank < world_size; all ranks have to be loading at the same time.
            progress: told (stage, bytes done, bytes in all).
            publish: takes the message and the descriptors that go with it; they are closed afterwards.

        Raises:
            WeightkeeperError: the model's layers, its files or the memory are refused.
        """
        model_config = self._config.model_config
        device = vllm_api.load_device(self._config, self._config.load_config)
        if not self._on_cpu:
            vllm_api.prepare_device(rank, device)
        conditions = vllm_api.conditions(self._config, model_config, rank, self._options.disk_load_format)
        with vllm_api.process_group(self._config, rank, f"file://{self._scratch}/ranks"):
            layout, arena, kind = self._pack(device, progress)
            name = vllm_api.device_name(rank)
        arena.seal()
        message = Publish(
            device=name,
            rank=rank,
            world_size=self.world_size,
            model=model_config.model,
            fingerprint=fingerprint.compose({r.name: r.blake3 for r in self._receipts}, conditions),
            receipts=self._receipts,
            kind=kind,
            sizes=arena.sizes,
            layout=layout,
        )
        descriptors = arena.export()
        try:
            publish(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            arena.close()

    def _pack(self, device: torch.device, progress: Progress) -> tuple[Layout, Arena, MemoryKind]:
        model_config = self._config.model_config
        model = vllm_api.build(self._config, model_config, "", device)
        _check_methods(model, self._on_cpu)
        before = plain_values(model)
        skeleton = None if self._on_cpu else adapt.skeleton(slots(model))
        with vllm_api.default_dtype(model_config), _counted(model, self._checkpoint.nbytes, progress):
            self._disk().load_weights(model, model_config)
        identity.check_unchanged(self._checkpoint, self._receipts)
        if self._on_cpu:
            memory: Memory = HostMemory(freed_while_filling=self._checkpoint.nbytes)
        else:
            progress("post-processing", 0, 0)
            vllm_api.process_weights(model, model_config, device)
            memory = cuda_vmm.open_device(vllm_api.device_ordinal(), vllm_api.free_cached_memory)
        layout, arena = pack(model, memory, before, lambda *bytes_: progress("packing", *bytes_), skeleton=skeleton)
        return layout, arena, memory.kind

    def _disk(self) -> vllm_api.BaseModelLoader:
        load_format = self._options.disk_load_format
        if load_format == "auto":
            load_format = self._checkpoint.load_format  # the files that were hashed, and no others
        return vllm_api.disk_loader(self._config.load_config, load_format, self._options.disk_extra_config)


def _vllm_config(config: str) -> vllm_api.VllmConfig:
    try:
        return vllm_api.engine_config(["--config", config])
    except SystemExit as error:
        raise ConfigError(f"{config}: vLLM does not accept these options; its own message is in the log") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{config}: vLLM does not accept these options: {error}") from error


def _check_methods(model: nn.Module, on_cpu: bool) -> None:
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
