"""When which saving must not be used: what of vLLM's configuration stands against it, in words.

A setting that this vLLM does not have is one of another version, and stands against it as well.
"""

from collections.abc import Iterable
from typing import Any

from vllm import envs
from vllm.config.compilation import CompilationMode
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

_ABSENT = object()

Settings = tuple[tuple[str, Any, str], ...]
"""Path from vLLM's configuration, the value that is needed there, and what another value means."""

_ONE_SHAPE: Settings = (
    ("parallel_config.enable_dbo", False, "batches are split (enable-dbo)"),
    ("parallel_config.ubatch_size", 0, "batches are split (ubatch-size)"),
    ("speculative_config", None, "speculative decoding"),
    ("lora_config", None, "LoRA"),
    ("model_config.is_hybrid", False, "the model has a state beside the KV cache"),
    ("model_config.has_inner_state", False, "the model has a state beside the KV cache"),
    ("model_config.is_attention_free", False, "the model has no attention"),
    ("model_config.is_encoder_decoder", False, "the model has an encoder"),
    ("model_config.is_multimodal_model", False, "the model is multimodal"),
    ("model_config.runner_type", "generate", "the model does not generate"),
    ("model_config.enforce_eager", False, "no graphs are wanted (enforce-eager)"),
    ("compilation_config.mode", CompilationMode.VLLM_COMPILE, "the model is not compiled"),
    ("compilation_config.use_inductor_graph_partition", False, "Inductor splits the graph itself"),
)
"""That the two modes of graphs run the same compiled code at the same sizes."""

_LATER: Settings = (
    *_ONE_SHAPE,
    ("parallel_config.pipeline_parallel_size", 1, "pipeline parallel"),
    ("parallel_config.data_parallel_size", 1, "data parallel"),
    ("parallel_config.prefill_context_parallel_size", 1, "prefill context parallel"),
    ("parallel_config.decode_context_parallel_size", 1, "decode context parallel"),
    ("parallel_config.enable_expert_parallel", False, "expert parallel"),
    ("parallel_config.enable_elastic_ep", False, "elastic expert parallel"),
    ("parallel_config.enable_fault_tolerance", False, "fault tolerance"),
    ("model_config.enable_sleep_mode", False, "sleep mode"),
    ("model_config.is_diffusion", False, "a diffusion model"),
    ("model_config.use_mla", False, "multi-head latent attention"),
    ("cache_config.kv_sharing_fast_prefill", False, "fast prefill"),
    ("kv_transfer_config", None, "a KV connector"),
    ("ec_transfer_config", None, "an encoder-cache connector"),
    ("weight_transfer_config", None, "weight transfer"),
    ("profiler_config.profiler", None, "a profiler"),
)
"""That nothing but the model's steps happens between steps."""

_ALONE: Settings = (
    ("parallel_config.data_parallel_size", 1, "data parallel"),
    ("parallel_config.enable_elastic_ep", False, "elastic expert parallel"),
    ("parallel_config.nnodes", 1, "several machines"),
)


def cannot_defer(worker: Any) -> str:
    """Why graphs cannot be left for later; empty where they can."""
    if why := _runner(worker) or _against(worker.vllm_config, _LATER):
        return why
    return (
        _variables("VLLM_ENABLE_STARTUP_PLAN", "VLLM_GPU_SYNC_CHECK", "VLLM_USE_BREAKABLE_CUDAGRAPH") or _offloading()
    )


def cannot_spare_warm_ups(worker: Any) -> str:
    """Why every size has to be run before each of its captures; empty where once is enough."""
    return _runner(worker) or _against(worker.vllm_config, _ONE_SHAPE) or _offloading()


def cannot_recall(worker: Any) -> str:
    """Why the KV cache's size has to be measured; empty where that of the last start may be used."""
    why = _against(worker.vllm_config, _ALONE)
    return why or _variables("VLLM_ENABLE_STARTUP_PLAN", "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH") or _measuring(worker)


def cannot_postpone_inductor() -> str:
    """Why torch's compiler has to be ready at the start; empty where it can be later."""
    return _variables("VLLM_GPU_SYNC_CHECK")


def _runner(worker: Any) -> str:
    return "" if type(worker.model_runner) is GPUModelRunner else "this model runner is not known"


def _measuring(worker: Any) -> str:
    names = ("init_snapshot", "requested_memory", "determine_available_memory")
    missing = [name for name in names if not hasattr(worker, name)]
    return f"this worker has no {', '.join(missing)}" if missing else ""


def _against(config: Any, settings: Settings) -> str:
    for path, needed, meaning in settings:
        value = config
        for name in path.split("."):
            value = getattr(value, name, _ABSENT)
        if value is _ABSENT:
            return f"this vLLM has no {path}"
        if value != needed:
            return meaning
    return ""


def _variables(*names: str) -> str:
    return _first(f"{name} is set" for name in names if getattr(envs, name))


def _offloading() -> str:
    return "" if type(get_offloader()) is NoopOffloader else "weights are offloaded"


def _first(reasons: Iterable[str]) -> str:
    return next(iter(reasons), "")
