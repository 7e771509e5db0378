"""Everything that runs during a benchmark, on one port: holders, the engine of the moment, the agent."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.recovery import agent, gpu, holders, processes
from weightkeeper.recovery.agent_process import AgentProcess
from weightkeeper.recovery.engine import Engine
from weightkeeper.recovery.launched import Launched
from weightkeeper.recovery.result import Held

SERVER = (sys.executable, "-m", "vllm.entrypoints.cli.main")
MODEL_NAME = "local"
TAKE_NO_IPC_CACHE = {"WEIGHTKEEPER_TAKE_IPC_CACHE": ""}
"""So that vLLM's own loader answers to `ipc_cache` even where our image lets ours do it."""

AGENT_SECONDS = 300.0
"""For the agent to do its job once the engine is back, whatever the model's speed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        model: local checkpoint.
        options: vLLM's, equal for all engines and holders.
        out: directory for configurations, logs and the agents' files.
        limit_s: for each start of an engine or a holder.
        steps: of the agent's job.
        tokens: of each step.
        server: command in place of vLLM's own program.
        application: module in place of vLLM's server behind the launcher.
        place: where engines run, `processes` or `compose`.
    """

    model: Path
    options: dict[str, Any]
    out: Path
    limit_s: float = 280.0
    steps: int = 12
    tokens: int = 32
    server: tuple[str, ...] = SERVER
    application: str = ""
    place: Literal["processes", "compose"] = "processes"


class Bench:
    """The processes of one run. `close` leaves none behind.

    Attributes:
        checkpoint: the model on the disk.
        gpus: those that engines use.
        engine: what answers on `port` now; None where nothing should.
        engine_config: text of its config file.
        agent: that works at this moment.
        model_name: as the server names it.
        held: name of a holder → what it cost when it came up first.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.checkpoint = open_checkpoint(settings.model)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.gpus = gpu.Gpu.visible()
        self.engine: Engine | None = None
        self.engine_config = ""
        self.agent: AgentProcess | None = None
        self.model_name = MODEL_NAME
        self.held: dict[str, Held] = {}
        self._base = gpu.used_bytes(self.gpus)
        self._holders: dict[type[holders.Holder], holders.Holder] = {}
        self._short = Path(tempfile.mkdtemp(prefix="wk"))  # the path of a socket has at most 107 bytes
        self._count = 0
        self._mark = os.environ[processes.MARK] = secrets.token_hex(8)
        settings.out.mkdir(parents=True, exist_ok=True)

    @property
    def compiles(self) -> bool:
        """Whether engines may answer otherwise after they have compiled than on what they compiled: on a GPU they tune
        kernels while they compile and again at the first run, and only the first choice is kept for later starts."""
        return bool(self.gpus) and not self.settings.options.get("enforce-eager")

    def keeper(self) -> holders.Keeper:
        """Our keeper with the weights; the one from before, if it lives."""
        options = self.settings.options | {"model": str(self.settings.model), "load-format": "weightkeeper"}
        return self._holder(
            holders.Keeper, lambda: holders.Keeper(options, self.settings.out, self._short / "k", self.gpus)
        )

    def daemon(self) -> holders.Daemon:
        """vLLM's own."""
        options = self.settings.options | {"model": str(self.settings.model)}
        return self._holder(
            holders.Daemon, lambda: holders.Daemon(options, self.settings.out, self._short / "d", self.gpus)
        )

    def config(self, name: str, load_format: str = "", extra: dict[str, Any] | None = None) -> Path:
        """A config file of an engine."""
        values = {"model": str(self.settings.model), "served-model-name": MODEL_NAME} | self.settings.options
        if load_format:
            values |= {"load-format": load_format, "model-loader-extra-config": extra or {}}
        file = self.settings.out / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    def start(self, config: Path, environment: dict[str, str] | None = None) -> None:
        """A plain server; it is not ready when this returns."""
        command = [*self.settings.server, "serve", "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.engine = Engine(command, self.port, self._log(config.stem), environment)
        self.engine_config = config.read_text()

    def launch(self, config: Path) -> Launched:
        """A launcher with its server; it is not ready when this returns."""
        launched = Launched(self._short, config, self.port, self._log(config.stem), self.settings.application)
        self.engine, self.engine_config = launched, config.read_text()
        return launched

    def wait_for_health(self) -> float:
        """When the engine of the moment answers; as `Engine.wait_for_health`."""
        return self.engine.wait_for_health(self.settings.limit_s)

    def ensure(self) -> None:
        """Whatever engine there is, healthy; where there is none, one from the disk."""
        if self.engine is None:
            self.start(self.config("disk"), TAKE_NO_IPC_CACHE)
        self.wait_for_health()

    def kill_engine(self) -> float:
        """SIGKILL to all of it, where there is one; when it and its memory were gone."""
        self.end_engine()
        return time.monotonic()

    def end_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.kill()
            if self.gpus:
                gpu.wait_until_free(self.gpus, self._base + self.keeper_bytes())

    def stop_engine(self) -> None:
        """End it as a user does."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
            if self.gpus:
                gpu.wait_until_free(self.gpus, self._base + self.keeper_bytes())

    def new_agent(self, name: str, wrong: bool = False, times_steps: int = 1) -> AgentProcess:
        """One with a directory of its own; it is not started. The one before ends."""
        self.end_agent()
        directory = self.settings.out / "agents" / name
        shutil.rmtree(directory, ignore_errors=True)
        settings = agent.Settings(
            directory, self.url, self.model_name, steps=self.settings.steps * times_steps, tokens=self.settings.tokens,
            patience_s=self.settings.limit_s + AGENT_SECONDS,
        )  # fmt: skip
        self.agent = AgentProcess(settings, wrong)
        return self.agent

    def end_agent(self) -> None:
        one, self.agent = self.agent, None
        if one is not None:
            one.close()

    def keeper_bytes(self) -> int:
        """Memory of the holders that are there."""
        found = 0
        for holder in self._holders.values():
            held = self.held[holder.name]
            found += held.device_bytes if held.device_bytes is not None else held.weight_bytes or 0
        return found

    def used_bytes(self) -> int:
        """Memory of everything: on the devices since the run's start, or in the host."""
        if self.gpus:
            return gpu.used_bytes(self.gpus) - self._base
        family = self.engine.family() if self.engine else {}
        return self.keeper_bytes() + sum(processes.own_bytes(pid) for pid in family)

    def close(self) -> None:
        """End everything, whatever fails on the way."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._short, ignore_errors=True)
            stack.callback(processes.kill_marked, self._mark)
            for holder in self._holders.values():
                stack.callback(holder.close)
            stack.callback(self.end_engine)
            stack.callback(self.end_agent)

    def _holder(self, kind: type[holders.Holder], make: Any) -> Any:
        known = self._holders.get(kind)
        if known is not None and known.is_alive:
            return known
        if known is not None:
            known.close()
        holder = self._holders[kind] = make()
        try:
            held = holder.wait(self.settings.limit_s)
        except BaseException:
            del self._holders[kind]
            holder.close()
            raise
        self.held.setdefault(holder.name, held)
        return holder

    def _log(self, name: str) -> Path:
        self._count += 1
        return self.settings.out / f"{self._count:03}-{name}.log"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
