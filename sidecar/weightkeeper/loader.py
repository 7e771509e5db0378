"""The keeper's child that loads a model through vLLM, packs it, publishes it and ends.

    python -m weightkeeper.loader --config engine.yaml --channel FD

With several ranks it is rank 0's process, and starts one more for each of the others.

What can be refused without vLLM (options, checkpoint, quantization) is refused before it is imported, and before
anything is allocated. Messages go over the channel; vLLM's own log goes to stderr.
"""

import argparse
import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper import engine_config, options, verified
from weightkeeper.checkpoint import Checkpoint, open_checkpoint
from weightkeeper.errors import ConfigError, LoadFailedError, WeightkeeperError
from weightkeeper.frames import Channel, Limits
from weightkeeper.protocol import (
    MAX_DESCRIPTORS,
    VERSION,
    Done,
    Failed,
    FromKeeper,
    Hello,
    Progress,
    Publish,
    Receipt,
    Refusal,
    Segments,
    Welcome,
)
from weightkeeper.ranks import Ranks, command_of, leave_cause
from weightkeeper.receipts import Receipts
from weightkeeper.sockets import engine_path

logger = logging.getLogger(__name__)

LONGEST_DEVICE = {"cpu": "cpu-99", "cuda": f"GPU-{'0' * 36}"}
"""Of the names that engine sockets get on a kind of device."""

REPORT_BYTES = 16 * 1024 * 1024
"""Progress is told after every so many bytes."""


RECEIPTS = "receipts.json"
"""In the scratch directory: what rank 0 hashed, for the other ranks."""


class KeeperChannel:
    """A loader's end of the channel. Threads and the processes of other ranks take turns on it.

    Attributes:
        descriptor: of the socket, which the loaders of other ranks inherit.
    """

    def __init__(self, descriptor: int, scratch: Path):
        self.descriptor = descriptor
        self._channel = Channel(socket.socket(fileno=descriptor), Limits(FromKeeper))
        self._lock = threading.Lock()
        self._turn = open(scratch / "channel.lock", "w")  # noqa: SIM115  held for life
        self._told = 0

    def open(self) -> None:
        self._ask(Hello(VERSION, "loader", "loader"), Welcome)

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Tell a stage; within a stage, only every REPORT_BYTES and at its ends."""
        with self._alone():
            if 0 < done < total and abs(done - self._told) < REPORT_BYTES:
                return
            self._told = done
            self._channel.send(Progress(stage, done, total))

    def publish(self, message: Publish, descriptors: list[int]) -> None:
        with self._alone():
            self._channel.send(message)
            for first in range(0, len(descriptors), MAX_DESCRIPTORS):
                self._channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])
            self._answer(Done)

    def failed(self, code: str, text: str) -> None:
        self._ask(Failed(code, text), Done)

    def give_up(self, cause: str) -> None:
        """From a watching thread: tell the cause and end this process, which may hang in a collective."""
        self.failed(LoadFailedError.code, cause)
        os._exit(1)

    def _ask(self, message: Any, expected: type) -> None:
        with self._alone():
            self._channel.send(message)
            self._answer(expected)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _answer(self, expected: type) -> None:
        answer = self._channel.receive().message
        if isinstance(answer, Refusal):
            raise LoadFailedError(f"the keeper refused: {answer.message}")
        if not isinstance(answer, expected):
            raise LoadFailedError(f"the keeper answered {type(answer).__name__}, expected {expected.__name__}")


@dataclass(frozen=True, slots=True)
class Job:
    """What the loaders of all ranks have to do.

    Attributes:
        config: path of vLLM's config file.
        scratch: a directory of this load's own.
    """

    config: str
    settings: options.Options
    checkpoint: Checkpoint
    scratch: Path


def prepare(config: str, scratch: Path, device: str) -> Job:
    """Check everything that can be checked without vLLM.

    Args:
        device: kind of device, `cpu` or `cuda`.

    Raises:
        WeightkeeperError: the options, the checkpoint or its quantization are refused.
    """
    if directory := os.environ.get("WEIGHTKEEPER_SOCKET_DIR"):
        engine_path(directory, LONGEST_DEVICE[device])  # too long a path is said before anything is read
    values = engine_config.read(config)
    settings = options.read(_extra_config(values, config))
    checkpoint = open_checkpoint(engine_config.required(values, "model", config))
    verified.check(verified.method_of(_model_file(checkpoint), values), device)
    return Job(config, settings, checkpoint, scratch)


def load(job: Job, keeper: KeeperChannel) -> None:
    """Hash the files, load all ranks and publish them.

    Raises:
        WeightkeeperError: the cause, in words for `status`.
    """
    hashing = Receipts(
        job.checkpoint,
        progress=lambda done, total: keeper.progress("hashing the files", done, total),
        finished=lambda: keeper.progress("starting vLLM", 0, 0),
    )
    try:
        from weightkeeper import rank_loader  # vLLM's imports take seconds; the files are hashed meanwhile

        receipts = hashing.get()
        (job.scratch / RECEIPTS).write_bytes(msgspec.json.encode(receipts))
        rank = rank_loader.RankLoader(job.config, job.settings, job.checkpoint, receipts, job.scratch)
        command = command_of(job.config, keeper.descriptor, job.scratch)
        with Ranks(command, rank.world_size, keeper.descriptor, job.scratch, keeper.give_up) as others:
            rank.load(0, keeper.progress, keeper.publish)
            others.wait()
    finally:
        hashing.join()


def load_rank(job: Job, rank: int, keeper: KeeperChannel) -> None:
    """Load and publish one of the other ranks, in a process of its own."""
    from weightkeeper import rank_loader

    receipts = msgspec.json.decode((job.scratch / RECEIPTS).read_bytes(), type=tuple[Receipt, ...])
    loader = rank_loader.RankLoader(job.config, job.settings, job.checkpoint, receipts, job.scratch)
    loader.load(rank, lambda stage, done, total: None, keeper.publish)


def kind_of_device() -> str:
    """`cuda` where the NVIDIA driver is in this container, else `cpu`; vLLM's own choice follows the same fact."""
    return "cuda" if Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists() else "cpu"


