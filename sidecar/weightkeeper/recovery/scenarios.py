"""Ways to lose an engine and to get it back, on processes of our own.

A scenario is prepared, then the interruption comes, then what it needs to be whole again. Between the first two, an
agent begins to work on whatever engine is there; which one that is does not matter, because it is lost.
"""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery import gpu, holders, page_cache
from weightkeeper.recovery.bench import TAKE_NO_IPC_CACHE, Bench
from weightkeeper.recovery.launched import Launched

COMPILE_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")

NOTICE_SECONDS = 60.0
"""For a server to end by itself after its engine core has died; vLLM takes about two."""


class Scenario:
    """One way.

    Attributes:
        name: stable, for the command line and results.
        title: for people, short.
        description: what is lost, and how it comes back.
        holder: name of what holds its weights; empty where nothing does.
        is_start: a new engine starts, so that its throughput from then on is of interest.
        times_steps: so much longer is the agent's job, where it takes a while until the engine is lost.
        group: those of one group come one after the other in a round, because they share what is dear to prepare.
    """

    name: str
    title: str
    description: str
    holder = ""
    is_start = True
    times_steps = 1
    group = ""

    def missing(self, bench: Bench) -> str:
        """Why it cannot be run here; empty where it can."""
        return ""

    def prepare(self, bench: Bench) -> None:
        """Make everything ready and leave a healthy engine.

        Raises:
            ServerStartError: something did not come up.
        """
        bench.ensure()

    def interrupt(self, bench: Bench) -> float:
        """Lose the engine, and have another one begin to start.

        Returns:
            When nothing of the old one answered any more, in seconds of `time.monotonic`.

        Raises:
            ServerStartError: what was to be lost is not.
        """
        raise NotImplementedError

    def ended(self, bench: Bench) -> None:
        """The sample is over: undo what the next one must not find."""


class Disk(Scenario):
    name = "disk"
    title = "plain disk start"
    description = "kill -9 of everything; vLLM starts from the disk, page cache and compile caches warm"

    def interrupt(self, bench: Bench) -> float:
        gone = bench.kill_engine()
        bench.start(bench.config("disk"), TAKE_NO_IPC_CACHE)
        return gone


class ColdDisk(Disk):
    name = "disk-cold"
    title = "disk start, page cache cold"
    description = "as the plain disk start, with the model's files put out of the page cache, compile caches warm"

    def missing(self, bench: Bench) -> str:
        share = page_cache.drop([file.path for file in bench.checkpoint.weight_files])
        if share is None:
            return "the file system of the model does not tell what is in the page cache"
        return f"{share:.0%} of the model stays in the page cache whatever is done" if share > 0.05 else ""

    def interrupt(self, bench: Bench) -> float:
        gone = bench.kill_engine()
        page_cache.drop([file.path for file in bench.checkpoint.weight_files])
        bench.start(bench.config(self.name), TAKE_NO_IPC_CACHE | self._environment(bench))
        return gone

    def _environment(self, bench: Bench) -> dict[str, str]:
        return {}


class ColdCompile(ColdDisk):
    name = "disk-cold-compile"
    title = "disk start, all caches cold"
    description = "as the cold disk start, with empty compile caches: the first start on a machine"

    def _environment(self, bench: Bench) -> dict[str, str]:
        directory = tempfile.mkdtemp(prefix="caches-", dir=bench.settings.out)
        return {name: str(Path(directory, name.lower())) for name in COMPILE_CACHES}


class IpcCache(Scenario):
    name = "ipc_cache"
    title = "vLLM's ipc_cache"
    description = "kill -9 of everything but vLLM's weight cache daemon; vLLM starts with --load-format ipc_cache"
    holder = holders.Daemon.name

    def missing(self, bench: Bench) -> str:
        if not bench.gpus:
            return "vLLM's ipc_cache needs a GPU"
        directory = gpu.vllm_directory()
        if directory is None or not (directory / holders.DAEMON).is_file():
            return "this vLLM has no ipc_cache; it came with 0.30"
        return ""

    def prepare(self, bench: Bench) -> None:
        bench.daemon()
        super().prepare(bench)

    def interrupt(self, bench: Bench) -> float:
        extra = {"socket_dir": str(bench.daemon().sockets), "fallback": False}
        gone = bench.kill_engine()
        bench.start(bench.config(self.name, "ipc_cache", extra), TAKE_NO_IPC_CACHE)
        return gone


class Mapped(Scenario):
    name = "mapped"
    title = "mapped start"
    description = "kill -9 of everything but the sidecar; a new vLLM process maps the weights that it holds"
    holder = holders.Keeper.name
    extra: ClassVar[dict[str, Any]] = {}

    def prepare(self, bench: Bench) -> None:
        bench.keeper()
        super().prepare(bench)

    def interrupt(self, bench: Bench) -> float:
        gone = bench.kill_engine()
        bench.start(self._config(bench))
        return gone

    def _config(self, bench: Bench) -> Path:
        extra = {"socket_dir": str(bench.keeper().sockets), "fallback": False} | self.extra
        return bench.config(self.name, "weightkeeper", extra)


