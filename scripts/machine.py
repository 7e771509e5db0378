"""What a result was measured on, and GPU memory as the driver counts it."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

MIB = 1 << 20

SLACK_BYTES = 64 * MIB
"""Two readings of one GPU that differ by less are taken as equal."""


def facts() -> dict[str, Any]:
    """Processor, memory, versions and GPUs; nothing that names the machine or its user."""
    found: dict[str, Any] = {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    for package in ("torch", "vllm", "transformers", "cuda-bindings", "weightkeeper"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    gpus = Gpu.all()
    found["gpus"] = [{"name": gpu.name, "uuid": gpu.uuid, "memory_bytes": gpu.total_bytes} for gpu in gpus]
    if gpus:
        found["driver"] = gpus[0].driver
        found["persistence_mode"] = gpus[0].persistence
    return found


def said(found: dict[str, Any]) -> str:
    """The facts in one line, for people."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / MIB:.0f} MiB)" for gpu in found["gpus"]) or "no GPU"
    driver = f", driver {found['driver']}" if "driver" in found else ""
    vllm = f", vLLM {found['vllm']}" if found["vllm"] else ""
    return (
        f"{gpus}{driver}, {found['cores']} cores of {found['processor']}, Linux {found['kernel']}, "
        f"Python {found['python']}, torch {found['torch']}{vllm}"
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"


class Gpu:
    """One GPU through NVML, which makes no context on it and so costs it no memory."""

    def __init__(self, nvml: ModuleType, index: int):
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = _text(nvml.nvmlDeviceGetName(self._handle))
        self.uuid = _text(nvml.nvmlDeviceGetUUID(self._handle))
        self.driver = _text(nvml.nvmlSystemGetDriverVersion())
        self.total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(self._handle).total)
        try:
            self.persistence = bool(nvml.nvmlDeviceGetPersistenceMode(self._handle))
        except nvml.NVMLError:
            self.persistence = None

    @classmethod
    def all(cls) -> list["Gpu"]:
        """Every GPU that the driver shows; none where there is no driver."""
        nvml = _nvml()
        return [cls(nvml, index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []

    @classmethod
    def only(cls) -> "Gpu | None":
        """The GPU that a program here computes on: the first of CUDA_VISIBLE_DEVICES, else the first."""
        gpus = cls.all()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if first.isdigit() and int(first) < len(gpus):
            return gpus[int(first)]
        return next((gpu for gpu in gpus if gpu.uuid.startswith(first)), None) if first else next(iter(gpus), None)

    def used_bytes(self) -> int:
        """Memory in use by anybody, as nvidia-smi counts it: without what the driver keeps for itself."""
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2).used)
        except (AttributeError, TypeError, self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def processes(self) -> dict[int, int | None]:
        """Process id → bytes of each process that has a compute context on it."""
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in found}

    def wait_until_free(self, level: int, seconds: float = 60.0) -> int:
        """Wait until at most `level` bytes (and SLACK_BYTES) are in use; the bytes then, or when time is over."""
        deadline = time.monotonic() + seconds
        while (used := self.used_bytes()) > level + SLACK_BYTES and time.monotonic() < deadline:
            time.sleep(0.02)
        return used


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
    if "vllm_pynvml" in sys.modules:
        return sys.modules["vllm_pynvml"]
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    file = Path(next(iter(vllm.submodule_search_locations))) / "third_party/pynvml.py"
    spec = importlib.util.spec_from_file_location("vllm_pynvml", file)
    if not file.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_pynvml"] = module
    spec.loader.exec_module(module)
    return module


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
