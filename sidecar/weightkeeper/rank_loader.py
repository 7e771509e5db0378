"""One rank's weights through vLLM: build, read, pack, publish. Importing this imports vLLM."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weightkeeper import adapt, fingerprint, identity, verified, vllm_api
from weightkeeper.capture import pack
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.errors import ConfigError, UnverifiedQuantizationError
from weightkeeper.memory import Memory, cuda_vmm
from weightkeeper.memory.host import HostMemory
from weightkeeper.options import Options
from weightkeeper.protocol import Publish, Receipt
from weightkeeper.slots import plain_values, slots

SHARED_BEFORE_PROCESSING = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Quantization method classes behind the method `none` of `verified.CPU`."""


SHARED_PROCESSED = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Fp8LinearMethod", "Fp8KVCacheMethod"}
)
"""Quantization method classes behind the methods of `verified.CUDA`."""


def load_rank(
    config: str,
    options: Options,
    checkpoint: Checkpoint,
    receipts: tuple[Receipt, ...],
    progress: Callable[[str, int, int], None],
    publish: Callable[[Publish, list[int]], None],
    rank: int = 0,
) -> None:
    """Load rank `rank` of the model that vLLM's config file names, and publish it.

    Args:
        receipts: of the checkpoint's files, taken before; they have to be true still when vLLM has read them.
        progress: told (stage, bytes done, bytes in all).
        publish: takes the message and the descriptors that go with it; they are closed afterwards.

    Raises:
        WeightkeeperError: the options, the quantization or the files are refused.
    """
    vllm_config = _vllm_config(config)
    model_config = vllm_config.model_config
    verified.check(model_config.quantization, "cpu" if vllm_api.is_cpu() else "cuda")
    parallel = vllm_config.parallel_config
    world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if world_size != 1:
        raise ConfigError(
            f"{config}: tensor and pipeline parallel sizes above 1 are not supported yet, found {world_size} ranks"
        )
    on_cpu = vllm_api.is_cpu()
    device = vllm_api.load_device(vllm_config, vllm_config.load_config)
    if not on_cpu:
        vllm_api.prepare_device(rank, device)
    conditions = vllm_api.conditions(vllm_config, model_config, rank, options.disk_load_format)
    meeting = f"file://{os.environ['WEIGHTKEEPER_SCRATCH']}/ranks"
    with vllm_api.process_group(vllm_config, rank, meeting):
        model = vllm_api.build(vllm_config, model_config, "", device)
        _check_methods(model, on_cpu)
        before = plain_values(model)
        skeleton = None if on_cpu else adapt.skeleton(slots(model))
        load_format = options.disk_load_format
        if load_format == "auto":
            load_format = checkpoint.load_format  # the files that were hashed, and no others
        disk = vllm_api.disk_loader(vllm_config.load_config, load_format, options.disk_extra_config)
        with vllm_api.default_dtype(model_config), _counted(model, checkpoint.nbytes, progress):
            disk.load_weights(model, model_config)
        identity.check_unchanged(checkpoint, receipts)
        if on_cpu:
            memory: Memory = HostMemory(freed_while_filling=checkpoint.nbytes)
        else:
            progress("post-processing", 0, 0)
            vllm_api.process_weights(model, model_config, device)
            memory = cuda_vmm.open_device(vllm_api.device_ordinal(), vllm_api.free_cached_memory)
        layout, arena = pack(
            model, memory, before, lambda done, total: progress("packing", done, total), skeleton=skeleton
        )
        name = vllm_api.device_name(rank)
    arena.seal()
    descriptors = arena.export()
    try:
        publish(
            Publish(
                device=name,
                rank=rank,
                world_size=world_size,
                model=model_config.model,
                fingerprint=fingerprint.compose({r.name: r.blake3 for r in receipts}, conditions),
                receipts=receipts,
                kind=memory.kind,
                sizes=arena.sizes,
                layout=layout,
            ),
            descriptors,
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        arena.close()


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

    def __init__(self, model: nn.Module, total: int, progress: Callable[[str, int, int], None]):
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
