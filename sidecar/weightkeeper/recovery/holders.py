"""What holds weights while engines come and go: our keeper, and vLLM's own daemon. Started, measured, ended."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from weightkeeper import client
from weightkeeper.errors import ServerStartError, WeightkeeperError
from weightkeeper.protocol import Status
from weightkeeper.recovery import gpu, processes
from weightkeeper.recovery.engine import LONGER, PLAIN
from weightkeeper.recovery.gpu import Gpu
from weightkeeper.recovery.levels import Levels
from weightkeeper.recovery.result import Held

POLL_SECONDS = 0.05
STOP_SECONDS = 15.0
SETTLE_SECONDS = 30.0
DAEMON = "model_executor/model_loader/weight_cache/daemon.py"
"""Within vLLM; it is there from 0.30 on."""

DAEMON_MODULE = "vllm.model_executor.model_loader.weight_cache.daemon"

_READY = re.compile("Weight cache daemon READY")
_ENGINE_OPTIONS = (
    "load-format", "model-loader-extra-config", "host", "port", "served-model-name", "shutdown-timeout", "standin",
)  # fmt: skip
"""Of an engine alone; vLLM's daemon needs none of them."""


class Holder:
    """A process that holds weights, in a session of its own.

    Attributes:
        name: for people.
        sockets: directory of its sockets; its path has to be short, that of a socket has at most 107 bytes.

    Args:
        command: its argument list.
        log: file for everything that it prints.
        gpus: whose memory is looked at; none where there are none, or where others come and go on them meanwhile.
        environment: variables besides our own.
    """

    name: str

    def __init__(
        self, command: list[str], sockets: Path, log: Path, gpus: list[Gpu], environment: dict[str, str] | None = None
    ):
        self.sockets = sockets
        self.log = log
        self._gpus = gpus
        self._before = gpu.used_bytes(gpus)
        self._levels = Levels(lambda: gpu.used_bytes(gpus), 0.005) if gpus else None
        self._started = time.monotonic()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
                env=os.environ | (environment or {}),
            )  # fmt: skip
        self._ready: float | None = None

    def wait(self, seconds: float) -> Held:
        """What it is, once it holds the weights.

        Raises:
            ServerStartError: it ended, failed, or takes longer.
        """
        while not self.look(seconds):
            time.sleep(POLL_SECONDS)
        self.settle()
        return self._held()

    def look(self, seconds: float) -> bool:
        """Whether it holds the weights by now; the first look that finds them is what counts.

        Raises:
            ServerStartError: it ended, failed, or has taken longer than `seconds`.
        """
        if self._ready is None and self.is_ready():
            self._ready = time.monotonic() - self._started
        if self._ready is not None:
            return True
        if self.process.poll() is not None:
            raise ServerStartError(f"{self.name} ended with exit code {self.process.returncode}:\n{self.tail()}")
        if time.monotonic() - self._started > seconds:
            raise ServerStartError(f"{self.name} is not ready after {seconds:.0f} s; {LONGER}:\n{self.tail()}")
        return False

    def is_ready(self) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until nothing of its start runs any more."""

    @property
    def weight_bytes(self) -> int | None:
        """That it holds, where it tells."""
        return None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def _held(self) -> Held:
        pids = processes.family(self.process.pid)
        if self._levels:
            self._levels.end()
        return Held(
            name=self.name,
            ready_s=round(self._ready, 3),
            processes=len(pids),
            resident_bytes=sum(processes.resident_bytes(pid) for pid in pids),
            cuda_libraries=tuple(sorted({library for pid in pids for library in processes.cuda_libraries(pid)})),
            weight_bytes=self.weight_bytes,
            device_bytes=gpu.used_bytes(self._gpus) - self._before if self._gpus else None,
            peak_bytes=self._levels.peak - self._before if self._levels else None,
        )

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """SIGKILL to all of it; its sockets stay, as they do when it crashes."""
        processes.kill_family(self.process.pid)
        self.process.wait()

    def close(self) -> None:
        if self._levels:
            self._levels.end()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()


class Keeper(Holder):
    """`weightkeeper serve`."""

    name = "weightkeeper"

    def __init__(self, options: dict[str, Any], directory: Path, sockets: Path, gpus: list[Gpu]):
        config = directory / "keeper.yaml"
        config.write_text(yaml.safe_dump(options))
        command = [sys.executable, "-m", "weightkeeper.cli", "serve", "--socket-dir", str(sockets)]
        command += ["--adopt-seconds", "0"]  # what is measured is a load, also beside an engine that outlived a keeper
        super().__init__([*command, "--config", str(config)], sockets, directory / "keeper.log", gpus)

    def status(self) -> Status:
        return client.status(self.sockets)

    @property
    def weight_bytes(self) -> int | None:
        with contextlib.suppress(WeightkeeperError):
            held = self.status().held
            return held.nbytes if held else None
        return None

    def is_ready(self) -> bool:
        with contextlib.suppress(WeightkeeperError):
            status = self.status()
            if status.state == "failed":
                raise ServerStartError(f"the keeper's load failed: {status.failure}\n{self.tail()}")
            return status.state == "ready"
        return False

    def settle(self) -> None:
        """The loader has ended, and its context is gone from the GPU."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while len(processes.family(self.process.pid)) > 1:
            if time.monotonic() > deadline:
                raise ServerStartError(f"the loader does not end:\n{self.tail()}")
            time.sleep(0.02)
        if self._gpus:
            gpu.wait_until_free(self._gpus, self._before + (self.weight_bytes or 0), SETTLE_SECONDS)


class Daemon(Holder):
    """vLLM's own weight cache, as `vllm preload` starts it."""

    name = "vLLM's daemon"

    def __init__(self, options: dict[str, Any], directory: Path, sockets: Path, gpus: list[Gpu]):
        sockets.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", DAEMON_MODULE]
        command += [*as_arguments(options), "--weight-cache-socket-dir", str(sockets)]
        super().__init__(command, sockets, directory / "daemon.log", gpus, PLAIN)

    def is_ready(self) -> bool:
        return bool(_READY.search(self.log.read_text(errors="replace")))


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Options of a config file as command-line arguments, without those of an engine alone."""
    found = []
    for name, value in options.items():
        if name in _ENGINE_OPTIONS or value is False:
            continue
        found.append(f"--{name}")
        if value is not True:
            found.append(json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    return found
