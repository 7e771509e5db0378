"""What a benchmark starts: whose environment is whose, what holds weights, and that all of it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from keepers import LOADER, wait_for
from models import write
from recovery_runs import STANDIN, short_directory

from weightkeeper.errors import ServerStartError
from weightkeeper.launcher.processes import table
from weightkeeper.recovery import first_starts, gpu, processes
from weightkeeper.recovery.bench import Bench, Settings
from weightkeeper.recovery.holders import Daemon, Keeper, as_arguments
from weightkeeper.recovery.holding import Holding
from weightkeeper.recovery.result import Held
from weightkeeper.recovery.scenarios import ALL

WAYS = {one.name: one for one in ALL}

DAEMON = """\
import glob, sys, time
while {wanted!r} and not glob.glob({wanted!r}):
    time.sleep(0.01)
print("Weight cache daemon READY", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(model, tmp_path, monkeypatch):
    """With a stand-in for vLLM's server, where the user wants savings and our loader in place of `ipc_cache`."""
    monkeypatch.setenv("WEIGHTKEEPER_SAVINGS", "all")
    monkeypatch.setenv("WEIGHTKEEPER_TAKE_IPC_CACHE", "1")
    monkeypatch.setenv("WEIGHTKEEPER_LOADER", LOADER)
    monkeypatch.setenv(processes.MARK, "")
    short = short_directory()
    monkeypatch.setattr("tempfile.tempdir", str(short))
    paths = [str(tmp_path / "fake"), *sys.path, str(STANDIN.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    daemon(tmp_path)
    settings = Settings(
        model, {}, tmp_path / "out", limit_s=30, server=(sys.executable, str(STANDIN)), application="standin_model"
    )
    made = Bench(settings)
    yield made
    made.close()
    short.rmdir()  # nothing is left in it


def daemon(directory: Path, wanted: str = "") -> None:
    """A vLLM that has nothing but a weight cache daemon, which is ready once a file of this pattern is there."""
    package = directory / "fake/vllm/model_executor/model_loader/weight_cache"
    package.mkdir(parents=True, exist_ok=True)
    for parent in (package, *package.parents):
        (parent / "__init__.py").touch()
        if parent.name == "vllm":
            break
    (package / "daemon.py").write_text(DAEMON.format(wanted=wanted))


def variables_of(pid: int) -> dict[str, str]:
    """That a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if pair)


def ours(pid: int) -> tuple[str | None, str | None]:
    found = variables_of(pid)
    return found.get("WEIGHTKEEPER_SAVINGS"), found.get("WEIGHTKEEPER_TAKE_IPC_CACHE")


@pytest.mark.parametrize("name", ["disk", "disk-cold", "disk-cold-compile", "ipc_cache"])
def test_vllms_own_rows_are_vllms_own(bench, name):
    """No saving of ours and no take-over of `ipc_cache`, whatever the user has for our own rows."""
    way = WAYS[name]
    way.prepare(bench)
    assert ours(bench.engine.process.pid) == ("none", "")  # it answers until it is lost
    way.interrupt(bench)
    bench.wait_for_health()
    assert ours(bench.engine.process.pid) == ("none", "")
    if name == "ipc_cache":
        assert ours(bench.daemon().process.pid) == ("none", "")


def test_our_rows_have_what_the_user_wants(bench):
    """The control of the test above; the result tells it."""
    for name in ("mapped", "reload"):
        WAYS[name].prepare(bench)
        WAYS[name].interrupt(bench)
        bench.wait_for_health()
        assert ours(bench.engine.process.pid)[0] == "all"
    assert ours(bench.keeper().process.pid)[0] == "all"
    assert bench.savings == "all"


def test_everything_starts_at_once(bench, tmp_path):
    """The daemon here is ready only when it sees the first engine's log, which exists once that is started."""
    daemon(tmp_path, str(tmp_path / "out/001-disk-together.log"))
    scenarios = [WAYS[name] for name in ("disk", "mapped", "ipc_cache", "reload")]
    assert first_starts.holders_of(scenarios) == [Keeper, Daemon]
    first_starts._together(bench, first_starts.holders_of(scenarios))
    assert bench.wait_for_health() > bench.engine.started
    assert bench.held.keys() == {"weightkeeper", "vLLM's daemon"}
    assert bench.keeper_bytes() == 1 << 20
    assert bench.keeper() is bench.holding.get(Keeper)


def test_a_holder_that_ends_while_everything_starts_is_told(bench, tmp_path):
    """With its exit code; nothing waits for the others."""
    (tmp_path / "fake/vllm/model_executor/model_loader/weight_cache/daemon.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ServerStartError, match="vLLM's daemon ended with exit code 3"):
        first_starts._together(bench, [Daemon, Keeper])


class Counted:
    """A bench that only counts its starts; also the way of these, and the engine."""

    def __init__(self, has_agent: bool, compiles: bool):
        self.settings, self.holding = self, self
        self.has_agent, self.compiles = has_agent, compiles
        self.engine = None
        self.started = 0.0
        self.starts: list[str] = []

    def begin(self, kinds: list) -> None:
        assert kinds == [Keeper]

    def wait(self) -> None:
        pass

    def config(self, name: str, more: dict) -> str:
        return name

    def start(self, config: str, environment: dict) -> None:
        self.starts.append(config)
        self.engine = self

    def prepare(self, bench: "Counted") -> None:
        assert self.engine is not None

    def interrupt(self, bench: "Counted") -> None:
        self.start("disk", {})

    def wait_for_health(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("has_agent", "compiles", "together", "starts"),
    [
        (True, False, False, ["disk"]),
        (True, True, False, ["disk", "disk"]),
        (True, False, True, ["disk-together", "disk"]),
        (True, True, True, ["disk-together", "disk"]),
        (False, False, False, ["disk"]),
        (False, True, False, ["disk"]),
        (False, True, True, ["disk-together"]),
    ],
)
def test_the_reference_is_from_a_start_that_compiled_nothing(has_agent, compiles, together, starts):
    """With an agent it is the last of these starts; without one, the first counted start behind them."""
    bench = Counted(has_agent, compiles)
    first_starts.make(bench, bench, [WAYS["mapped"]], together)
    assert bench.starts == starts


class Falling:
    """A GPU whose memory comes back little by little."""

    def __init__(self, *levels: int):
        self._levels = list(levels)

    def used_bytes(self) -> int:
        return self._levels.pop(0) if len(self._levels) > 1 else self._levels[0]


GB = 10**9


def held(name: str, weight_bytes: int | None) -> Held:
    return Held(name, 1.0, 1, 1, (), weight_bytes)


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        (
            [held("weightkeeper", 14 * GB), held("vLLM's daemon", None)],
            {"weightkeeper": None, "vLLM's daemon": 16 * GB},
        ),
        ([held("weightkeeper", 14 * GB)], {"weightkeeper": 30 * GB}),
        ([held("vLLM's daemon", None)], {"vLLM's daemon": 30 * GB}),
    ],
    ids=["both", "ours", "vllms"],
)
def test_memory_of_holders_that_came_up_beside_others_is_found_afterwards(tmp_path, holders, expected):
    """Once no engine runs and the device's memory is at rest: what is in use beyond the other's weights."""
    device = Falling(90 * GB, 60 * GB, 40 * GB, 31 * GB)
    holding = Holding({}, tmp_path, tmp_path, [device], 1.0)
    holding.begin([])
    holding.held = {one.name: one for one in holders}
    holding.measure(GB)
    assert {name: one.device_bytes for name, one in holding.held.items()} == expected
    holding.measure(0)  # once
    assert {name: one.device_bytes for name, one in holding.held.items()} == expected


def test_gpus_are_those_of_cuda_visible_devices_in_its_order(monkeypatch):
    """The first one is the first of the program; none where a MIG id hides which."""
    gpus = [type("Gpu", (), {"uuid": f"GPU-{letter}"})() for letter in "abc"]
    monkeypatch.setattr(gpu.Gpu, "all", classmethod(lambda cls: gpus))
    for given, expected in {"2,0": [2, 0], "GPU-b": [1], "MIG-7f": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert gpu.Gpu.visible() == [gpus[number] for number in expected]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu.Gpu.visible() == gpus


def test_options_of_a_config_file_are_the_daemons_arguments():
    """Without those of an engine alone."""
    options = {"model": "/m", "load-format": "auto", "max-model-len": 64, "enforce-eager": True}
    assert as_arguments(options | {"hf-overrides": {"a": 1}, "trust-remote-code": False}) == [
        "--model", "/m", "--max-model-len", "64", "--enforce-eager", "--hf-overrides", '{"a": 1}',
    ]  # fmt: skip


def test_a_killed_family_takes_everything_it_started_along(tmp_path):
    """Also a grandchild that has begun a session of its own."""
    code = (
        "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as leader:
        pid = int(wait_for((tmp_path / "pid").exists and (lambda: read(tmp_path / "pid")), "the grandchild"))
        assert pid in table()
        processes.kill_family(leader.pid)
        assert leader.wait(10) == -signal.SIGKILL
    assert pid not in table() or not table()[pid].is_alive


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_libraries_of_cuda_and_torch_are_seen():
    """The control of `no CUDA library is mapped`: torch is, here."""
    import torch  # noqa: F401

    assert any(name.startswith("libtorch") for name in processes.cuda_libraries(os.getpid()))


def test_one_crash_after_the_other_waits_for_no_back_off(bench):
    """Each sample is of the first crash of a good server; the delay after more is no part of what is measured."""
    way = WAYS["server-crash"]
    for _ in range(3):
        way.prepare(bench)
        way.interrupt(bench)
        healthy = bench.wait_for_health()
        assert "wait" not in bench.engine.phases(0.0, healthy)
    assert bench.engine.status().restarts == {"crash": 3}
