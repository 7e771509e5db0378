"""All ways to lose an engine, on processes of our own, and those that need more than that."""

from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.launched_scenarios import CoreCrash, Reload, ServerCrash
from weightkeeper.recovery.mapped_scenarios import AgentCrash, Copied, CoreKilled, Mapped, SidecarCrash
from weightkeeper.recovery.scenario import Scenario
from weightkeeper.recovery.vllm_scenarios import ColdCompile, ColdDisk, Disk, IpcCache


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
