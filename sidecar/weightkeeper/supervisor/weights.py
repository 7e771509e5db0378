"""Which of vLLM's options shape the weights that a keeper holds, so that a change needs other weights."""

SHAPING: dict[str, str] = {
    "model": "other weights",
    "revision": "other weights",
    "code-revision": "the model's own code decides how they are loaded",
    "trust-remote-code": "the model's own code decides how they are loaded",
    "hf-config-path": "the configuration decides the shapes",
    "hf-overrides": "the configuration decides the shapes",
    "config-format": "decides which configuration is read",
    "model-class-overrides": "other modules hold them differently",
    "model-impl": "vLLM's and Transformers' modules hold them differently",
    "convert": "adds or drops a head",
    "runner": "adds or drops a head",
    "dtype": "they are converted while loading",
    "quantization": "they are quantized or repacked while loading",
    "quantization-config": "they are quantized or repacked while loading",
    "kv-cache-dtype": "decides which scales are kept beside them",
    "kv-cache-dtype-skip-layers": "decides which scales are kept beside them",
    "load-format": "decides which files are read, and how",
    "model-loader-extra-config": "decides which files are read, and how",
    "ignore-patterns": "decides which files are read",
    "tensor-parallel-size": "each device holds another part",
    "pipeline-parallel-size": "each device holds another part",
    "data-parallel-size": "each device holds another part of the experts",
    "decode-context-parallel-size": "decides how attention heads are spread",
    "prefill-context-parallel-size": "decides how attention heads are spread",
    "enable-expert-parallel": "each device holds other experts",
    "expert-placement-strategy": "each device holds other experts",
    "enable-ep-weight-filter": "each device holds other experts",
    "enable-eplb": "experts are held more than once",
    "eplb-config": "experts are held more than once",
    "all2all-backend": "decides the layout of the experts",
    "moe-backend": "decides the layout of the experts",
    "linear-backend": "decides the layout of linear layers",
    "attention-backend": "decides the layout of attention's weights",
    "attention-config": "decides the layout of attention's weights",
    "kernel-config": "decides the layout of layers",
    "enable-lora": "layers are wrapped and padded for adapters",
    "max-loras": "layers are wrapped and padded for adapters",
    "max-lora-rank": "layers are wrapped and padded for adapters",
    "lora-dtype": "layers are wrapped and padded for adapters",
    "lora-target-modules": "layers are wrapped and padded for adapters",
    "fully-sharded-loras": "layers are wrapped and padded for adapters",
    "limit-mm-per-prompt": "a modality of which none is allowed is not loaded",
    "language-model-only": "only the language model is loaded",
    "mm-encoder-only": "only the encoder is loaded",
    "mm-encoder-tp-mode": "each device holds the whole encoder or a part",
    "speculative-config": "a draft model's weights come beside them",
    "spec-method": "a draft model's weights come beside them",
    "spec-model": "a draft model's weights come beside them",
    "cpu-offload-gb": "some of them lie in the host's memory",
    "offload-backend": "some of them lie in the host's memory",
}
"""Option → why. The rest of the options leave the weights as they are."""

NOTE = "(shapes the weights: `make load` prepares them)"


def shapes(option: str) -> bool:
    """Whether a change of an option makes other weights; `no-X` and `X.part` count as `X`."""
    name = option.split(".")[0]
    return name in SHAPING or name.removeprefix("no-") in SHAPING
