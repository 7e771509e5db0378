"""Real vLLM on weights that a keeper holds in GPU memory. `make test-gpu` runs these where there is a GPU."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_engines
import pytest
from gpu_engines import FORK, GIGABYTES, IN_CONTAINER, Keeper, Models, children, mapped, on, run, start, used
from gpu_machine import GPU, REHEARSING, WHY_NOT, wait_until_free
from keepers import descriptors_of, settled_descriptors, wait_for

from weightkeeper.errors import WeightkeeperError
from weightkeeper.recovery.holders import Daemon
from weightkeeper.recovery.levels import Levels
from weightkeeper.recovery.processes import cuda_libraries, resident_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

MIB = 1 << 20
SEGMENT_BYTES = 1 << 30
SLACK_BYTES = 64 * MIB
MAPPED_LINE = re.compile(r"weightkeeper: (\w+), mapped (\d+) bytes and copied (\d+) in ([\d.]+) ms")
LIST = re.compile(r"not verified for sharing .*\(verified: [^)]+\)")
STAGES = ["hashing the files", "reading", *([] if REHEARSING else ["post-processing"]), "packing", "publish"]


RECIPES = {
    "base": ["--gigabytes", GIGABYTES],
    "other": ["--gigabytes", GIGABYTES, "--seed", "1"],
    "small": ["--gigabytes", "0.1"],
    "fp8": ["--gigabytes", GIGABYTES, "--quantize", "fp8-block"],
    "mla": ["--layers", "2", "--hidden", "2048", "--intermediate", "6144", "--mla"],
}
"""Checkpoint → how it is made. `other` has the same headers as `base`, and other bytes."""

AHEAD_GIGABYTES = 4
"""Up to here all checkpoints are written at once, before the first is loaded."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    FORK.begin()
    written = Models(tmp_path_factory.mktemp("models"), RECIPES)
    if float(GIGABYTES) <= AHEAD_GIGABYTES:
        written.begin(*(name for name in RECIPES if name != "fp8" or not REHEARSING))
        written.finish()
    return written


class Loaded:
    """A keeper whose load was watched.

    Attributes:
        before: bytes in use on the GPU before its start.
        peak: the most while it loaded.
    """

    def __init__(self, model: Path):
        self.before = used()
        watch = Levels(GPU.used_bytes, 0.005) if GPU else None
        self.keeper = Keeper(model)
        try:
            self.held = self.keeper.wait("ready").held
            wait_for(lambda: not children(self.keeper.pid), "the loader's end", 60)
        except BaseException:
            self.keeper.close()
            raise
        finally:
            self.peak = 0
            if watch:
                watch.end()
                self.peak = watch.peak


@pytest.fixture(scope="module")
def held(models) -> Iterator[Loaded]:
    """A keeper with `base`, the first thing on the GPU."""
    loaded = Loaded(models["base"])
    yield loaded
    loaded.keeper.close()


@pytest.fixture(scope="module")
def disk(models) -> dict[str, Any]:
    """What vLLM's own loader answers, eager, with its KV cache planned by the share of the GPU that the user gave."""
    answer, log = run(models["base"], options=planned(), repack=False)
    assert "weightkeeper:" not in log
    return answer


def planned(**more: Any) -> dict[str, Any]:
    """Options with which vLLM plans the KV cache itself."""
    return more if REHEARSING else {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5, **more}


@pytest.fixture(scope="module")
def engine(models, held) -> Iterator[Any]:
    """An engine on `held` that stays, whatever happens to others."""
    with start(models["base"], hold=True, **on(held.keeper)) as running:
        running.first = running.answer()
        yield running


class Fleet:
    """Keepers that load at the same time; each is waited for when it is asked for."""

    def __init__(self) -> None:
        self._keepers: dict[str, Any] = {}

    def add(self, name: str, keeper: Any) -> None:
        self._keepers[name] = keeper

    def __getitem__(self, name: str) -> Keeper:
        self._keepers[name].wait("ready")
        return self._keepers[name]

    def raw(self, name: str) -> Any:
        """Without waiting."""
        return self._keepers[name]

    def settle(self) -> None:
        """Nothing loads any more, so that what is in use on the GPU stays as it is."""
        for keeper in self._keepers.values():
            if isinstance(keeper, Keeper):
                keeper.settle()
                wait_for(lambda keeper=keeper: not children(keeper.pid), "the loader's end", 60)
            else:
                keeper.wait(240)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for keeper in self._keepers.values():
                stack.callback(keeper.close)


