"""GPU memory as the driver counts it, through NVML, which makes no context and so costs none."""

import os
import time
from types import ModuleType

from weightkeeper import nvml

SLACK_BYTES = 64 * 1024 * 1024
"""Two readings of one GPU that differ by less are taken as equal."""


class Gpu:
    """One GPU."""

    def __init__(self, bindings: ModuleType, index: int):
        self._nvml = bindings
        self._handle = bindings.nvmlDeviceGetHandleByIndex(index)
        self.name = nvml.text(bindings.nvmlDeviceGetName(self._handle))
        self.uuid = nvml.text(bindings.nvmlDeviceGetUUID(self._handle))
        self.driver = nvml.text(bindings.nvmlSystemGetDriverVersion())
        self.total_bytes = int(bindings.nvmlDeviceGetMemoryInfo(self._handle).total)

    @classmethod
    def all(cls) -> list["Gpu"]:
        """Every GPU that the driver shows; none where there is no driver."""
        found = nvml.bindings()
        return [cls(found, index) for index in range(found.nvmlDeviceGetCount())] if found else []

    @classmethod
    def visible(cls) -> list["Gpu"]:
        """Those that a program started from here computes on, by CUDA_VISIBLE_DEVICES and in its order.

        No GPU where a MIG id says so: what NVML tells of its GPU is not the part's.
        """
        gpus = cls.all()
        named = nvml.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus])
        return [gpus[index] for index in named or ()]

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
