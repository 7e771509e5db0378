"""Engines that map the weights of our sidecar, each started anew; and crashes that no engine is lost by."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery import holders
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.launched import Launched
from weightkeeper.recovery.scenario import Scenario

NOTICE_SECONDS = 60.0
"""For a server to end by itself after its engine core has died; vLLM takes about two."""


class Mapped(Scenario):
    name = "mapped"
    title = "mapped start"
    description = "kill -9 of everything but the sidecar; a new vLLM process maps the weights that it holds"
    holder = holders.Keeper.name
    group = "mapped"
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
    group = ""
    description = "as the mapped start, but the new engine takes a copy of the weights; the sidecar keeps its own"
    extra: ClassVar[dict[str, Any]] = {"mode": "copy", "release": False}


class CoreKilled(Mapped):
    name = "engine-core"
    title = "engine core killed"
    description = "kill -9 of vLLM's engine core alone; its server ends by itself, and a new process maps the weights"

    def prepare(self, bench: Bench) -> None:
        if isinstance(bench.engine, Launched):  # it would start another server by itself, and not end
            bench.kill_engine()
        super().prepare(bench)

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

    def missing(self, bench: Bench) -> str:
        return "" if bench.settings.has_agent else "no agent works in this run: --no-agent"

    def interrupt(self, bench: Bench) -> float:
        bench.agent.kill()
        gone = time.monotonic()
        bench.agent.start()
        return gone


def ensure_configured(bench: Bench, config: Path) -> None:
    """A plain engine of this configuration; the one before goes, unless it is one."""
    if bench.engine is None or bench.engine_config != config.read_text():
        bench.kill_engine()
        bench.start(config)
    bench.wait_for_health()