@pytest.fixture(scope="module")
def fleet(models, held, tmp_path_factory) -> Iterator[Fleet]:
    """Keepers for single tests. They start after `held`, whose load is measured alone, and beside the next tests."""
    found = Fleet()
    short = Path(tempfile.mkdtemp(prefix="wk"))  # the path of a socket has at most 107 bytes
    try:
        found.add("copy", Keeper(models["base"]))
        shutil.copytree(models["base"], models["tuned"])
        found.add("tuned", Keeper(models["tuned"]))
        found.add("mla", Keeper(models["mla"]))
        found.add("isolated", Keeper(models["base"], prefix=IN_CONTAINER, environment=LOCAL))
        found.add("online", Keeper(models["base"], quantization="fp8"))
        if not REHEARSING:
            found.add("expandable", Keeper(models["base"], environment=EXPANDABLE))
            found.add("fp8", Keeper(models["fp8"]))
            directory = tmp_path_factory.mktemp("daemon")
            options = {"model": str(models["tuned"]), "dtype": "bfloat16", "max-model-len": 256, "enforce-eager": True}
            options["gpu-memory-utilization"] = gpu_engines.SHARE
            found.add("daemon", Daemon(options, directory, short / "d", [GPU]))
        yield found
    finally:
        found.close()
        shutil.rmtree(short)


# --- what holding costs; these come first, while nothing else is on the GPU


@pytest.fixture(scope="module")
def context_bytes(models) -> int:
    """GPU memory that a loader needs whatever it loads: measured with a model of 0.1 GB."""
    loaded = Loaded(models["small"])
    nbytes = loaded.peak - loaded.before - loaded.held.nbytes
    loaded.keeper.close()
    if GPU:
        wait_until_free(loaded.before)
    return nbytes


def test_the_peak_of_a_load_is_the_model_and_little_more(gpu, context_bytes, held, disk, tell):
    """At most the model, its largest tensor, one segment, and the context as measured."""
    largest = disk["parameter_bytes"]["largest"]
    peak = held.peak - held.before
    bound = held.held.nbytes + largest + SEGMENT_BYTES + context_bytes
    tell(
        f"{peak / MIB:.0f} MiB at the peak; model {held.held.nbytes / MIB:.0f}, largest tensor {largest / MIB:.0f}, "
        f"segment 1024, context {context_bytes / MIB:.0f}: at most {bound / MIB:.0f}"
    )
    assert peak <= bound


def test_a_keeper_alone_costs_its_weights(held, tell):
    """GPU memory: the weights and 0.1 %, no process on the GPU; in itself under 40 MB, without a library of CUDA."""
    pid = held.keeper.process.pid
    resident = resident_bytes(pid)
    assert resident < 40e6
    assert cuda_libraries(pid) == set()
    tell(f"keeper {resident / 1e6:.1f} MB resident, {len(held.keeper.names())} names in its directory")
    if GPU is None:
        return
    weights = held.held.nbytes
    taken = wait_until_free(held.before + weights) - held.before
    tell(f"{taken / MIB:.1f} MiB on the GPU for {weights / MIB:.1f} MiB of weights")
    assert taken <= weights * 1.001 + 4 * MIB
    assert pid not in GPU.processes()


def test_an_engine_shows_among_the_gpu_s_processes(gpu, engine):
    """The control of the test above: who computes is listed, by some process id."""
    if not gpu.processes():
        pytest.skip("NVML lists no processes here, so that their absence says nothing")


# --- the same answers


