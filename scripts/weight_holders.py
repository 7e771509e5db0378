"""What holds weights while engines restart: our keeper, and vLLM's own daemon. Started, waited for, measured, ended."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml
from machine import Gpu
from server_run import StartError, family, kill_session, processes

from weightkeeper import client
from weightkeeper.errors import WeightkeeperError
from weightkeeper.protocol import Status
from weightkeeper.recovery.holders import as_arguments
from weightkeeper.recovery.processes import cuda_libraries, resident_bytes

READY = re.compile("Weight cache daemon READY")


class Holder:
    """A process that holds weights, in a session of its own.

    Attributes:
        name: for people.
        sockets: directory of its sockets.

    Args:
        command: its argument list.
        log: file for everything that it prints.
        gpu: whose memory is looked at; None where there is none.
    """

    name: str
    sockets: Path

    def __init__(self, command: list[str], log: Path, gpu: Gpu | None):
        self.log = log
        self.gpu = gpu
        self.before = gpu.used_bytes() if gpu else 0
        self.started = time.monotonic()
        self._peak = PeakMemory(gpu) if gpu else None
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )

    def wait(self, limit: float) -> float:
        """Seconds from its start until the weights are held.

        Raises:
            StartError: it ended, failed, or takes longer than `limit` seconds.
        """
        while not self.is_ready():
            seconds = time.monotonic() - self.started
            if self.process.poll() is not None:
                raise StartError(f"it ended with exit code {self.process.returncode}:\n{self.tail()}")
            if seconds > limit:
                raise StartError(f"not ready after {limit:.0f} s:\n{self.tail()}")
            time.sleep(0.05)
        seconds = time.monotonic() - self.started
        self.settle()
        return seconds

    def is_ready(self) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        """Nothing of its start runs any more."""

    def memory(self) -> dict[str, Any]:
        """GPU memory since before its start, at its peak and now; and what its processes are."""
        pids = family(self.process.pid)
        found: dict[str, Any] = {
            "processes": len(pids),
            "resident_bytes": sum(resident_bytes(pid) for pid in pids),
            "cuda_libraries": sorted({library for pid in pids for library in cuda_libraries(pid)}),
        }
        if self.gpu:
            found["gpu_bytes"] = self.gpu.used_bytes() - self.before
            found["gpu_peak_bytes"] = self._peak.end() - self.before
            found["gpu_processes"] = len(self.gpu.processes())
        return found

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self._peak:
            self._peak.end()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        kill_session(self.process.pid)
        self.process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)


class Keeper(Holder):
    """`weightkeeper serve`."""

    name = "weightkeeper"

    def __init__(self, options: dict[str, Any], directory: Path, log: Path, gpu: Gpu | None):
        self.sockets = Path(tempfile.mkdtemp(prefix="wk"))  # a short path: a socket's has at most 107 bytes
        config = directory / "keeper.yaml"
        config.write_text(yaml.safe_dump(options))
        command = [sys.executable, "-m", "weightkeeper.cli", "serve", "--socket-dir", str(self.sockets)]
        super().__init__([*command, "--config", str(config)], log, gpu)

    def status(self) -> Status:
        return client.status(self.sockets)

    def is_ready(self) -> bool:
        with contextlib.suppress(WeightkeeperError):
            status = self.status()
            if status.state == "failed":
                raise StartError(f"the load failed: {status.failure}\n{self.tail()}")
            return status.state == "ready"
        return False

    def settle(self) -> None:
        """The loader has ended, and its context is gone from the GPU."""
        deadline = time.monotonic() + 30
        while children(self.process.pid):
            if time.monotonic() > deadline:
                raise StartError(f"the loader does not end:\n{self.tail()}")
            time.sleep(0.02)
        if self.gpu:
            self.gpu.wait_until_free(self.before + self.status().held.nbytes, 30)

    def memory(self) -> dict[str, Any]:
        status = self.status()
        found = super().memory() | {"weight_bytes": status.held.nbytes, "load_seconds": status.held.load_seconds}
        if self.gpu:
            found["overhead"] = found["gpu_bytes"] / status.held.nbytes - 1
        return found


class Daemon(Holder):
    """vLLM's own weight cache, as `vllm preload` starts it."""

    name = "vLLM's daemon"

    def __init__(self, options: dict[str, Any], directory: Path, log: Path, gpu: Gpu | None):
        self.sockets = Path(tempfile.mkdtemp(prefix="wk"))
        command = [sys.executable, "-m", "vllm.model_executor.model_loader.weight_cache.daemon"]
        command += [*as_arguments(options), "--weight-cache-socket-dir", str(self.sockets)]
        super().__init__(command, log, gpu)

    def is_ready(self) -> bool:
        return bool(READY.search(self.log.read_text(errors="replace")))


class PeakMemory:
    """The most memory in use on a GPU from now to `end`, looked at every 5 ms."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._most = gpu.used_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, self._gpu.used_bytes())

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most


def children(pid: int) -> list[int]:
    """Processes that one has started and that have not ended."""
    return [child for child, (parent, _) in processes().items() if parent == pid]
