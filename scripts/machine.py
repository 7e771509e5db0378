"""What a result was measured on, and GPU memory as the driver counts it."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from weightkeeper.recovery import gpu

MIB = 1 << 20


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


class Gpu(gpu.Gpu):
    """One GPU through NVML, with what only the benchmarks ask for."""

    def __init__(self, nvml: ModuleType, index: int):
        super().__init__(nvml, index)
        try:
            self.persistence = bool(nvml.nvmlDeviceGetPersistenceMode(self._handle))
        except nvml.NVMLError:
            self.persistence = None

    @classmethod
    def only(cls) -> "Gpu | None":
        """The GPU that a program here computes on: the first of CUDA_VISIBLE_DEVICES, else the first."""
        gpus = cls.all()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if first.isdigit() and int(first) < len(gpus):
            return gpus[int(first)]
        return next((one for one in gpus if one.uuid.startswith(first)), None) if first else next(iter(gpus), None)

    def processes(self) -> dict[int, int | None]:
        """Process id → bytes of each process that has a compute context on it."""
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory) for one in found}

    def wait_until_free(self, level: int, seconds: float = 60.0) -> int:
        """Wait until at most `level` bytes (and some slack) are in use; the bytes then, or when time is over."""
        return gpu.wait_until_free([self], level, seconds)
