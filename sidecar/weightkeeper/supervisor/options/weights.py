"""Options that shape the weights which a keeper holds. Whatever the fingerprint covers is here; a test compares."""

_CONVERTED = "the weights are converted while loading"
_QUANTIZED = "the weights are quantized or repacked while loading"
_SCALES = "decides which scales are kept beside the weights"
_STATE = "decides the types of the state that layers are built for"
_CONFIG = "the model's configuration decides the shapes"
_CODE = "the model's own code decides how they are loaded"
_MODULES = "other modules hold the weights in another way"
_HEAD = "adds or drops a head"
_FILES = "decides which files are read, and how"
_PART = "each device holds another part"
_EXPERTS = "each device holds other experts"
_HEADS = "decides how attention heads are spread"
_COPIES = "experts are held more than once"
_KERNEL = "the kernel decides the layout of the weights"
_ADAPTERS = "layers are wrapped and padded for adapters"
_MODALITIES = "decides which modalities are loaded"
_ENCODER = "decides how the encoder is held"
_DRAFT = "a draft model's weights come beside them"
_OFFLOAD = "some of the weights lie in the host's memory"
_TABLES = "decides which tables are loaded beside the weights"

WEIGHTS: dict[str, str] = {
    "model": "other weights",
    "revision": "other weights",
    "code-revision": _CODE,
    "trust-remote-code": _CODE,
    "hf-config-path": _CONFIG,
    "hf-overrides": _CONFIG,
    "config-format": _CONFIG,
    "model-class-overrides": _MODULES,
    "model-impl": _MODULES,
    "convert": _HEAD,
    "runner": _HEAD,
    "dtype": _CONVERTED,
    "quantization": _QUANTIZED,
    "quantization-config": _QUANTIZED,
    "allow-deprecated-quantization": _QUANTIZED,
    "kv-cache-dtype": _SCALES,
    "kv-cache-dtype-skip-layers": _SCALES,
    "mamba-cache-dtype": _STATE,
    "mamba-ssm-cache-dtype": _STATE,
    "mamba-backend": _KERNEL,
    "load-format": _FILES,
    "model-loader-extra-config": _FILES,
    "ignore-patterns": _FILES,
    "download-dir": _FILES,
    "tensor-parallel-size": _PART,
    "pipeline-parallel-size": _PART,
    "prefill-context-parallel-size": _HEADS,
    "decode-context-parallel-size": _HEADS,
    "dcp-q-replicate": _HEADS,
    "data-parallel-size": _EXPERTS,
    "data-parallel-size-local": _EXPERTS,
    "data-parallel-rank": _EXPERTS,
    "data-parallel-start-rank": _EXPERTS,
    "enable-expert-parallel": _EXPERTS,
    "expert-placement-strategy": _EXPERTS,
    "enable-ep-weight-filter": _EXPERTS,
    "enable-elastic-ep": _EXPERTS,
    "elastic-ep-max-dp-size": _EXPERTS,
    "nnodes": _PART,
    "node-rank": _PART,
    "device-ids": "the weights are held on other devices",
    "enable-eplb": _COPIES,
    "eplb-config": _COPIES,
    "all2all-backend": _KERNEL,
    "moe-backend": _KERNEL,
    "linear-backend": _KERNEL,
    "kernel-config": _KERNEL,
    "attention-backend": _KERNEL,
    "attention-config": _KERNEL,
    "gdn-prefill-backend": _KERNEL,
    "kda-prefill-backend": _KERNEL,
    "kda-decode-backend": _KERNEL,
    "enable-lora": _ADAPTERS,
    "max-loras": _ADAPTERS,
    "max-lora-rank": _ADAPTERS,
    "lora-dtype": _ADAPTERS,
    "lora-target-modules": _ADAPTERS,
    "fully-sharded-loras": _ADAPTERS,
    "enable-tower-connector-lora": _ADAPTERS,
    "enable-mixed-moe-lora-format": _ADAPTERS,
    "enable-moe-shared-loras": _ADAPTERS,
    "max-lora-cls-labels": _ADAPTERS,
    "limit-mm-per-prompt": _MODALITIES,
    "language-model-only": _MODALITIES,
    "mm-encoder-only": _MODALITIES,
    "mm-encoder-tp-mode": _ENCODER,
    "mm-encoder-attn-backend": _ENCODER,
    "mm-encoder-attn-dtype": _ENCODER,
    "mm-encoder-fp8-scale-path": _ENCODER,
    "speculative-config": _DRAFT,
    "spec-method": _DRAFT,
    "spec-model": _DRAFT,
    "diffusion-config": _HEAD,
    "engram-config": _TABLES,
    "cpu-offload-gb": _OFFLOAD,
    "cpu-offload-params": _OFFLOAD,
    "offload-backend": _OFFLOAD,
    "offload-group-size": _OFFLOAD,
    "offload-num-in-group": _OFFLOAD,
    "offload-params": _OFFLOAD,
    "worker-cls": _CODE,
    "additional-config": "a platform's own options, any of which may shape the weights",
}
"""Option → why."""
