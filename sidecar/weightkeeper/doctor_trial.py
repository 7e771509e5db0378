"""One process of the doctor's trial: it makes shared memory, reads it, or tries to write it, and tells each step.

    python -m weightkeeper.doctor_trial make|read|write KIND ORDINAL SECRET SECONDS --channel FD

The channel is a SOCK_SEQPACKET pair: one JSON object a message, descriptors beside it. SECRET decides the content, so
that bytes of an earlier trial cannot pass for those of this one. After SECONDS the process ends itself.
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from weightkeeper.errors import MemoryKindError
from weightkeeper.memory import Memory, MemoryKind, Region

TRIAL_BYTES = 3 << 20
"""Two pieces of what a GPU maps at once."""

MESSAGE_BYTES = 16 * 1024

CUT = 2000
"""Characters of an error that are passed on, so that a message fits."""


def content(secret: str) -> bytes:
    """What the memory of one trial holds."""
    return blake3(secret.encode()).digest(length=TRIAL_BYTES)


class Place:
    """Memory of one kind, and plain reads and writes in it."""

    def __init__(self, kind: MemoryKind, ordinal: int):
        self.memory: Memory
        if kind == "host":
            from weightkeeper.memory.host import HostMemory

            self.memory = HostMemory()
            self._driver = None
        else:
            from weightkeeper.memory.cuda_driver import open_driver
            from weightkeeper.memory.cuda_vmm import CudaMemory

            self._driver = open_driver(ordinal)
            self._driver.make_current()
            self.memory = CudaMemory(self._driver)

    def read(self, region: Region, nbytes: int) -> bytes:
        if self._driver is not None:
            return self._driver.read(region.address, nbytes)
        return ctypes.string_at(region.address, nbytes)

    def write(self, region: Region, data: bytes) -> None:
        if self._driver is not None:
            self._driver.write(region.address, data)
        else:
            ctypes.memmove(region.address, data, len(data))


class Teller:
    """The trial's end of the channel."""

    def __init__(self, channel: socket.socket):
        self._channel = channel

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Tell what became of a step: what the body put into the message, or its error, which goes on."""
        message: dict[str, Any] = {"step": name, "error": ""}
        try:
            yield message
        except Exception as error:
            message |= {"error": str(error)[:CUT] or type(error).__name__, "number": getattr(error, "number", 0)}
            raise
        finally:
            descriptors = message.pop("descriptors", [])
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)

    def wait(self) -> tuple[dict[str, Any], list[int]]:
        """What the doctor sends next; empty when it has closed its end."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        return (json.loads(data) if data else {}), descriptors


def make(place: Place, teller: Teller, secret: str) -> None:
    """Fill memory, export it, and hold it until the doctor says that it is enough."""
    with teller.step("create"):
        arena = place.memory.create(TRIAL_BYTES)
        arena.back(TRIAL_BYTES)
        place.write(arena.region, content(secret))
        arena.seal()
    with teller.step("export") as message:
        message |= {"sizes": arena.sizes, "descriptors": arena.export()}
    teller.wait()
    with teller.step("close"):
        arena.close()


def read(place: Place, teller: Teller, secret: str) -> None:
    """Map what the doctor hands over, and compare it."""
    request, descriptors = teller.wait()
    with teller.step("map"):
        region = place.memory.map(descriptors, request["sizes"])
    with teller.step("read"):
        if place.read(region, TRIAL_BYTES) != content(secret):
            raise MemoryKindError("the mapped bytes are not those that were written")
    with teller.step("close"):
        region.close()


def write(place: Place, teller: Teller, secret: str) -> None:
    """Map, and write where nothing may write. This process dies of it, or the write is refused with an error."""
    request, descriptors = teller.wait()
    with teller.step("map"):
        region = place.memory.map(descriptors, request["sizes"])
    before = content(secret)[:1]
    with teller.step("write") as message:
        place.write(region, bytes([before[0] ^ 0xFF]))
        message["changed"] = place.read(region, 1) != before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("make", "read", "write"))
    parser.add_argument("kind")
    parser.add_argument("ordinal", type=int)
    parser.add_argument("secret")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--channel", required=True, type=int)
    arguments = parser.parse_args()
    signal.setitimer(signal.ITIMER_REAL, arguments.seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    teller = Teller(socket.socket(fileno=arguments.channel))
    try:
        with teller.step("start"):
            place = Place(arguments.kind, arguments.ordinal)
        {"make": make, "read": read, "write": write}[arguments.role](place, teller, arguments.secret)
    except (MemoryKindError, OSError):
        os._exit(1)  # it has been told; after a fault on a GPU even leaving in order can fail
    os._exit(0)


if __name__ == "__main__":
    main()
