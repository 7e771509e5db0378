"""An engine for tests that maps a keeper's weights without vLLM and keeps its lease, in a process of its own.

    python adopting_engine.py SOCKET_DIR NAME RANK PLAN

The plan is JSON: `world_size` 1; `device` cpu-RANK; `conditions` the fingerprint's fields besides the files' contents;
`mode` zero_copy; `model` /models/tiny; `own` true takes no keeper's memory but makes its own, as an engine that packed
weights which no keeper took, with the plan of `publishing_loader` beside it.
It says `mapped INODE` (of the first segment), and on each further line of its input how many descriptors it has open.
Its log goes to stderr.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from publishing_engine import weights

from weightkeeper import client, fingerprint, memory
from weightkeeper.frames import close_all
from weightkeeper.offering import Lease, Offer, Source, offer_of

CONDITIONS = {"dtype": "bfloat16"}


class Engine:
    """A mapping engine in a process of its own."""

    def __init__(self, directory: Path, socket_dir: str, rank: int = 0, name: str = "vllm-a", **plan: Any):
        self.log = directory / f"{name}-{rank}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, socket_dir, name, str(rank), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        said = self.process.stdout.readline().split()
        assert said[:1] == ["mapped"], self.log.read_text()
        self.inode = int(said[1])

    def descriptors(self) -> int:
        """How many it has open."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def lines(self) -> list[str]:
        """What it logged."""
        return self.log.read_text().splitlines()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@contextmanager
def engine(directory: Path, socket_dir: str, rank: int = 0, name: str = "vllm-a", **plan: Any) -> Iterator[Engine]:
    """An engine that has mapped, and is gone afterwards."""
    running = Engine(directory, socket_dir, rank, name, **plan)
    try:
        yield running
    finally:
        running.kill()


def mapping(socket_dir: str, name: str, rank: int, plan: dict[str, Any]) -> tuple[Lease | None, int]:
    """The lease of an engine, and the inode of what it maps."""
    device = plan.get("device", f"cpu-{rank}")
    session = client.open_session(socket_dir, device, name=name, connect_timeout_s=30, state_timeout_s=30)
    receipts = session.receipts()
    conditions = plan.get("conditions", CONDITIONS | {"rank": str(rank)})
    fields = fingerprint.compose({each.name: each.blake3 for each in receipts}, conditions)
    mode = plan.get("mode", "zero_copy")
    granted = session.map(fields, mode)
    if granted.grant.kind == "host":
        memory.of_kind("host").map(granted.descriptors, granted.grant.sizes)
    inode = os.fstat(granted.descriptors[0]).st_ino
    if mode == "copy":
        close_all(granted.descriptors)
        session.close()
        return None, inode
    model = plan.get("model", "/models/tiny")
    source = Source(socket_dir, device, rank, plan.get("world_size", 1), model, receipts, name, 30)
    return Lease(session, offer_of(granted, source)), inode


def own(socket_dir: str, name: str, rank: int, plan: dict[str, Any]) -> tuple[Lease, int]:
    """As `mapping`, on memory of its own that the keeper which is there did not take."""
    with weights(rank, **plan) as (message, descriptors):
        kept = [os.dup(each) for each in descriptors]
    message = msgspec.structs.replace(message, mapped_at=time.time())
    return Lease(None, Offer(socket_dir, message, kept, name, 30)), os.fstat(kept[0]).st_ino


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    socket_dir, name, rank, text = sys.argv[1:]
    plan = json.loads(text)
    make = own if plan.pop("own", False) else mapping
    lease, inode = make(socket_dir, name, int(rank), plan)
    print("mapped", inode, flush=True)
    for _ in sys.stdin:
        print(len(os.listdir("/proc/self/fd")), flush=True)
    if lease is not None:
        lease.close()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):
                    thread.join(10)


if __name__ == "__main__":
    main()
