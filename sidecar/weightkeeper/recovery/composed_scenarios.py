"""Ways to lose the engine of a compose project, and how it comes back in its containers."""

import os
import shlex
import subprocess
import time
from itertools import count

import msgspec

from weightkeeper.errors import ServerStartError
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.protocol import Status
from weightkeeper.recovery import launched_scenarios, mapped_scenarios, processes, scenarios
from weightkeeper.recovery.composed import ComposedBench, command_of
from weightkeeper.recovery.engine import ENGINE_CORE
from weightkeeper.recovery.project import ENGINE, SIDECAR, SUPERVISOR
from weightkeeper.recovery.scenario import Scenario

EDITED = b"\nmax-log-len: %d\n"
"""An option of vLLM that changes nothing but its log, so that every edit is of the same weight."""


class Composed(Scenario):
    """One that needs nothing but the project as it is."""

    holder = "weightkeeper"

    def prepare(self, bench: ComposedBench) -> None:
        bench.ensure()


class Disk(Scenario):
    name = "disk"
    title = "container recreated, plain vLLM"
    description = "the engine's container is replaced by one with plain `vllm serve` that loads from the disk"

    def missing(self, bench: ComposedBench) -> str:
        return "" if "--config" in command_of(bench.project) else "the engine's command has no --config"

    def prepare(self, bench: ComposedBench) -> None:
        bench.ensure(is_supervised=False)  # it would put the container back to what the project says

    def interrupt(self, bench: ComposedBench) -> float:
        command = command_of(bench.project)
        arguments = command[command.index("--") + 1 :] if "--" in command else command[command.index("--config") :]
        plain = ["--load-format", "auto", "--model-loader-extra-config", "{}"]
        return bench.recreate(["vllm", "serve", *arguments, *plain])


class Recreate(Composed):
    name = "recreate"
    title = "container recreated"
    description = "docker compose up --force-recreate of the engine's container, whose server maps the weights"

    def interrupt(self, bench: ComposedBench) -> float:
        return bench.recreate(None)


class Launched(Composed):
    """One that the launcher answers."""

    times_steps = 2  # what is asked of a program in a container takes a second, on a busy machine more
    _before: EngineStatus

    def missing(self, bench: ComposedBench) -> str:
        return "" if bench.engine.is_launched else "the engine of this project runs without our launcher"

    def prepare(self, bench: ComposedBench) -> None:
        super().prepare(bench)
        self._before = bench.engine.status()  # now, so that the agent does not finish its job while it is asked

    def interrupt(self, bench: ComposedBench) -> float:
        self.ask(bench, self._before)
        return bench.engine.replaced(self._before.generation, bench.settings.limit_s)

    def ask(self, bench: ComposedBench, before: EngineStatus) -> None:
        raise NotImplementedError


class Reload(Launched):
    name = "reload"
    title = launched_scenarios.Reload.title
    description = launched_scenarios.Reload.description

    def ask(self, bench: ComposedBench, before: EngineStatus) -> None:
        bench.project.inside(ENGINE, "weightkeeper", "engine-reload", "--cause", "recovery benchmark")


class ServerCrash(Launched):
    name = "server-crash"
    title = launched_scenarios.ServerCrash.title
    description = launched_scenarios.ServerCrash.description

    def ask(self, bench: ComposedBench, before: EngineStatus) -> None:
        kill(bench, ENGINE, before.pid)


class CoreCrash(Launched):
    name = "core-crash"
    title = launched_scenarios.CoreCrash.title
    description = launched_scenarios.CoreCrash.description

    def ask(self, bench: ComposedBench, before: EngineStatus) -> None:
        names = before.processes
        pid = next((pid for pid, name in names.items() if ENGINE_CORE.search(name)), None)
        if pid is None:
            raise ServerStartError(f"no engine core among {', '.join(names.values()) or 'no process'}")
        kill(bench, ENGINE, pid)


class ConfigEdit(Launched):
    name = "config-edit"
    title = "config edit through the supervisor"
    description = "vLLM's config file is saved with another value; the supervisor sees it and has the engine reloaded"
    times_steps = 4
    _numbers = count(1000)

    def missing(self, bench: ComposedBench) -> str:
        if not bench.project.is_running(SUPERVISOR):
            return "the supervisor of this project does not run"
        return super().missing(bench)

    def ask(self, bench: ComposedBench, before: EngineStatus) -> None:
        bench.edit(lambda before: before + EDITED % next(self._numbers))


class SidecarCrash(Composed):
    name = "sidecar-crash"
    title = mapped_scenarios.SidecarCrash.title
    description = mapped_scenarios.SidecarCrash.description
    is_start = False
    times_steps = Launched.times_steps
    _pid = 0

    def prepare(self, bench: ComposedBench) -> None:
        super().prepare(bench)
        self._pid = _pid(bench.project.inside(SIDECAR, "weightkeeper", "status", "--json"))

    def interrupt(self, bench: ComposedBench) -> float:
        kill(bench, SIDECAR, self._pid)
        return time.monotonic()

    def ended(self, bench: ComposedBench) -> None:
        bench.project.compose("up", "-d", "--no-recreate", "--no-deps", "--wait", SIDECAR, seconds=1800.0)


class DockerRestart(Composed):
    name = "docker-restart"
    title = "Docker engine restarted"
    description = "the Docker engine is restarted with all containers: the nearest to a restart of the machine"

    def missing(self, bench: ComposedBench) -> str:
        return "" if bench.restart_docker else "was not allowed; --restart-docker COMMAND names what restarts Docker"

    def interrupt(self, bench: ComposedBench) -> float:
        # Without our mark: a Docker engine that this command starts itself is not to end with the benchmark.
        environment = {name: value for name, value in os.environ.items() if name != processes.MARK}
        going = subprocess.Popen(
            shlex.split(bench.restart_docker), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
        )  # fmt: skip
        return bench.until_gone(going, bench.restart_docker)


def kill(bench: ComposedBench, service: str, pid: int) -> None:
    """SIGKILL to a process in a container, by its number there."""
    bench.project.inside(service, "sh", "-c", f"kill -9 {pid}")


def _pid(status: str) -> int:
    return msgspec.json.decode(status, type=Status).pid


class OnlyProcesses(Scenario):
    """One of `scenarios` that has no form in containers."""

    def __init__(self, like: Scenario):
        self.name, self.title, self.description = like.name, like.title, like.description

    def missing(self, bench: ComposedBench) -> str:
        return "measured on processes of its own only; leave --project out"


COMPOSED: tuple[Scenario, ...] = (
    Disk(), Recreate(), Reload(), ServerCrash(), CoreCrash(), ConfigEdit(), SidecarCrash(),
    mapped_scenarios.AgentCrash(), DockerRestart(),
)  # fmt: skip

ALL = COMPOSED + tuple(
    OnlyProcesses(each) for each in scenarios.ALL if each.name not in {other.name for other in COMPOSED}
)
