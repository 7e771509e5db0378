"""Every name of vLLM that weightkeeper uses, and what it needs of each. Nothing else imports vLLM.

Written for vLLM 0.30 to 0.33. A name that moves in a later version is mended here and nowhere else.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from vllm import __version__ as VLLM_VERSION
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  the kernel's name of where shm_open(3) has its files

__all__ = ["VLLM_VERSION", "BaseModelLoader", "LoadConfig", "ModelConfig", "VllmConfig", "init_logger"]


def register_loader(load_format: str, loader: type[BaseModelLoader]) -> None:
    """Make `--load-format load_format` use `loader`; a built-in format of that name is replaced."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(load_format)(loader)


def disk_loader(load_config: LoadConfig, load_format: str, extra_config: dict[str, Any]) -> BaseModelLoader:
    """vLLM's own loader for `load_format`, with the rest of the user's load options."""
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(with_format(load_config, load_format, extra_config))


def with_format(load_config: LoadConfig, load_format: str, extra_config: dict[str, Any]) -> LoadConfig:
    """The user's load options with another format."""
    return dataclasses.replace(load_config, load_format=load_format, model_loader_extra_config=extra_config)


def engine_config(arguments: list[str]) -> VllmConfig:
    """What `vllm serve ARGUMENTS…` would run with; `--config FILE` is read as the server reads it.

    Raises:
        ValueError: vLLM refuses the options; SystemExit where its parser does.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(add_help=False, argument_default=argparse.SUPPRESS))
    arguments = parser.parse_args(arguments)
    if getattr(arguments, "model_tag", None) is not None:
        arguments.model = arguments.model_tag
    engine = AsyncEngineArgs.from_cli_args(arguments)
    return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


@contextlib.contextmanager
def process_group(vllm_config: VllmConfig, rank: int, init_method: str) -> Iterator[None]:
    """vLLM's model-parallel groups for one loader, formed before and taken down after.

    Args:
        rank: of this loader, 0 ≤ rank < tensor × pipeline parallel size.
        init_method: where the ranks meet, `file:///…` or `tcp://127.0.0.1:PORT`.
    """
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    parallel = vllm_config.parallel_config
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    # the CPU's communicator names its shared memory after the meeting place, as a worker does
    os.environ.setdefault("VLLM_DIST_IDENT", os.path.basename(os.path.dirname(init_method)))
    if is_cpu():
        unlink_shared_memory()
    try:
        init_distributed_environment(
            world_size=sizes[0] * sizes[1],
            rank=rank,
            distributed_init_method=init_method,
            local_rank=rank,
            backend=current_platform.dist_backend,
        )
        with set_current_vllm_config(vllm_config):
            ensure_model_parallel_initialized(*sizes)
            yield
    finally:
        cleanup_dist_env_and_memory()


@functools.cache
def unlink_shared_memory() -> None:
    """Have the ranks of a CPU engine or load take the names from their shared memory once all have opened it.

    vLLM leaves the files behind at each end, one a rank; memory without a name goes with its last process.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    joined = shared._init_cpu_shm

    def init_cpu_shm(self: object) -> int:
        handle = joined(self)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_SHARED_MEMORY}/{self.group_name}_{self.communicator.rank}")
        return handle

    shared._init_cpu_shm = init_cpu_shm


@contextlib.contextmanager
def default_dtype(model_config: ModelConfig) -> Iterator[None]:
    """Parameters made without a dtype get the model's."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(model_config.dtype):
        yield


def build(vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, device: torch.device) -> nn.Module:
    """The model with uninitialized tensors on `device` (`meta` for a skeleton)."""
    from vllm.model_executor.model_loader.utils import initialize_model

    with default_dtype(model_config), device:
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)


def process_weights(model: nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    """vLLM's own step after loading: layers derive scales, choose kernels, repack."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with default_dtype(model_config):
        process_weights_after_loading(model, model_config, device)


@contextlib.contextmanager
def already_processed() -> Iterator[None]:
    """Let `process_weights` rebuild only what is not a tensor: the weights are processed already."""
    from vllm.model_executor.utils import weights_already_processed

    with weights_already_processed():
        yield


