"""NVML, NVIDIA's library for the state of GPUs: it makes no CUDA context, and so costs no memory on them."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_VLLMS = "vllm_pynvml"
_MIG = "MIG"


def bindings() -> ModuleType | None:
    """NVIDIA's Python bindings (`nvidia-ml-py`), or the copy that vLLM carries, initialized; None without a driver."""
    try:
        import pynvml as nvml
    except ImportError:
        nvml = _vllms()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def visible(seen: str | None, uuids: Sequence[str]) -> list[int] | None:
    """Which GPUs a program computes on, in its order.

    Args:
        seen: its CUDA_VISIBLE_DEVICES; None where it is not set.
        uuids: of all GPUs, as NVML numbers them, which is CUDA's order where they are of one kind.

    Returns:
        Indexes into `uuids`; None where a MIG id stands among the words, which NVML's GPUs do not tell.

    Source: CUDA programming guide, environment variables: a word is an index or the beginning of one UUID, and what
    stands behind a word that names nothing is not looked at.
    """
    if seen is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for word in seen.split(","):
        word = word.strip()
        if word.startswith(_MIG):
            return None
        if word.isdecimal():
            named = [int(word)] if int(word) < len(uuids) else []
        else:
            named = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(named) != 1:
            break
        found += named
    return found


def vllm_directory() -> Path | None:
    """Where vLLM is installed; it is not imported for that."""
    found = importlib.util.find_spec("vllm")
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def text(value: Any) -> str:
    """A string of NVML's, which some of the bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _vllms() -> ModuleType | None:
    """vLLM's copy, loaded from its file, so that vLLM itself is not imported."""
    if _VLLMS in sys.modules:
        return sys.modules[_VLLMS]
    directory = vllm_directory()
    file = directory / "third_party/pynvml.py" if directory else None
    if file is None or not file.is_file():
        return None
    spec = importlib.util.spec_from_file_location(_VLLMS, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_VLLMS] = module
    spec.loader.exec_module(module)
    return module
