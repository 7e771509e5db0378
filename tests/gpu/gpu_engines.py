"""Keepers, engines and models for the tests on a GPU, on top of those of the CPU's tests."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
from gpu_machine import GPU, REHEARSING, TESTS

from weightkeeper import client
from weightkeeper.launcher import processes

GIGABYTES = os.environ.get("WEIGHTKEEPER_TEST_GIGABYTES", "0.1" if REHEARSING else "1.5")
"""Size of the models; one that scripts/make_model.py knows."""

SHARE = 0.3
"""Of the GPU, for every engine whose KV cache is not what is tested."""

CACHE_BYTES = 64 << 20 if REHEARSING else 256 << 20

OWN_NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--net", "--uts", "--mount")
IN_CONTAINER = (*OWN_NAMESPACES, sys.executable, str(Path(__file__).with_name("loopback.py")))
"""A program behind it is process 1 of its own namespaces, with a loopback interface, as in a container."""


def children(pid: int) -> list[int]:
    """Processes that one has started and that have not ended."""
    return [child for child, each in processes.table().items() if each.parent == pid and each.is_alive]


class Keeper(engines.Keeper):
    """A keeper, perhaps in namespaces of its own, with variables or a loader of its own."""

    def __init__(
        self,
        model: Path,
        *,
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        serve: Sequence[str] = (),
        **options: Any,
    ):
        self._prefix, self._environment, self._serve = prefix, environment or {}, serve
        super().__init__(model, gpu_memory_utilization=SHARE, **options)

    def _start(self) -> subprocess.Popen:
        command = [*self._prefix, sys.executable, "-m", "weightkeeper.cli", "serve", "--socket-dir", str(self.sockets)]
        return subprocess.Popen(
            [*command, "--config", str(self.config), *self._serve],
            stdin=subprocess.DEVNULL, stderr=self.log, stdout=self.log,
            env=os.environ | engines.QUIET | self._environment,
        )  # fmt: skip

    def close(self) -> None:
        if self._prefix:
            self.process.kill()  # `unshare` waits whatever it is told; its child ends with it
        super().close()

    @property
    def pid(self) -> int:
        """Of the keeper itself, as seen from here."""
        return children(self.process.pid)[0] if self._prefix else self.process.pid

    @property
    def device(self) -> str:
        """Name of its engine socket."""
        return next(iter(self.status().held.devices))

    def names(self) -> list[str]:
        """In its socket directory."""
        return sorted(os.listdir(self.sockets))

    def load(self) -> None:
        client.load(str(self.sockets))


class PlainEngine(engines.Engine):
    """An engine in a process of its own from the start, for variables and namespaces that a fork cannot have."""

    def __init__(
        self, model: Path, *, prefix: Sequence[str] = (), environment: dict[str, str] | None = None, **request: Any
    ):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(TESTS / "engine_run.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env=os.environ | engines.QUIET | (environment or {}),
        )  # fmt: skip
        self._output = self._process.stdout
        self.pid = self._process.pid
        self.status: int | None = None
        self._lines: list[str] = []
        self._input = os.dup(self._process.stdin.fileno())
        self._process.stdin.close()
        os.write(self._input, (json.dumps({"model": str(model), "prompts": engines.PROMPTS} | request) + "\n").encode())

    def end(self) -> int:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        self._lines += self._output
        self.status = self._process.wait()
        return self.status

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end()
        self._output.close()
        self.errors.close()


class _Fork:
    """The process that engines are forked from, where that works."""

    def __init__(self) -> None:
        self.why_not = ""
        self._making: threading.Thread | None = None

    def begin(self) -> None:
        """Start it; it imports vLLM meanwhile."""
        self._making = threading.Thread(target=self._make)
        self._making.start()

    def is_there(self) -> bool:
        if self._making is None:
            self.begin()
        self._making.join()
        return not self.why_not

    def _make(self) -> None:
        try:
            engines.Prefork.get()
        except AssertionError as error:  # it had threads or a CUDA context after the imports
            self.why_not = str(error)


FORK = _Fork()


def start(model: Path, *, plain: bool = False, **request: Any) -> engines.Engine:
    """An engine, forked from a process that has imported vLLM; `plain`, or where that fails, one that imports it."""
    options = {"gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": CACHE_BYTES}
    request["options"] = options | request.get("options", {})
    return (PlainEngine if plain or not FORK.is_there() else engines.Engine)(model, **request)


def run(model: Path, **request: Any) -> tuple[dict[str, Any], str]:
    """One engine from start to end: its answer and its log."""
    with start(model, **request) as engine:
        answer = engine.answer()
        engine.end()
        return answer, engine.log()


def on(keeper: Keeper, **extra: Any) -> dict[str, Any]:
    """Of a request: the keeper's weights, without falling back."""
    return {"load_format": "weightkeeper", "extra": keeper.extra(**({"fallback": False} | extra))}


def mapped(model: Path, keeper: Keeper, **request: Any) -> tuple[dict[str, Any], str]:
    """One engine on a keeper's weights, which must not fall back."""
    return run(model, **on(keeper), **request)


def used() -> int:
    """Bytes in use on the GPU; 0 in a rehearsal."""
    return GPU.used_bytes() if GPU else 0


class Models:
    """Checkpoints, written when they are asked for, or ahead and all at once.

    Args:
        directory: where to.
        recipes: name → options of scripts/make_model.py.
    """

    def __init__(self, directory: Path, recipes: dict[str, list[str]]):
        self._directory = directory
        self._recipes = recipes
        self._writers: dict[str, subprocess.Popen] = {}

    def begin(self, *names: str) -> None:
        """Start writing them."""
        script = str(TESTS.parent / "scripts/make_model.py")
        for name in names:
            command = [sys.executable, script, str(self._directory / name), *self._recipes[name]]
            self._writers[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def finish(self) -> None:
        """Wait for all that was begun."""
        for name, writer in self._writers.items():
            assert writer.wait(240) == 0, f"{name} was not written"

    def __getitem__(self, name: str) -> Path:
        if name in self._recipes:
            if name not in self._writers:
                self.begin(name)
            self.finish()
        return self._directory / name
