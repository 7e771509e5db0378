"""Engines behind our launcher, which forks another server by itself."""

from pathlib import Path

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.launched import Launched
from weightkeeper.recovery.mapped_scenarios import Mapped


class Reload(Mapped):
    name = "reload"
    title = "reload by the launcher"
    group = "launcher"
    times_steps = 2  # the old server answers what it was asked before it goes
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


def ensure_launched(bench: Bench, config: Path) -> None:
    """A launcher that has imported everything, with a good server; it stays from one sample to the next."""
    if not isinstance(bench.engine, Launched) or bench.engine.process.poll() is not None:
        bench.stop_engine()
        bench.launch(config)
    bench.wait_for_health()
    launched(bench).wait_until_good()


def launched(bench: Bench) -> Launched:
    """The launcher that `ensure_launched` has left."""
    if not isinstance(bench.engine, Launched):
        raise ServerStartError("the launcher is not there any more")
    return bench.engine
