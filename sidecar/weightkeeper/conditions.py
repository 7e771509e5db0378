"""Everything but file contents that shapes a model's weights, read off vLLM's configuration, as fingerprint fields."""

import dataclasses
import json
import os
from typing import Any

import torch
from blake3 import blake3

from weightkeeper import vllm_api
from weightkeeper.harmless import HARMLESS
from weightkeeper.vllm_api import ModelConfig, VllmConfig

_FIELDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("model_config", "", (
        "dtype", "quantization", "quantization_config", "revision", "code_revision", "runner_type", "convert_type",
        "model_impl", "model_class_overrides", "config_format", "hf_overrides",
        "word_embeddings_untied_by_checkpoint",
    )),
    ("parallel_config", "", (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank",
        "prefill_context_parallel_size", "decode_context_parallel_size", "enable_expert_parallel", "enable_eplb",
        "expert_placement_strategy", "enable_ep_weight_filter",
    )),
    ("cache_config", "", ("cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype")),
    ("kernel_config", "", ("moe_backend", "linear_backend", "linear_backend_per_quant")),
    ("attention_config", "attention ", ("backend",)),
    ("lora_config", "LoRA ", ("max_lora_rank", "max_loras", "fully_sharded_loras", "target_modules", "lora_dtype")),
    ("speculative_config", "speculative ", ("method",)),
    ("offload_config", "", ("offload_backend",)),
)  # fmt: skip
"""Part of VllmConfig, how its fields are named for people, and those that shape weights.

A part that is None and a field that a version lacks read as null.
"""

MAX_VALUE = 1000
"""Characters of a field's value; a longer one (the labels of a classifier) is compared by its digest."""

_MULTIMODAL_FIELDS = (
    "language_model_only", "limit_per_prompt", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
)  # fmt: skip

_MODEL_FILE_NOISE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


def conditions_of(vllm_config: VllmConfig, model_config: ModelConfig, rank: int, load_format: str) -> dict[str, str]:
    """Everything but file contents that shapes the weights of one rank, as fingerprint fields.

    Has to be called before weights are loaded: post-processing may change the model's configuration.
    """
    fields = {
        "architecture": _text(getattr(model_config.hf_config, "architectures", None)),
        "device": vllm_api.device_text(),
        "load format": load_format,
        "rank": str(rank),
        "role": "target" if model_config is vllm_config.model_config else "draft",
        "torch version": str(torch.__version__),
        "vllm version": vllm_api.VLLM_VERSION,
    }
    for part, prefix, names in _FIELDS:
        config = model_config if part == "model_config" else getattr(vllm_config, part, None)
        fields.update({prefix + name.replace("_", " "): _text(getattr(config, name, None)) for name in names})
    multimodal = model_config.multimodal_config
    fields.update({name.replace("_", " "): _text(getattr(multimodal, name, None)) for name in _MULTIMODAL_FIELDS})
    for name, value in model_config.hf_config.to_dict().items():
        if name not in _MODEL_FILE_NOISE:
            fields[f"model's {name}"] = _text(value)
    for name, value in os.environ.items():
        if name.startswith("VLLM_") and name not in HARMLESS:
            fields[f"variable {name}"] = value
    return fields


def _text(value: Any) -> str:
    """A value as text that is equal in two processes where the value is; a digest where it is long."""
    text = str(value) if isinstance(value, (str, torch.dtype)) else json.dumps(value, sort_keys=True, default=_plain)
    return text if len(text) <= MAX_VALUE else f"blake3 {blake3(text.encode()).hexdigest()}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return str(value)
