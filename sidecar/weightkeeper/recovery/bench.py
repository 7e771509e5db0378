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

from weightkeeper import savings
from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.errors import ConfigError
from weightkeeper.recovery import agent_settings, gpu, processes
from weightkeeper.recovery.agent_process import AgentProcess
from weightkeeper.recovery.engine import PLAIN, Engine
from weightkeeper.recovery.guard import Guard
from weightkeeper.recovery.holders import Daemon, Keeper
from weightkeeper.recovery.holding import Holding
from weightkeeper.recovery.launched import Launched
from weightkeeper.recovery.result import Held

SERVER = (sys.executable, "-m", "vllm.entrypoints.cli.main")
MODEL_NAME = "local"
AGENT_SECONDS = 300.0
"""At least, for the agent to do its job once the engine is back."""

TOKEN_SECONDS = 0.5
"""For each token of its job: a large model on a busy CPU."""


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
        has_agent: an agent works while an engine is lost.
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
    has_agent: bool = True


class Bench:
    """The processes of one run. `close` leaves none behind.

    Attributes:
        checkpoint: the model on the disk.
        gpus: those that engines use.
        engine: what answers on `port` now; None where nothing should.
        engine_config: text of its config file.
        agent: that works at this moment.
        model_name: as the server names it.
        holding: what holds weights while engines come and go.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.checkpoint = open_checkpoint(settings.model)
        make_directory(settings.out)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.gpus = gpu.Gpu.visible()
        self.engine: Engine | None = None
        self.engine_config = ""
        self.agent: AgentProcess | None = None
        self.model_name = MODEL_NAME
        self._base = gpu.used_bytes(self.gpus)
        self._short = Path(tempfile.mkdtemp(prefix="wk"))  # the path of a socket has at most 107 bytes
        options = settings.options | {"model": str(settings.model)}
        self.holding = Holding(options, settings.out, self._short, self.gpus, settings.limit_s)
        self._count = 0
        mark = os.environ[processes.MARK] = secrets.token_hex(8)
        self._guard = Guard(mark, self._short)

    @property
    def compiles(self) -> bool:
        """Whether engines may answer otherwise after they have compiled than on what they compiled: on a GPU they tune
        kernels while they compile and again at the first run, and only the first choice is kept for later starts."""
        return bool(self.gpus) and not self.settings.options.get("enforce-eager")

    @property
    def savings(self) -> str:
        """`WEIGHTKEEPER_SAVINGS` of our own engines; `default` where it is not set.

        Raises:
            ConfigError: it has a name that there is not.
        """
        savings.wanted(os.environ, "")
        return os.environ.get(savings.SWITCH) or savings.DEFAULT

    @property
    def held(self) -> dict[str, Held]:
        """Name of a holder → what it cost when it came up first."""
        return self.holding.held

    def keeper(self) -> Keeper:
        """Our keeper with the weights; the one from before, if it lives."""
        return self.holding.get(Keeper)

    def daemon(self) -> Daemon:
        """vLLM's own."""
        return self.holding.get(Daemon)

    def config(
        self, name: str, load_format: str = "", extra: dict[str, Any] | None = None, more: dict[str, Any] | None = None
    ) -> Path:
        """A config file of an engine; the user's options go before `more`."""
        values = {"model": str(self.settings.model), "served-model-name": MODEL_NAME} | (more or {})
        values |= self.settings.options
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
            self.start(self.config("disk"), PLAIN)
        self.wait_for_health()

    def kill_engine(self) -> float:
        """SIGKILL to all of it, where there is one; when it and its memory were gone."""
        self.end_engine()
        return time.monotonic()

    def end_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.kill()
            self._wait_until_free()

    def stop_engine(self) -> None:
        """End it as a user does."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
            self._wait_until_free()

    def new_agent(self, name: str, wrong: bool = False, times_steps: int = 1) -> AgentProcess:
        """One with a directory of its own; it is not started. The one before ends."""
        self.end_agent()
        directory = self.settings.out / "agents" / name
        shutil.rmtree(directory, ignore_errors=True)
        settings = agent_settings.Settings(
            directory, self.url, self.model_name, steps=self.settings.steps * times_steps, tokens=self.settings.tokens,
            patience_s=self.settings.limit_s + self.job_seconds(times_steps),
        )  # fmt: skip
        self.agent = AgentProcess(settings, wrong)
        return self.agent

    def job_seconds(self, times_steps: int = 1) -> float:
        """For the agent to do a job so many times as long as usual."""
        return max(AGENT_SECONDS, TOKEN_SECONDS * self.settings.tokens * self.settings.steps * times_steps)

    def end_agent(self) -> None:
        one, self.agent = self.agent, None
        if one is not None:
            one.close()

    def keeper_bytes(self) -> int:
        """Memory of the holders that are there."""
        return self.holding.nbytes

    def used_bytes(self) -> int:
        """Memory of everything: on the devices since the run's start, or in the host."""
        if self.gpus:
            return gpu.used_bytes(self.gpus) - self._base
        family = self.engine.family() if self.engine else {}
        return self.keeper_bytes() + sum(processes.own_bytes(pid) for pid in family)

    def close(self) -> None:
        """End everything, whatever fails on the way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._guard.close)
            stack.callback(self.holding.close)
            stack.callback(self.end_engine)
            stack.callback(self.end_agent)

    def _wait_until_free(self) -> None:
        self.holding.measure(self._base)
        if self.gpus:
            gpu.wait_until_free(self.gpus, self._base + self.keeper_bytes())

    def _log(self, name: str) -> Path:
        self._count += 1
        return self.settings.out / f"{self._count:03}-{name}.log"


def make_directory(path: Path) -> None:
    """Make it, where it is not there, and see whether it can be written.

    Raises:
        ConfigError: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; give a directory that can be written") from error


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
