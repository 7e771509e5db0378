"""A loader in place of weightkeeper's own, for benchmarks: publishes memory that it filled itself; needs no model.

    weightkeeper serve --config FILE --loader "python3 scripts/synthetic_loader.py" …

The config file says `synthetic: {kind: host | cuda-vmm, nbytes: N, tensors: N}`. Every byte of tensor number i is
`fill(i)`, so that who maps it can tell what it got.
"""

import argparse
import os
import socket
from pathlib import Path

import torch
import yaml

from weightkeeper.frames import Channel, Limits
from weightkeeper.layout import Layout, Tensor, aligned
from weightkeeper.memory import of_kind
from weightkeeper.protocol import (
    MAX_DESCRIPTORS,
    VERSION,
    Done,
    FromKeeper,
    Hello,
    Progress,
    Publish,
    Receipt,
    Segments,
    Welcome,
)
from weightkeeper.tensors import bytes_of

FINGERPRINT = {"model": "synthetic"}


def path_of(number: int) -> str:
    """Where tensor `number` is in the model that maps it."""
    return f"layers.{number}.weight"


def fill(number: int) -> int:
    """Value of every byte of tensor `number`."""
    return 1 + number * 7 % 251


def layout_of(nbytes: int, tensors: int) -> Layout:
    """`tensors` bfloat16 tensors of equal size, `nbytes` together."""
    size = aligned(nbytes // tensors)
    records = tuple(
        Tensor(path_of(number), "parameter", "bfloat16", (size // 2,), (1,), number * size)
        for number in range(tensors)
    )  # fmt: skip
    return Layout(records, {}, {}, tensors * size)


def device_of(kind: str) -> str:
    """Name of the engine socket: the UUID of this process's first GPU, or `cpu-0`."""
    if kind == "host":
        return "cpu-0"
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def publish(channel: Channel, kind: str, nbytes: int, tensors: int) -> None:
    if kind != "host":
        torch.zeros(1, device="cuda")  # the driver's calls need a context
    layout = layout_of(nbytes, tensors)
    arena = of_kind(kind).create(layout.nbytes)
    arena.back(layout.nbytes)
    whole = bytes_of(arena.region)
    for number, record in enumerate(layout.tensors):
        channel.send(Progress("filling", record.offset, layout.nbytes))
        whole[record.offset : record.offset + record.shape[0] * 2].fill_(fill(number))
    del whole
    arena.seal()
    descriptors = arena.export()
    receipts = (Receipt("synthetic", nbytes, 1, 1, 1, "00" * 32),)
    channel.send(
        Publish(device_of(kind), 0, 1, "synthetic", FINGERPRINT, receipts, kind, tuple(arena.sizes), layout)
    )  # fmt: skip
    for first in range(0, len(descriptors), MAX_DESCRIPTORS):
        channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])
    expect(channel, Done)
    for descriptor in descriptors:
        os.close(descriptor)
    arena.close()


def expect(channel: Channel, kind: type) -> None:
    answer = channel.receive().message
    if not isinstance(answer, kind):
        raise SystemExit(f"synthetic loader: the keeper answered {answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--channel", required=True, type=int)
    arguments = parser.parse_args()
    wanted = yaml.safe_load(Path(arguments.config).read_text())["synthetic"]
    channel = Channel(socket.socket(fileno=arguments.channel), Limits(FromKeeper))
    channel.send(Hello(VERSION, "loader", "synthetic"))
    expect(channel, Welcome)
    publish(channel, wanted["kind"], wanted["nbytes"], wanted["tensors"])


if __name__ == "__main__":
    main()
