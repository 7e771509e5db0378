"""Everything that the measured size of the KV cache depends on, read off a vLLM worker before it measures.

The size that is kept is the one that vLLM plans with after measuring, so a start that uses it has as many blocks. vLLM
has a startup plan of its own; it keeps another value (the graphs' memory is counted differently, so blocks would not
be the same), its key lacks the share of the GPU, the driver, multimodal limits and how weights are loaded, and with
several ranks one may use it while another measures, and waits for ever.
"""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from vllm import envs

from weightkeeper import __version__, nvml, vllm_api
from weightkeeper.kv_size import KvSize
from weightkeeper.mapped_loader import MappedLoader

VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)  # fmt: skip
"""Variables that are not vLLM's and change how much memory a process takes."""

WEIGHTS_STEP = 256 << 20
"""In which the weights' bytes inside the process are told apart: to the byte they change from start to start."""

MAX_VALUE = 1000
"""Characters of a field's value; a longer one is kept as its digest."""

_DRIVER = Path("/proc/driver/nvidia/version")
_WEIGHT_ENDS = (".safetensors", ".bin", ".pt", ".json", ".gguf")


def of(worker: Any) -> KvSize:
    """The file for this worker's size.

    Raises:
        Exception: something that the size depends on cannot be told; it must not be used or kept then.
    """
    directory = Path(envs.VLLM_CACHE_ROOT) / "weightkeeper" / "kv_size"
    return KvSize(directory, fields(worker), int(worker.init_snapshot.free_memory))


def fields(worker: Any) -> dict[str, str]:
    """Name → value of everything that the size depends on."""
    config = worker.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    compilation, scheduler = config.compilation_config, config.scheduler_config
    found = {
        "vllm config": config.compute_hash(),
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enforce_eager": model.enforce_eager,
        "graph sizes": compilation.cudagraph_capture_sizes,
        "graph mode": compilation.cudagraph_mode,
        "multimodal": _plain(model.multimodal_config),
        "API servers": getattr(parallel, "_api_process_count", 1),
        "load format": config.load_config.load_format,
        "loader's options": _digest(config.load_config.model_loader_extra_config),
        "weights outside": weights_outside(worker),
        "weights inside": int(worker.model_runner.model_memory_usage) // WEIGHTS_STEP,
        "weights": _stamps(vllm_api.checkpoint_path(model)),
        "requested bytes": int(worker.requested_memory),
        "vllm's variables": _digest(envs.compile_factors()),
        "gpu": vllm_api.device_name(worker.rank),
        "gpu kind": vllm_api.device_text(),
        "gpu bytes": int(worker.init_snapshot.total_memory),
        "driver": driver_version(),
        "rank": worker.rank,
        "ranks": parallel.world_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": vllm_api.VLLM_VERSION,
        "weightkeeper": __version__,
    }
    found |= {f"variable {name}": os.environ.get(name) for name in VARIABLES}
    return {name: _text(value) for name, value in found.items()}


def weights_outside(worker: Any) -> bool:
    """Whether the weights are a mapping of ours, which vLLM's own accounts do not have."""
    load_weights = getattr(worker.model_runner.model, "load_weights", None)
    return getattr(load_weights, "__func__", None) is MappedLoader._refuse_weights


def driver_version() -> str:
    """As `580.159.04`.

    Raises:
        RuntimeError: it cannot be told.
    """
    try:
        if found := re.search(r"\b\d+\.\d+(\.\d+)*\b", _DRIVER.read_text().partition("\n")[0]):
            return found[0]
    except OSError:
        pass
    if (bindings := nvml.bindings()) is None:
        raise RuntimeError(f"the driver's version cannot be told: {_DRIVER} does not say it, and NVML is not there")
    try:
        return nvml.text(bindings.nvmlSystemGetDriverVersion())
    except bindings.NVMLError as error:
        raise RuntimeError(f"the driver's version cannot be told: {error}") from error
    finally:
        bindings.nvmlShutdown()


def _stamps(checkpoint: str) -> str:
    """Of the files of weights and configs: names, sizes and times of change."""
    files = [checkpoint] if os.path.isfile(checkpoint) else [entry.path for entry in os.scandir(checkpoint)]
    chosen = sorted(file for file in files if file.endswith(_WEIGHT_ENDS))
    found = [
        (os.path.basename(file), status.st_size, status.st_mtime_ns) for file in chosen for status in [os.stat(file)]
    ]
    return _digest(found)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _text(value: Any) -> str:
    # torch's version is a str of another class, which msgspec does not take
    text = str(value) if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= MAX_VALUE else _digest(text)
