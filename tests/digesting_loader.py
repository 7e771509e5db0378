"""A loader for tests of `verify`: publishes a packed model, with one byte spoiled if told so.

    python digesting_loader.py --config FILE --channel FD

The plan in the config: `spoil` is the name of a tensor whose first byte is not as it was when its digest was taken;
`digests` false leaves the digests out, as loaders of older releases do; `beyond` moves a digest out of the arena;
`cuda` publishes from the first GPU.
"""

import argparse
import os
import socket
from pathlib import Path

import msgspec
import torch
import yaml
from torch import nn

from weightkeeper.capture import pack
from weightkeeper.frames import Channel, Limits
from weightkeeper.memory import Memory, cuda_devices, cuda_vmm
from weightkeeper.memory.host import HostMemory
from weightkeeper.protocol import VERSION, FromKeeper, Hello, Publish, Segments


class Model(nn.Module):
    """Two layers, a tied head, and two tensors in one storage."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 100)
        self.layer = nn.Linear(100, 300)
        self.head = nn.Linear(100, 64, bias=False)
        self.head.weight = self.embed.weight
        base = torch.arange(2000.0)
        self.left, self.right = nn.Parameter(base[:1000]), nn.Parameter(base[1000:])
        self.register_buffer("empty", torch.empty(0))


def model() -> Model:
    """The same every time."""
    torch.manual_seed(0)
    return Model()


def memory_of(place: str) -> Memory:
    if place == "cpu":
        return HostMemory()
    torch.empty(1, device=place)  # torch's context is the one in which it packs
    return cuda_vmm.open_device(0, torch.cuda.empty_cache)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--channel", required=True, type=int)
    arguments = parser.parse_args()
    plan = yaml.safe_load(Path(arguments.config).read_text())["plan"]
    place = "cuda:0" if plan.get("cuda") else "cpu"
    memory = memory_of(place)
    layout, arena = pack(model().to(place), memory, {})
    if name := plan.get("spoil"):
        spoiled = model().to(place)
        spoiled.get_parameter(name).data.view(torch.uint8).view(-1)[0] ^= 0x40
        arena.close()
        digests = layout.digests
        layout, arena = pack(spoiled, memory, {})
        layout = msgspec.structs.replace(layout, digests=digests)
    if not plan.get("digests", True):
        layout = msgspec.structs.replace(layout, digests=())
    if plan.get("beyond"):
        moved = msgspec.structs.replace(layout.digests[0], offset=layout.nbytes)
        layout = msgspec.structs.replace(layout, digests=(moved, *layout.digests[1:]))
    arena.seal()
    channel = Channel(socket.socket(fileno=arguments.channel), Limits(FromKeeper))
    channel.send(Hello(VERSION, "loader", "test"))
    channel.receive()
    name = "cpu-0" if place == "cpu" else cuda_devices.devices()[0].uuid
    channel.send(Publish(name, 0, 1, "/models/two", {"dtype": "float32"}, (), memory.kind, arena.sizes, layout))
    descriptors = arena.export()
    channel.send(Segments(0), descriptors)
    channel.receive()
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
