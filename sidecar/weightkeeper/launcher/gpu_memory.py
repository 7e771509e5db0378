"""Waiting until the memory of an ended server is free again on the GPUs that it could see."""

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import anyio

from weightkeeper import nvml
from weightkeeper.quantities import bytes_text

SETTLE_SECONDS = 15.0
"""The driver takes well under a second; after this the next server is started all the same, and it is said."""

_DRIVER = Path("/dev/nvidiactl")
_STILL_SECONDS = 0.5
_STEP_SECONDS = 0.05
_SLACK_BYTES = 64 * 1024 * 1024

logger = logging.getLogger(__name__)


class GpuMemory:
    """Bytes in use on the visible GPUs, by NVML, which makes no CUDA context. Does nothing where there is none."""

    def __init__(self) -> None:
        self._nvml = nvml.bindings()
        self._before: int | None = None
        if self._nvml is None and _DRIVER.exists():
            logger.warning("GPU memory: NVML is missing or refuses; servers do not wait until the last one's is free")

    def note(self, environment: Mapping[str, str]) -> None:
        """No server runs: what is in use now is not a server's."""
        self._before = self._used(environment)

    async def settled(self, environment: Mapping[str, str]) -> None:
        """Wait until no more is in use than before the server, or until it gets no less any more; bounded."""
        if self._before is None:
            return
        began = changed = time.monotonic()
        least = used = self._used(environment)
        while used is not None and used > self._before + _SLACK_BYTES:
            now = time.monotonic()
            if now - began > SETTLE_SECONDS:
                more = bytes_text(used - self._before)
                logger.warning("GPU memory: %s more than before this server after %g s", more, SETTLE_SECONDS)
                return
            if now - changed > _STILL_SECONDS:
                more = bytes_text(used - self._before)
                logger.info("GPU memory: %s more in use than before this server; not by a process of ours", more)
                return
            await anyio.sleep(_STEP_SECONDS)
            used = self._used(environment)
            if used is not None and least is not None and used < least:
                least, changed = used, time.monotonic()

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _used(self, environment: Mapping[str, str]) -> int | None:
        """None where it cannot be read; then nothing is waited for."""
        found = self._nvml
        if found is None:
            return None
        try:
            handles = [found.nvmlDeviceGetHandleByIndex(index) for index in range(found.nvmlDeviceGetCount())]
            uuids = [nvml.text(found.nvmlDeviceGetUUID(handle)) for handle in handles]
            named = nvml.visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)
            chosen = handles if named is None else [handles[index] for index in named]  # of a MIG id all may be meant
            return sum(found.nvmlDeviceGetMemoryInfo(each).used for each in chosen)
        except found.NVMLError as error:
            logger.debug("NVML: %s", error)
            return None
