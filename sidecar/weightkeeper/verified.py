"""Quantization methods whose processed or loaded weights may be shared, each with its evidence.

A method is listed when a test showed the same tensors and the same greedy tokens as a load from disk, on the kind of
device and with the vLLM version named. Everything else is refused before a byte is read.
"""

from collections.abc import Mapping
from typing import Any

from weightkeeper.errors import UnverifiedQuantizationError

UNQUANTIZED = "none"

CPU: dict[str, str] = {
    UNQUANTIZED: "vLLM 0.32: tests/test_parity.py, tied and untied, tokens and logprobs equal a disk load",
}
"""Method → evidence, for weights that are shared before post-processing."""


CUDA: dict[str, str] = {
    UNQUANTIZED: "vLLM 0.30 on an H200: tests/gpu, tokens and logprobs equal a disk load",
}
"""Method → evidence, for weights that are shared after post-processing."""


def check(method: str | None, device: str) -> None:
    """Refuse a quantization method without evidence for the kind of device, `cpu` or `cuda`.

    Raises:
        UnverifiedQuantizationError: with the verified methods.
    """
    table = CPU if device == "cpu" else CUDA
    if (method or UNQUANTIZED) not in table:
        verified = ", ".join(sorted(table))
        raise UnverifiedQuantizationError(
            f"quantization {method!r} is not verified for sharing on {device} (verified: {verified}); "
            "serve this model with vLLM's own load format, without the sidecar"
        )


def method_of(model_config_file: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The quantization method that config.json and the engine's options ask for, before vLLM is imported."""
    asked = options.get("quantization")
    if isinstance(asked, str) and asked.lower() not in ("", "none", "null"):
        return asked
    for key in ("quantization_config", "compression_config"):
        section = model_config_file.get(key)
        if isinstance(section, Mapping):
            return str(section.get("quant_method") or key)
    return None
