"""An engine for tests that publishes weights without vLLM, in this process or in one of its own.

    python publishing_engine.py SOCKET_DIR NAME RANK PLAN

The plan is that of `publishing_loader`. It says `published`, or the refusal's code and words, and then keeps its lease
until its stdin ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from publishing_loader import PLAN, Loader

from weightkeeper import client
from weightkeeper.client import Session
from weightkeeper.errors import WeightkeeperError
from weightkeeper.frames import Channel, close_all
from weightkeeper.protocol import MAX_DESCRIPTORS, Publish, Segments


@contextmanager
def weights(rank: int = 0, **plan: Any) -> Iterator[tuple[Publish, list[int]]]:
    """What a rank publishes: the message and its descriptors."""
    loader = Loader(PLAN | plan, None)
    descriptors, sizes = loader.packed()
    try:
        yield loader.message(rank, sizes), descriptors
    finally:
        close_all(descriptors)


def publish(socket_dir: str, rank: int = 0, name: str = "engine", **plan: Any) -> Session:
    """Publish one rank; its lease."""
    with weights(rank, **plan) as (message, descriptors):
        return client.publish(socket_dir, message, descriptors, name=name, connect_timeout_s=30, state_timeout_s=30)


def send_segments(channel: Channel, descriptors: list[int]) -> None:
    """The second half of a publication, by hand."""
    for first in range(0, len(descriptors), MAX_DESCRIPTORS):
        channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])


class EngineProcess:
    """A publishing engine in a process of its own."""

    def __init__(self, socket_dir: str, rank: int = 0, name: str = "engine", **plan: Any):
        self.process = subprocess.Popen(
            [sys.executable, __file__, socket_dir, name, str(rank), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def said(self) -> str:
        """Its next line."""
        return self.process.stdout.readline().rstrip("\n")

    def end(self) -> None:
        """Close its lease in good order."""
        self.process.communicate(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@contextmanager
def engine(socket_dir: str, rank: int = 0, name: str = "engine", **plan: Any) -> Iterator[EngineProcess]:
    """A started engine that is gone afterwards."""
    process = EngineProcess(socket_dir, rank, name, **plan)
    try:
        yield process
    finally:
        process.kill()


def main() -> None:
    socket_dir, name, rank, plan = sys.argv[1:]
    try:
        session = publish(socket_dir, int(rank), name, **json.loads(plan))
    except WeightkeeperError as error:
        print(f"{error.code}: {error}", flush=True)
        return
    print("published", flush=True)
    sys.stdin.read()
    session.close()


if __name__ == "__main__":
    main()
