"""A loader for tests: speaks the loader channel as `weightkeeper.loader` does, without vLLM.

    python publishing_loader.py [--plan JSON] --config FILE --channel FD

The plan says what to do. It is read from the config file where that has a `plan:` line, so that a test can change it
between two loads of one keeper.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml
from blake3 import blake3

from weightkeeper.files import Stamp
from weightkeeper.fingerprint import compose
from weightkeeper.frames import Channel, Limits
from weightkeeper.layout import Layout, Tensor
from weightkeeper.memory.host import HostMemory
from weightkeeper.protocol import (
    MAX_DESCRIPTORS,
    VERSION,
    Failed,
    FromKeeper,
    Hello,
    Progress,
    Publish,
    Receipt,
    Segments,
    Welcome,
)

PLAN = {
    "model": "/models/tiny",
    "ranks": 1,
    "nbytes": 1 << 20,  # of each rank
    "fill": 7,  # value of every byte
    "tensors": 1,
    "fingerprint": {"dtype": "bfloat16"},
    "stop_at": "",  # a stage at which to write the file `stopped` and to wait for SIGUSR1
    "exit_at": "",  # a stage at which to print `last_words` and exit with `exit_code`
    "exit_code": 3,
    "last_words": "",
    "failed": None,  # [code, message] instead of Publish
    "device": "cpu-{rank}",
    "unsealed": False,
    "changes": {},  # fields of Publish in place of the right ones
    "stopped": "",
    "linger": False,
    "segments": 1,  # of each rank; every byte of segment number N is N where there are several
    "models": None,  # a name for each rank
    "tensor": {},  # fields of the first tensor in place of the right ones
    "aliases": None,
    "checkpoint": "",  # directory whose files the receipts and the fingerprint are of
    "child": "",  # file for the pid of a child process that is left behind
    "child_session": False,  # whether that one is in a session of its own
}


def receipts_of(directory: Path) -> Iterator[Receipt]:
    """True receipts, taken without waiting for young files."""
    for file in sorted(directory.iterdir()):
        stamp = Stamp.of(file.stat())
        yield Receipt(file.name, *stamp, blake3=blake3(file.read_bytes()).hexdigest())


class Loader:
    def __init__(self, plan: dict, channel: Channel):
        self.plan, self.channel = plan, channel

    def stage(self, name: str) -> None:
        """A place at which a plan can stop the loader or end it."""
        if self.plan["exit_at"] == name:
            print(self.plan["last_words"], file=sys.stderr, flush=True)
            sys.exit(self.plan["exit_code"])
        if self.plan["stop_at"] == name:
            stopped = Path(self.plan["stopped"])
            stopped.with_suffix(".new").write_text(f"{os.getpid()}\n")
            stopped.with_suffix(".new").rename(stopped)
            signal.sigwait([signal.SIGUSR1])

    def run(self) -> None:
        if self.plan["child"]:
            child = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=self.plan["child_session"])
            Path(self.plan["child"]).write_text(str(child.pid))
        self.stage("start")
        self.channel.send(Hello(VERSION, "loader", "test"))
        assert isinstance(self.channel.receive().message, Welcome)
        self.stage("hello")
        total = self.plan["ranks"] * self.plan["nbytes"]
        self.channel.send(Progress("reading", total // 2, total))
        self.stage("progress")
        if self.plan["failed"]:
            self.channel.send(Failed(*self.plan["failed"]))
            self.channel.receive()
            sys.exit(1)
        for rank in range(self.plan["ranks"]):
            self.publish(rank)
        if self.plan["linger"]:
            self.stage("published")
            time.sleep(3600)

    def publish(self, rank: int) -> None:
        descriptors, sizes = self.packed()
        self.channel.send(self.message(rank, sizes))
        self.stage(f"publish {rank}")
        for first in range(0, len(descriptors), MAX_DESCRIPTORS):
            self.channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])
        answer = self.channel.receive().message
        print(f"keeper: {answer}", file=sys.stderr, flush=True)
        self.stage(f"rank {rank}")
        for descriptor in descriptors:
            os.close(descriptor)

    def packed(self) -> tuple[list[int], tuple[int, ...]]:
        """Descriptors and sizes of one rank's segments."""
        descriptors, sizes = [], []
        count = self.plan["segments"]
        for index in range(count):
            arena = HostMemory().create(self.plan["nbytes"])
            value = index if count > 1 else self.plan["fill"]
            ctypes.memset(arena.region.address, value, self.plan["nbytes"])
            if not self.plan["unsealed"]:
                arena.seal()
            descriptors += arena.export()
            sizes += arena.sizes
            arena.close()
        return descriptors, tuple(sizes)

    def message(self, rank: int, sizes: tuple[int, ...]) -> Publish:
        plan, nbytes = self.plan, self.plan["nbytes"]
        tensors = [
            Tensor(f"model.layers.{index}.weight", "parameter", "uint8", (nbytes,), (1,), 0)
            for index in range(plan["tensors"])
        ]
        changed = {name: tuple(value) if isinstance(value, list) else value for name, value in plan["tensor"].items()}
        tensors[0] = msgspec.structs.replace(tensors[0], **changed)
        aliases = {"lm_head.weight": tensors[0].path} if plan["aliases"] is None else plan["aliases"]
        fingerprint, receipts = plan["fingerprint"], (Receipt("model.safetensors", nbytes, 1, 2, 3, "ab" * 32),)
        if plan["checkpoint"]:
            receipts = tuple(receipts_of(Path(plan["checkpoint"])))
            fingerprint = compose({each.name: each.blake3 for each in receipts}, fingerprint | {"rank": str(rank)})
        fields = {
            "device": plan["device"].format(rank=rank),
            "rank": rank,
            "world_size": plan["ranks"],
            "model": plan["models"][rank] if plan["models"] else plan["model"],
            "fingerprint": fingerprint,
            "receipts": receipts,
            "kind": "host",
            "sizes": sizes,
            "layout": Layout(tuple(tensors), aliases, {"has_head": True}, nbytes),
        }
        return Publish(**(fields | plan["changes"]))


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="{}")
    parser.add_argument("--config", required=True)
    parser.add_argument("--channel", required=True, type=int)
    arguments = parser.parse_args()
    config = yaml.safe_load(Path(arguments.config).read_text()) or {}
    plan = PLAN | json.loads(arguments.plan) | (config.get("plan") or {})
    Loader(plan, Channel(socket.socket(fileno=arguments.channel), Limits(FromKeeper))).run()


if __name__ == "__main__":
    main()