def test_tokens_and_logprobs_are_those_of_a_disk_load(engine, disk, held, tell):
    """Eager: bit for bit, with every parameter byte on the mapping."""
    if FORK.why_not:
        tell(f"engines are not forked, which takes longer: {FORK.why_not}")
    assert engine.first["tokens"] == disk["tokens"]
    assert engine.first["logprobs"] == disk["logprobs"]
    counted = engine.first["parameter_bytes"]
    assert counted["shared"] == counted["all"] > 0
    how, nbytes, _, milliseconds = MAPPED_LINE.search(engine.log()).groups()
    assert (how, int(nbytes)) == ("zero_copy", counted["all"])
    tell(f"{int(nbytes) / 1e9:.2f} GB connected, identified, mapped and bound in {milliseconds} ms")


def test_tokens_and_logprobs_are_those_of_a_disk_load_with_graphs(gpu, models, held, fleet):
    """The same under torch.compile and CUDA graphs, once everything is compiled: compiling tunes kernels twice, and
    only the first choice is kept for later starts."""
    graphs = {"enforce_eager": False}
    run(models["base"], options=graphs)
    from_disk, _ = run(models["base"], options=graphs)
    from_keeper, log = mapped(models["base"], held.keeper, options=graphs)
    assert MAPPED_LINE.search(log)
    assert from_keeper["tokens"] == from_disk["tokens"]
    assert from_keeper["logprobs"] == from_disk["logprobs"]


def test_other_weights_give_other_tokens(models, disk):
    """Negative control: the prompts tell models apart."""
    other, _ = run(models["other"], repack=False)
    assert other["tokens"] != disk["tokens"]


# --- the memory budget, G02


def test_kv_cache_is_as_large_as_a_disk_load_s(gpu, models, held, fleet, disk, tell):
    """With the user's old utilization: within 2 % of it."""
    fleet.settle()
    answer, _ = mapped(models["base"], held.keeper, options=planned())
    tell(f"{disk['blocks']} blocks from disk, {answer['blocks']} mapped")
    assert abs(answer["blocks"] - disk["blocks"]) <= 0.02 * disk["blocks"]