class Copied(Mapped):
    name = "copy"
    title = "copy mode"
    description = "as the mapped start, but the new engine takes a copy of the weights; the sidecar keeps its own"
    extra: ClassVar[dict[str, Any]] = {"mode": "copy", "release": False}


class CoreKilled(Mapped):
    name = "engine-core"
    title = "engine core killed"
    description = "kill -9 of vLLM's engine core alone; its server ends by itself, and a new process maps the weights"

    def interrupt(self, bench: Bench) -> float:
        engine = bench.engine
        os.kill(engine.engine_core(), signal.SIGKILL)
        deadline = time.monotonic() + NOTICE_SECONDS
        while engine.process.poll() is None:
            if time.monotonic() > deadline:
                raise ServerStartError(f"the server lives {NOTICE_SECONDS:.0f} s after its engine core was killed")
            time.sleep(0.005)
        return super().interrupt(bench)


class SidecarCrash(Mapped):
    name = "sidecar-crash"
    title = "sidecar crash, engine up"
    description = "kill -9 of the sidecar while an engine computes on its weights; the engine goes on"
    is_start = False

    def prepare(self, bench: Bench) -> None:
        bench.keeper()
        ensure_configured(bench, self._config(bench))

    def interrupt(self, bench: Bench) -> float:
        bench.keeper().kill()
        return time.monotonic()

    def ended(self, bench: Bench) -> None:
        bench.engine_config = ""  # it computes on the memory of a keeper that is gone: not the engine for another time


class AgentCrash(Scenario):
    name = "agent-crash"
    title = "agent crash, engine up"
    description = "kill -9 of the agent, which is started again and goes on; the engine is not touched"
    is_start = False

    def interrupt(self, bench: Bench) -> float:
        bench.agent.kill()
        gone = time.monotonic()
        bench.agent.start()
        return gone


class Reload(Mapped):
    name = "reload"
    title = "reload by the launcher"
    group = "launcher"
    description = "the launcher is told to reload: requests end, the server is replaced by a fork that maps the weights"

    def prepare(self, bench: Bench) -> None:
        ensure_launched(bench, self._config(bench))

    def interrupt(self, bench: Bench) -> float:
        return launched(bench).reload()

    def _config(self, bench: Bench) -> Path:
        extra = {"socket_dir": str(bench.keeper().sockets), "fallback": False}
        return bench.config("launched", "weightkeeper", extra)


class ServerCrash(Reload):
    name = "server-crash"
    title = "server crash under the launcher"
    description = "kill -9 of the server; the launcher clears up and forks another one that maps the weights"

    def interrupt(self, bench: Bench) -> float:
        return launched(bench).crash_server()


class CoreCrash(Reload):
    name = "core-crash"
    title = "engine core crash under the launcher"
    description = "kill -9 of the engine core; the launcher clears up and forks a server that maps the weights"

    def interrupt(self, bench: Bench) -> float:
        return launched(bench).crash_core()


def ensure_configured(bench: Bench, config: Path) -> None:
    """A plain engine of this configuration; the one before goes, unless it is one."""
    if bench.engine is None or bench.engine_config != config.read_text():
        bench.kill_engine()
        bench.start(config)
    bench.wait_for_health()


def ensure_launched(bench: Bench, config: Path) -> None:
    """A launcher that has imported everything; it stays from one sample to the next."""
    if not isinstance(bench.engine, Launched) or bench.engine.process.poll() is not None:
        bench.stop_engine()
        bench.launch(config)
    bench.wait_for_health()


def launched(bench: Bench) -> Launched:
    """The launcher that `ensure_launched` has left."""
    if not isinstance(bench.engine, Launched):
        raise ServerStartError("the launcher is not there any more")
    return bench.engine


class Elsewhere(Scenario):
    """One that needs the user's compose project."""

    def missing(self, bench: Bench) -> str:
        return "needs containers: give --project with the directory of a compose project that is up"


class ConfigEdit(Elsewhere):
    name = "config-edit"
    title = "config edit through the supervisor"
    description = "engine.yaml is edited; the supervisor sees it and has the engine reloaded"


class Recreate(Elsewhere):
    name = "recreate"
    title = "container recreated"
    description = "docker compose up --force-recreate of the engine's container"


class DockerRestart(Elsewhere):
    name = "docker-restart"
    title = "Docker engine restarted"
    description = "the Docker engine is restarted with all containers: the nearest to a restart of the machine"


ALL: tuple[Scenario, ...] = (
    Disk(), ColdDisk(), ColdCompile(), IpcCache(), Mapped(), Copied(), CoreKilled(), Reload(), ServerCrash(),
    CoreCrash(), SidecarCrash(), AgentCrash(), ConfigEdit(), Recreate(), DockerRestart(),
)  # fmt: skip

BASELINE = Disk.name