def prepare_device(ordinal: int, device: torch.device) -> None:
    """What a worker does before it builds a model on a GPU: choose the device, make room for workspaces."""
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.accelerator.set_device_index(ordinal)
    init_workspace_manager(device)


def free_cached_memory() -> None:
    """Give what torch's allocator keeps back to the driver."""
    torch.accelerator.empty_cache()


def device_ordinal() -> int:
    """Of the GPU that this process computes on; 0 on the CPU."""
    return 0 if is_cpu() else torch.accelerator.current_device_index()


def replace_request_memory(requested: Callable[[VllmConfig, Any], int | None]) -> None:
    """Let `requested` decide how much memory a GPU worker may use; None leaves it to vLLM.

    `requested` gets the worker's configuration and its memory snapshot (`total_memory`, `free_memory`, `measure()`).
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.worker import utils

    original = utils.request_memory
    if getattr(original, "weightkeeper", False):
        return

    def request_memory(init_snapshot: Any, cache_config: Any, *rest: Any, **named: Any) -> int:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None and (own := requested(vllm_config, init_snapshot)) is not None:
            return own
        return original(init_snapshot, cache_config, *rest, **named)

    request_memory.weightkeeper = True
    utils.request_memory = request_memory
    worker = sys.modules.get("vllm.v1.worker.gpu_worker")
    if worker is not None:
        worker.request_memory = request_memory


@contextlib.contextmanager
def without_cpu_repacking() -> Iterator[None]:
    """On the CPU, let `process_weights` leave matrices as they were loaded, and layers compute on them in place.

    vLLM packs each linear weight into an opaque private object and empties the original. Packed objects cannot be
    shared, so the mapping would be read once and every engine would hold its own copy.
    """
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            packing(layer, remove_weight)  # convolutions and experts have kernels of their own
        else:
            layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


def unprocessable_methods(model: nn.Module) -> dict[str, str]:
    """As `quantization_methods`, only those for which vLLM has no already-processed mode."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    methods: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            methods.setdefault(type(method).__name__, name or "the model")
    return methods


def quantization_methods(model: nn.Module) -> dict[str, str]:
    """Class name of each quantization method in the model → path of the first layer that has it."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    methods: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            methods.setdefault(type(method).__name__, name or "the model")
    return methods


def is_cpu() -> bool:
    """Whether this vLLM computes on the CPU."""
    return current_platform.is_cpu()


def is_cuda() -> bool:
    """Whether this vLLM computes on NVIDIA's GPUs."""
    return current_platform.is_cuda()


def device_name(rank: int) -> str:
    """Name of the engine socket of one rank: the GPU's UUID, or `cpu-RANK`."""
    if is_cpu():
        return f"cpu-{rank}"
    return current_platform.get_device_uuid(torch.accelerator.current_device_index())


def model_rank() -> int:
    """This process's rank in its model's tensor and pipeline parallel group."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_pp_group().rank_in_group * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()


def model_world_size() -> int:
    """Ranks of this process's model in its tensor and pipeline parallel group."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size

    return get_pp_group().world_size * get_tensor_model_parallel_world_size()


def free_device_bytes() -> int | None:
    """Free memory of this process's GPU; None on the CPU."""
    return None if is_cpu() else torch.accelerator.get_memory_info(device_ordinal())[0]


def load_device(vllm_config: VllmConfig, load_config: LoadConfig) -> torch.device:
    """Where the weights of this engine go."""
    return torch.device(load_config.device or vllm_config.device_config.device)


def checkpoint_path(model_config: ModelConfig) -> str:
    """Local directory or file of the model; a Hugging Face name is looked up in the local cache only."""
    if os.path.exists(model_config.model):
        return model_config.model
    from huggingface_hub import snapshot_download

    return snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)


def device_text() -> str:
    """The kind of device that this vLLM computes on: `cpu`, or the GPU's name and compute capability."""
    if is_cpu():
        return current_platform.device_type
    capability = current_platform.get_device_capability()
    return f"{current_platform.get_device_name()} {capability.as_version_str() if capability else ''}".strip()