def test_kv_cache_is_as_large_beside_another_process(gpu, models, held, fleet, tell):
    """The second form: somebody else holds 10 GB of the GPU."""
    fleet.settle()
    code = "import sys, torch; t = torch.ones(10**10, dtype=torch.uint8, device='cuda'); print('held', flush=True); "
    command = [sys.executable, "-c", code + "sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout.readline() == b"held\n"
        from_disk, _ = run(models["base"], options=planned())
        from_keeper, _ = mapped(models["base"], held.keeper, options=planned())
    tell(f"{from_disk['blocks']} blocks from disk, {from_keeper['blocks']} mapped")
    assert abs(from_keeper["blocks"] - from_disk["blocks"]) <= 0.02 * from_disk["blocks"]
    assert from_keeper["tokens"] == from_disk["tokens"]


# --- one engine's fault is nobody else's, G03


def test_a_stray_write_ends_the_writer_alone(models, held, engine, disk):
    """It faults before a byte changes; the other engine's next answer, and a new engine's, are right."""
    with start(models["base"], hold=True, **on(held.keeper)) as writer:
        writer.answer()
        with pytest.raises(AssertionError, match="ended without an answer"):
            writer.again(write=True)
        assert writer.end() != 0
        assert "WRITTEN" not in writer.log()
        if GPU:
            assert "illegal memory access" in writer.log()
    again = engine.again()
    assert again["tokens"] == disk["tokens"]
    assert again["logprobs"] == disk["logprobs"]
    new, _ = mapped(models["base"], held.keeper)
    assert new["tokens"] == disk["tokens"]


def test_verify_finds_the_weights_as_they_were_loaded(held):
    """After that write."""
    command = [sys.executable, "-m", "weightkeeper.cli", "verify", "--socket-dir", str(held.keeper.sockets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "No such command" in done.stderr:
        pytest.skip("this weightkeeper has no verify command")
    assert done.returncode == 0, done.stdout + done.stderr
    assert held.keeper.device in done.stdout


class Flat:
    """What a keeper and the GPU have in use, to be compared later."""

    def __init__(self, keeper: Keeper, fleet: Fleet):
        fleet.settle()
        self._keeper = keeper
        self._descriptors = settled_descriptors(keeper.process.pid, keeper.sockets)
        self._own = resident_bytes(keeper.process.pid)
        self._leases = len(keeper.status().leases)
        self._used = used()

    def check(self) -> str:
        pid = self._keeper.process.pid
        wait_for(lambda: len(self._keeper.status().leases) == self._leases, "the leases' end")
        assert settled_descriptors(pid, self._keeper.sockets) == self._descriptors
        grown = resident_bytes(pid) - self._own
        assert grown < 4 * MIB
        if GPU:
            assert wait_until_free(self._used) <= self._used + SLACK_BYTES
        on_gpu = (used() - self._used) / MIB
        return f"keeper {grown / 1024:+.0f} KiB, {descriptors_of(pid)} descriptors, GPU {on_gpu:+.1f} MiB"


def test_fifty_clients_leave_nothing_behind(held, fleet, engine, disk, tmp_path, tell):
    """They end by themselves, or are killed when they have asked, been granted, or mapped."""
    file = tmp_path / "fingerprint.json"
    file.write_text(json.dumps(engine.first["fingerprint"]))
    flat = Flat(held.keeper, fleet)

    def cycle(number: int) -> None:
        step = ("end", "asked", "granted", "mapped")[number % 4]
        script = Path(__file__).with_name("light_client.py")
        command = [sys.executable, str(script), str(held.keeper.sockets), held.keeper.device, str(file), step]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            if step != "end":
                said = client.stdout.readline()
                client.kill()
                assert said == f"{step}\n", client.stderr.read()
            assert client.wait(60) == (0 if step == "end" else -9), client.stderr.read()

    with ThreadPoolExecutor(2 if REHEARSING else 8) as pool:
        list(pool.map(cycle, range(52)))
    tell(flat.check())
    assert engine.again()["tokens"] == disk["tokens"]


def test_engines_come_and_go_and_leave_nothing_behind(models, held, fleet, engine, disk, tell):
    """One ends by itself, one is killed on the mapping, one is killed while it maps; then the next is right."""
    flat = Flat(held.keeper, fleet)
    answer, _ = mapped(models["base"], held.keeper)
    assert answer["tokens"] == disk["tokens"]
    for request, line in (({"hold": True}, "RESULT "), ({"stall": True}, "STALLED")):
        with start(models["base"], **request, **on(held.keeper)) as killed:
            killed.line(line)
            killed.kill()
            assert killed.end() == -9
    tell(flat.check())
    answer, _ = mapped(models["base"], held.keeper)
    assert answer["tokens"] == disk["tokens"]
    assert engine.again()["tokens"] == disk["tokens"]


# --- a loader that dies


def test_a_loader_killed_at_any_stage_leaves_nothing_half_published(models, fleet, tmp_path, tell):
    """No engine socket, no memory; the cause in the status; and the next load succeeds."""
    fleet.settle()
    before = used()
    loader = f"{sys.executable} {Path(__file__).with_name('killed_loader.py')}"
    keepers = {}
    try:
        for stage in STAGES:
            killed = tmp_path / stage.replace(" ", "-")
            environment = {"WEIGHTKEEPER_TEST_KILL_AT": stage, "WEIGHTKEEPER_TEST_KILLED": str(killed)}
            keepers[stage] = Keeper(models["small"], environment=environment, serve=["--loader", loader])
        for stage, keeper in keepers.items():
            status = keeper.settle()
            assert (status.state, status.held) == ("failed", None), f"{stage}: {status}"
            assert "signal 9" in status.failure
            assert not [name for name in keeper.names() if name.startswith(("GPU-", "cpu-"))]
        if GPU:
            left = wait_until_free(before)
            tell(f"{(left - before) / MIB:+.1f} MiB on the GPU after {len(STAGES)} killed loaders")
            assert left <= before + SLACK_BYTES
        descriptors = {
            stage: settled_descriptors(keeper.process.pid, keeper.sockets) for stage, keeper in keepers.items()
        }
        assert len(set(descriptors.values())) == 1, descriptors
        for keeper in keepers.values():
            keeper.load()
        for stage, keeper in keepers.items():
            assert keeper.wait("ready").failure == "", stage
    finally:
        with contextlib.ExitStack() as stack:
            for keeper in keepers.values():
                stack.callback(keeper.close)


# --- other weights, C01


def test_a_fine_tune_in_place_of_its_base_is_refused(models, fleet, disk, gpu_or_none, tell):
    """Equal headers: the field is named, the answer is the new weights'; vLLM's own cache serves the old ones."""
    keeper, base = fleet["tuned"], disk["tokens"]
    before, _ = mapped(models["tuned"], keeper)
    assert before["tokens"] == base
    if gpu_or_none:
        fleet.raw("daemon").wait(240)
    for shard in models["other"].glob("*.safetensors"):
        shutil.copyfile(shard, models["tuned"] / shard.name)
    with start(models["tuned"], **on(keeper)) as strict:
        with pytest.raises(AssertionError, match="ended without an answer"):
            strict.answer()
        assert strict.end() != 0
        assert re.search(r"code=mismatch: content of model-00001\.safetensors", strict.log())
    expected, _ = run(models["other"], repack=False)
    answer, log = run(models["tuned"], **on(keeper, fallback=True), repack=False)
    assert re.search(r"fallback to disk, code=mismatch: content of model-00001\.safetensors", log)
    assert answer["tokens"] == expected["tokens"] != base
    if gpu_or_none:
        extra = {"socket_dir": str(fleet.raw("daemon").sockets), "fallback": False}
        cached, _ = run(models["tuned"], load_format="ipc_cache", extra=extra)
        served = {str(base): "the old weights", str(expected["tokens"]): "the new weights"}
        tell(f"vLLM's ipc_cache serves {served.get(str(cached['tokens']), 'neither')}")
        assert cached["tokens"] == base != expected["tokens"]


@pytest.fixture
def gpu_or_none() -> Any:
    """For a part of a test that needs the GPU itself."""
    return GPU


# --- copy mode


def test_copy_mode_counts_the_weights_once(models, fleet, disk, tell):
    """Same tokens and logprobs, same KV cache; the keeper's copy is given back."""
    keeper = fleet["copy"]
    before = used()
    request = {"load_format": "weightkeeper", "extra": keeper.extra(mode="copy", fallback=False), "hold": True}
    with start(models["base"], options=planned(), **request) as copying:
        answer = copying.answer()
        taken = used() - before
        assert keeper.status().state == "released"
        assert answer["parameter_bytes"]["shared"] == 0
        assert MAPPED_LINE.search(copying.log()).group(1) == "copy"
    if not REHEARSING:  # on the CPU, copies are repacked, and computed on by other kernels
        assert answer["tokens"] == disk["tokens"]
        assert answer["logprobs"] == disk["logprobs"]
        tell(
            f"{disk['blocks']} blocks from disk, {answer['blocks']} copied; GPU {taken / MIB:+.0f} MiB with the engine"
        )
        assert abs(answer["blocks"] - disk["blocks"]) <= 0.02 * disk["blocks"]


# --- kinds of models


def refusal(keeper: Keeper) -> str:
    """Why a keeper does not hold its model; empty where it does."""
    status = keeper.settle()
    return status.failure if status.state == "failed" else ""


def test_fp8_blocks_are_served_alike_or_refused_with_the_list(gpu, models, fleet, tell):
    """A checkpoint in block-wise fp8."""
    check_kind(models["fp8"], fleet.raw("fp8"), tell)


def test_online_fp8_is_served_alike_or_refused_with_the_list(models, fleet, tell):
    """fp8 made from bfloat16 while loading."""
    check_kind(models["base"], fleet.raw("online"), tell, options={"quantization": "fp8"})


def test_latent_attention_is_served_alike_or_refused(models, fleet, tell):
    """Multi-head latent attention derives weights from others after loading."""
    check_kind(models["mla"], fleet.raw("mla"), tell)


def check_kind(model: Path, keeper: Keeper, tell: Any, **request: Any) -> None:
    if failure := refusal(keeper):
        tell(f"refused: {failure}")
        assert LIST.search(failure), failure
        return
    from_disk, _ = run(model, repack=False, **request)
    try:
        from_keeper, log = mapped(model, keeper, **request)
    except AssertionError as error:
        if "use `mode: copy`" not in str(error):
            raise
        tell("refused by the engine, which names mode: copy")
        from_keeper, log = run(model, **on(keeper, mode="copy"), **request)
        if REHEARSING:
            return
    tell(f"served: {MAPPED_LINE.search(log).group(0)}")
    assert from_keeper["tokens"] == from_disk["tokens"]
    assert from_keeper["logprobs"] == from_disk["logprobs"]


# --- engines that are set up otherwise

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LOCAL = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class Stranger:
    """What one of them answered."""

    def __init__(self, answer: dict[str, Any], log: str, keeper_pid: int):
        self.answer, self.log, self.keeper_pid = answer, log, keeper_pid


@pytest.fixture(scope="module")
def strangers(models, held, fleet) -> Iterator[dict[str, "Future[Stranger]"]]:
    """Engines in processes and namespaces of their own, started all at once because each imports vLLM for itself."""

    def one(keeper: Keeper, **request: Any) -> Stranger:
        with start(models["base"], plain=True, **on(keeper), **request) as running:
            answer = running.answer()
            running.end()
            return Stranger(answer, running.log(), keeper.status().pid)

    wanted: dict[str, tuple[Keeper, dict[str, Any]]] = {
        "isolated": (fleet["isolated"], {"prefix": IN_CONTAINER, "environment": LOCAL}),
    }
    if GPU:
        wanted["expandable"] = (fleet["expandable"], {"environment": EXPANDABLE})
        for name, value in {"index": "0", "full": GPU.uuid, "short": GPU.uuid[:12]}.items():
            wanted[name] = (held.keeper, {"environment": {"CUDA_VISIBLE_DEVICES": value}})
    with ThreadPoolExecutor(len(wanted)) as pool:
        yield {name: pool.submit(one, keeper, **request) for name, (keeper, request) in wanted.items()}


def test_both_sides_in_their_own_namespaces(strangers, fleet, disk):
    """G06: both are process 1 of their own PID, IPC, network, UTS and mount namespaces."""
    stranger = strangers["isolated"].result()
    assert stranger.answer["tokens"] == disk["tokens"]
    assert (stranger.answer["pid"], stranger.keeper_pid) == (1, 1)
    keeper = fleet["isolated"].pid
    theirs = {name: str(Path(f"/proc/{keeper}/ns/{name}").readlink()) for name in stranger.answer["namespaces"]}
    here = {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in theirs}
    for name, value in stranger.answer["namespaces"].items():
        assert len({value, theirs[name], here[name]}) == 3, name


def test_expandable_segments_on_both_sides(gpu, strangers, disk):
    """G07: the keeper's memory is apart from torch's allocator, and the engine keeps the setting for its own."""
    stranger = strangers["expandable"].result()
    assert stranger.answer["tokens"] == disk["tokens"]
    assert stranger.answer["parameter_bytes"]["shared"] == stranger.answer["parameter_bytes"]["all"]


@pytest.mark.parametrize("form", ["index", "full", "short"])
def test_a_gpu_is_named_by_index_and_by_uuid(gpu, models, strangers, disk, form):
    """G12: in CUDA_VISIBLE_DEVICES, also by the first digits of its UUID."""
    try:
        stranger = strangers[form].result()
    except AssertionError:
        if form == "short" and not can_load(models["base"], {"CUDA_VISIBLE_DEVICES": gpu.uuid[:12]}):
            pytest.skip("vLLM's own loader fails with a short UUID as well")
        raise
    assert stranger.answer["tokens"] == disk["tokens"]


def can_load(model: Path, environment: dict[str, str]) -> bool:
    """Whether vLLM itself starts with these variables, from disk."""
    try:
        run(model, plain=True, environment=environment)
    except AssertionError:
        return False
    return True


def test_the_keeper_held_through_it_all(held):
    """One generation, one load, and it still answers."""
    try:
        status = held.keeper.status()
    except WeightkeeperError as error:
        pytest.fail(f"{error}\n{held.keeper.text()}")
    assert (status.state, status.loads, status.held.generation) == ("ready", 1, held.held.generation)