def _extra_config(values: dict[str, Any], config: str) -> dict[str, Any]:
    """The extra config where the engine's load format is ours; anybody else's options are not for us to read."""
    if values.get("load-format") not in ("weightkeeper", "ipc_cache"):
        return {}
    extra = values.get("model-loader-extra-config") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError as error:
            raise ConfigError(f"{config}: model-loader-extra-config is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"{config}: model-loader-extra-config is a {type(extra).__name__}, expected a mapping")
    return extra


def _model_file(checkpoint: Checkpoint) -> dict[str, Any]:
    file = Path(checkpoint.path) / "config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="weightkeeper.loader", description=__doc__)
    parser.add_argument("--config", required=True, help="vLLM's config file")
    parser.add_argument("--channel", required=True, type=int, help="descriptor of a connected Unix socket")
    parser.add_argument("--rank", type=int, default=0, help="which rank to load; rank 0 starts the others")
    parser.add_argument("--scratch", type=Path, help="directory of the load that this rank belongs to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    os.set_inheritable(arguments.channel, False)
    if arguments.rank:
        return run_other(arguments)
    with tempfile.TemporaryDirectory(prefix="weightkeeper-loader-") as scratch:
        return run_first(arguments, Path(scratch))


def run_first(arguments: argparse.Namespace, scratch: Path) -> int:
    """Rank 0: speaks for all of them."""
    keeper = KeeperChannel(arguments.channel, scratch)
    keeper.open()
    try:
        keeper.progress("checking the checkpoint")
        load(prepare(arguments.config, scratch, kind_of_device()), keeper)
    except WeightkeeperError as error:
        keeper.failed(error.code, str(error))
        return 1
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        keeper.failed(LoadFailedError.code, f"{type(error).__name__}: {error}")
        return 1
    return 0


def run_other(arguments: argparse.Namespace) -> int:
    """Another rank: leaves its cause where rank 0 finds it."""
    try:
        job = prepare(arguments.config, arguments.scratch, kind_of_device())
        load_rank(job, arguments.rank, KeeperChannel(arguments.channel, arguments.scratch))
    except WeightkeeperError as error:
        leave_cause(arguments.scratch, arguments.rank, str(error))
        return 1
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        leave_cause(arguments.scratch, arguments.rank, f"{type(error).__name__}: {error}")
        return 1
    return 0


def leave(code: int) -> None:
    """End at once: taking vLLM and torch apart takes seconds, in which the device would go on holding their memory."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
