"""vLLM's own ways to start: from the disk, and with its `ipc_cache`. Nothing of ours is in these engines."""

import tempfile
from pathlib import Path

from weightkeeper import nvml
from weightkeeper.recovery import holders, page_cache
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.engine import PLAIN
from weightkeeper.recovery.scenario import Scenario
from weightkeeper.recovery.summary import IPC_CACHE

COMPILE_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


class Disk(Scenario):
    name = "disk"
    title = "plain disk start"
    description = "kill -9 of everything; vLLM starts from the disk, page cache and compile caches warm"

    def interrupt(self, bench: Bench) -> float:
        gone = bench.kill_engine()
        bench.start(bench.config("disk"), PLAIN)
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
        bench.start(bench.config(self.name), PLAIN | self._environment(bench))
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
    name = IPC_CACHE
    title = "vLLM's ipc_cache"
    description = "kill -9 of everything but vLLM's weight cache daemon; vLLM starts with --load-format ipc_cache"
    holder = holders.Daemon.name

    def missing(self, bench: Bench) -> str:
        if not bench.gpus:
            return "vLLM's ipc_cache needs a GPU"
        directory = nvml.vllm_directory()
        if directory is None or not (directory / holders.DAEMON).is_file():
            return "this vLLM has no ipc_cache; it came with 0.30"
        return ""

    def prepare(self, bench: Bench) -> None:
        bench.daemon()
        super().prepare(bench)

    def interrupt(self, bench: Bench) -> float:
        extra = {"socket_dir": str(bench.daemon().sockets), "fallback": False}
        gone = bench.kill_engine()
        bench.start(bench.config(self.name, "ipc_cache", extra), PLAIN)
        return gone
