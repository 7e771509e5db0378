"""The keeper's child that loads a model through vLLM, packs it, publishes it and ends.

    python -m weightkeeper.loader --config engine.yaml --channel FD

What can be refused without vLLM (options, checkpoint, quantization) is refused before it is imported, and before
anything is allocated. Messages go over the channel; vLLM's own log goes to stderr.
"""

import argparse
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightkeeper import engine_config, identity, options, verified
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

logger = logging.getLogger(__name__)

REPORT_BYTES = 16 * 1024 * 1024
"""Progress is told after every so many bytes."""


class KeeperChannel:
    """The loader's end of the channel. Thread-safe, because hashing tells its progress from a thread."""

    def __init__(self, connection: socket.socket):
        self._channel = Channel(connection, Limits(FromKeeper))
        self._lock = threading.Lock()
        self._told = 0

    def open(self) -> None:
        self._ask(Hello(VERSION, "loader", "loader"), Welcome)

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Tell a stage; within a stage, only every REPORT_BYTES and at its ends."""
        with self._lock:
            if 0 < done < total and abs(done - self._told) < REPORT_BYTES:
                return
            self._told = done
            self._channel.send(Progress(stage, done, total))

    def publish(self, message: Publish, descriptors: list[int]) -> None:
        with self._lock:
            self._channel.send(message)
            for first in range(0, len(descriptors), MAX_DESCRIPTORS):
                self._channel.send(Segments(first), descriptors[first : first + MAX_DESCRIPTORS])
            self._answer(Done)

    def failed(self, code: str, text: str) -> None:
        self._ask(Failed(code, text), Done)

    def _ask(self, message: Any, expected: type) -> None:
        with self._lock:
            self._channel.send(message)
            self._answer(expected)

    def _answer(self, expected: type) -> None:
        answer = self._channel.receive().message
        if isinstance(answer, Refusal):
            raise LoadFailedError(f"the keeper refused: {answer.message}")
        if not isinstance(answer, expected):
            raise LoadFailedError(f"the keeper answered {type(answer).__name__}, expected {expected.__name__}")


def load(config: str, keeper: KeeperChannel, device: str) -> None:
    """Load what `config` names onto a kind of device, `cpu` or `cuda`, and publish it.

    Raises:
        WeightkeeperError: the cause, in words for `status`.
    """
    keeper.progress("checking the checkpoint")
    values = engine_config.read(config)
    settings = options.read(_extra_config(values, config))
    checkpoint = open_checkpoint(engine_config.required(values, "model", config))
    verified.check(verified.method_of(_model_file(checkpoint), values), device)
    receipts: list[Receipt] = []
    hashing = _Hashing(checkpoint, keeper.progress, receipts)
    try:
        from weightkeeper import rank_loader  # vLLM's imports take seconds; the files are hashed meanwhile

        hashing.finish()
        rank_loader.load_rank(config, settings, checkpoint, tuple(receipts), keeper.progress, keeper.publish)
    finally:
        hashing.join()


class _Hashing(threading.Thread):
    """BLAKE3 over the checkpoint's files beside the import of vLLM."""

    def __init__(self, checkpoint: Checkpoint, progress: Callable[[str, int, int], None], receipts: list[Receipt]):
        super().__init__(name="hashing", daemon=True)
        self._checkpoint, self._progress, self._receipts = checkpoint, progress, receipts
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._receipts += identity.take(
                self._checkpoint, lambda _, done, total: self._progress("hashing the files", done, total)
            )
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the end; what went wrong is raised here."""
        self.join()
        if self._error is not None:
            raise self._error


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
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    keeper = KeeperChannel(socket.socket(fileno=arguments.channel))
    os.set_inheritable(arguments.channel, False)
    try:
        keeper.open()
        with tempfile.TemporaryDirectory(prefix="weightkeeper-loader-") as scratch:
            os.environ.setdefault("WEIGHTKEEPER_SCRATCH", scratch)
            load(arguments.config, keeper, kind_of_device())
    except WeightkeeperError as error:
        keeper.failed(error.code, str(error))
        return 1
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        keeper.failed(LoadFailedError.code, f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
