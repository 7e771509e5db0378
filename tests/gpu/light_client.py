"""An engine's way to a keeper's weights without vLLM and torch: python light_client.py SOCKET_DIR DEVICE FILE STOP_AT

FILE has the fingerprint as JSON. At the step STOP_AT (`asked`, `granted`, `mapped`) it prints that word and waits to be
killed; with `end` it reads a byte of every segment, unmaps and ends.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from weightkeeper import client, memory
from weightkeeper.protocol import MapRequest


def reach(step: str) -> None:
    if step == sys.argv[4]:
        print(step, flush=True)
        signal.pause()


class Host:
    """Reads host memory."""

    def __init__(self) -> None:
        self.memory = memory.of_kind("host")

    def read(self, address: int) -> bytes:
        return ctypes.string_at(address, 1)


class Cuda:
    """Reads GPU memory, in the primary context of the first GPU, as torch would make it."""

    def __init__(self) -> None:
        from cuda.bindings import driver as api

        from weightkeeper.memory.cuda_driver import Driver
        from weightkeeper.memory.cuda_vmm import CudaMemory

        self._api = api
        driver = Driver(api, 0)
        driver.make_current()
        self.memory = CudaMemory(driver)

    def read(self, address: int) -> bytes:
        target = ctypes.create_string_buffer(1)
        (code,) = self._api.cuMemcpyDtoH(ctypes.addressof(target), address, 1)
        if int(code):
            sys.exit(f"cuMemcpyDtoH failed: {code}")
        return target.raw


def main() -> None:
    directory, device, file, stop_at = sys.argv[1:]
    fields = json.loads(Path(file).read_text())
    with client.open_session(directory, device, name="light client") as session:
        if stop_at == "asked":
            session._channel.send(MapRequest(fields, "zero_copy"))
        reach("asked")
        granted = session.map(fields, "zero_copy")
        reach("granted")
        here = Host() if granted.grant.kind == "host" else Cuda()
        region = here.memory.map(granted.descriptors, granted.grant.sizes)
        for descriptor in granted.descriptors:
            os.close(descriptor)
        reach("mapped")
        offset = 0
        for size in granted.grant.sizes:
            here.read(region.address + offset)
            offset += size
        region.close()


if __name__ == "__main__":
    main()
