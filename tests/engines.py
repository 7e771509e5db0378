"""Real keepers and real engines as processes, for tests with vLLM."""

import atexit
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from weightkeeper import client
from weightkeeper.errors import WeightkeeperError
from weightkeeper.protocol import Status

PROMPTS = ["The capital of France is", "def write(out):\n    return"]
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
if os.environ.get("WEIGHTKEEPER_TEST_DEVICE") != "cuda":
    QUIET |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
START_SECONDS = 300


class Keeper:
    """A running `weightkeeper serve` of its own, with its directory and log; without a model it waits for one."""

    forked = False
    """Whether its loaders are forked from `Prefork` instead of importing vLLM themselves."""

    def __init__(self, model: Path | None, **options: Any):
        self.dir = Path(tempfile.mkdtemp(prefix="wk"))
        self.sockets = self.dir / "run"
        self.sockets.mkdir(mode=0o700)
        self.config = self.dir / "engine.yaml"
        if model is not None:
            self.write(model, **options)
        self.log = (self.dir / "log").open("w+")
        self.process = self._start()

    def write(self, model: Path, **options: Any) -> None:
        """The engine's options as both sides read them."""
        values = {"model": str(model), "load-format": "weightkeeper", "dtype": "bfloat16", "max-model-len": 256}
        values |= {"enforce-eager": True, "kv-cache-memory-bytes": 64 << 20}
        self.config.write_text(yaml.safe_dump(values | {k.replace("_", "-"): v for k, v in options.items()}))

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "weightkeeper.cli", "serve"]
        command += ["--socket-dir", str(self.sockets)]
        command += ["--config", str(self.config)] if self.config.exists() else []
        environment = os.environ | QUIET
        if self.forked:
            command += ["--loader", shlex.join([sys.executable, str(Path(__file__).with_name("forked_loader.py"))])]
            environment["WEIGHTKEEPER_TEST_PREFORK"] = Prefork.get().path
        return subprocess.Popen(command, stderr=self.log, stdout=self.log, env=environment)

    def status(self) -> Status:
        return client.status(str(self.sockets))

    def wait(self, state: str) -> Status:
        """The status once it is in this state; a test fails where it settles in another."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except WeightkeeperError:
                assert self.process.poll() is None, self.text()
            else:
                if status.state == state:
                    return status
                assert status.state in ("loading", "empty"), f"{status.state}: {status.failure}\n{self.text()}"
            time.sleep(0.1)
        raise AssertionError(f"not {state} within {START_SECONDS} s\n{self.text()}")

    def settle(self) -> Status:
        """The status once no loader runs."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                status = self.status()
                if status.state not in ("loading", "empty"):
                    return status
            except WeightkeeperError:
                assert self.process.poll() is None, self.text()
            time.sleep(0.1)
        raise AssertionError(f"still loading after {START_SECONDS} s\n{self.text()}")

    def until_answers(self) -> Status:
        """The status once there is one."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                return self.status()
            except WeightkeeperError:
                assert self.process.poll() is None, self.text()
                time.sleep(0.05)
        raise AssertionError(f"the keeper does not answer\n{self.text()}")

    def until(self, condition: Callable[[Status], bool]) -> Status:
        """The status once the condition holds."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            status = self.status()
            if condition(status):
                return status
            time.sleep(0.1)
        raise AssertionError(f"not so within {START_SECONDS} s\n{self.text()}")

    def text(self) -> str:
        self.log.flush()
        return (self.dir / "log").read_text()

    def extra(self, **options: Any) -> dict[str, Any]:
        return {"socket_dir": str(self.sockets)} | options

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


class ForkedKeeper(Keeper):
    """As Keeper, for tests that are not about the loader."""

    forked = True


@contextmanager
def keeper(model: Path, **options: Any) -> Iterator[Keeper]:
    """A keeper that is ready with `model`."""
    running = ForkedKeeper(model, **options)
    try:
        running.wait("ready")
        yield running
    finally:
        running.close()


class Prefork:
    """A process that has imported vLLM once and forks the engines of the tests."""

    _running: "Prefork | None" = None

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="wk")
        self.path = f"{self.dir}/engines.sock"
        script = Path(__file__).with_name("engine_run.py")
        self.log = open(f"{self.dir}/log", "w+")  # noqa: SIM115  closed at the end
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--listen", self.path],
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, env=os.environ | QUIET,
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not Path(self.path).exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no engines can be started:\n{Path(self.log.name).read_text()}")
            time.sleep(0.05)

    @classmethod
    def get(cls) -> "Prefork":
        if cls._running is None:
            cls._running = cls()
            atexit.register(cls._running.close)
        return cls._running

    def fork(self, streams: list[int], environment: dict[str, str]) -> socket.socket:
        """A connection that first says the process id, then, at its end, the exit status."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(START_SECONDS)
        connection.connect(self.path)
        socket.send_fds(connection, [json.dumps(environment).encode()], streams)
        return connection

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


class Engine:
    """A started engine (see engine_run.py); `answer` waits for its result."""

    def __init__(self, model: Path, *, environment: dict[str, str] | None = None, **request: Any):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        reading, self._input = os.pipe()
        output, writing = os.pipe()
        streams = [reading, writing, self.errors.fileno()]
        self._connection = Prefork.get().fork(streams, os.environ | QUIET | (environment or {}))
        os.close(reading)
        os.close(writing)
        self._output = os.fdopen(output)
        self._told = self._connection.makefile()
        self.pid = int(self._told.readline())
        self.status: int | None = None
        self._lines: list[str] = []
        os.write(self._input, (json.dumps({"model": str(model), "prompts": PROMPTS} | request) + "\n").encode())

    def answer(self) -> dict[str, Any]:
        return json.loads(self.line("RESULT ").removeprefix("RESULT "))

    def again(self, **request: Any) -> dict[str, Any]:
        """The next answer of an engine that is held."""
        os.write(self._input, (json.dumps(request) + "\n").encode())
        return self.answer()

    def line(self, start: str) -> str:
        """Wait for a line of its output that starts so."""
        return self._next(lambda line: line.startswith(start))

    def until(self, text: str) -> None:
        """Wait until its output has a line with this text."""
        self._next(lambda line: text in line)

    def _next(self, is_meant: Callable[[str], bool]) -> str:
        for line in self._output:
            self._lines.append(line)
            if is_meant(line):
                return line
        raise AssertionError(f"the engine ended without an answer:\n{self.log()[-4000:]}")

    def log(self) -> str:
        self.errors.seek(0)
        return "".join(self._lines) + self.errors.read()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Let a held engine go, wait for its end and return its exit status."""
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        self._lines += self._output
        if self.status is None:
            self.status = int(self._told.read())
        return self.status

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self.kill()
        self.end()
        self._told.close()
        self._connection.close()
        self._output.close()
        self.errors.close()


def run(model: Path, **request: Any) -> tuple[dict[str, Any], str]:
    """One engine from start to end: its answer and its log."""
    with Engine(model, **request) as engine:
        answer = engine.answer()
        engine.end()
        return answer, engine.log()


def mapped(model: Path, running: Keeper, **request: Any) -> tuple[dict[str, Any], str]:
    """One engine on a keeper's weights, which must not fall back."""
    extra = running.extra(fallback=False) | request.pop("extra", {})
    return run(model, load_format="weightkeeper", extra=extra, **request)
