"""GPU memory as the driver counts it, through NVML, which makes no context and so costs none."""

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

SLACK_BYTES = 64 * 1024 * 1024
"""Two readings of one GPU that differ by less are taken as equal."""


class Gpu:
    """One GPU."""

    def __init__(self, nvml: ModuleType, index: int):
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = _text(nvml.nvmlDeviceGetName(self._handle))
        self.uuid = _text(nvml.nvmlDeviceGetUUID(self._handle))
        self.driver = _text(nvml.nvmlSystemGetDriverVersion())
        self.total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    @classmethod
    def all(cls) -> list["Gpu"]:
        """Every GPU that the driver shows; none where there is no driver."""
        nvml = _nvml()
        return [cls(nvml, index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []

    @classmethod
    def visible(cls) -> list["Gpu"]:
        """Those that a program started from here computes on, by CUDA_VISIBLE_DEVICES and in its order."""
        gpus = cls.all()
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if given is None:
            return gpus
        words = [word.strip() for word in given.split(",") if word.strip()]
        return [
            gpu
            for word in words
            for index, gpu in enumerate(gpus)
            if word == str(index) or (not word.isdecimal() and gpu.uuid.startswith(word))
        ]

    def used_bytes(self) -> int:
        """Memory in use by anybody, as nvidia-smi counts it: without what the driver keeps for itself."""
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2).used)
        except (AttributeError, TypeError, self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def free_bytes(self) -> int:
        """Memory that a program may have, all of it together."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def processes(self) -> dict[int, int | None]:
        """Process id → bytes of each process that has a compute context on it; in a container it may name none."""
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in found}


def free_bytes(count: int) -> int | None:
    """On the fullest of the first `count` GPUs, one at least, that a program started from here computes on.

    None where there are fewer, or NVML does not say.
    """
    try:
        gpus = Gpu.visible()[:count]
        return min(gpu.free_bytes() for gpu in gpus) if len(gpus) == count else None
    except Exception as error:
        if type(error).__name__.startswith("NVMLError"):  # there is no one class: vLLM carries a copy of the bindings
            return None
        raise


def used_bytes(gpus: list[Gpu]) -> int:
    """On all of them together."""
    return sum(gpu.used_bytes() for gpu in gpus)


def wait_until_free(gpus: list[Gpu], level: int, seconds: float = 60.0) -> int:
    """Wait until at most `level` bytes (and some slack) are in use; the bytes then, or when time is over."""
    deadline = time.monotonic() + seconds
    while (used := used_bytes(gpus)) > level + SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.02)
    return used


def settled_bytes(gpus: list[Gpu], quiet: float = 0.5, seconds: float = 30.0) -> int:
    """Bytes in use once they have not changed (but for some slack) for `quiet` seconds, or when time is over."""
    begun = since = time.monotonic()
    level = used_bytes(gpus)
    while (now := time.monotonic()) < min(since + quiet, begun + seconds):
        used = used_bytes(gpus)
        if abs(used - level) > SLACK_BYTES:
            level, since = used, now
        time.sleep(0.02)
    return used_bytes(gpus)


def _nvml() -> ModuleType | None:
    """NVIDIA's bindings, or the copy that vLLM carries, ready for use; None without a driver."""
    try:
        import pynvml as nvml
    except ImportError:
        nvml = _vllms_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _vllms_nvml() -> ModuleType | None:
    """Loaded from its file, so that vLLM itself is not imported."""
    if "vllm_pynvml" in sys.modules:
        return sys.modules["vllm_pynvml"]
    directory = vllm_directory()
    file = directory / "third_party/pynvml.py" if directory else None
    if file is None or not file.is_file():
        return None
    spec = importlib.util.spec_from_file_location("vllm_pynvml", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_pynvml"] = module
    spec.loader.exec_module(module)
    return module


def vllm_directory() -> Path | None:
    """Where vLLM is installed; it is not imported for that."""
    found = importlib.util.find_spec("vllm")
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
