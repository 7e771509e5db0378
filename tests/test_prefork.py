"""The real vLLM below the launcher: forked, replaced at a reload, and back after each kind of crash.

The tests of this file share one engine and one history, in the order in which they stand.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import models
import pytest
import yaml
from clients import CLIENTS, Clients
from engines import QUIET, keeper
from in_flight import InFlight
from keepers import wait_for
from test_parity import smollm2
from tokenizers import Regex, Tokenizer, decoders

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher import client, processes
from weightkeeper.launcher.messages import EngineStatus

pytestmark = pytest.mark.vllm

SECONDS = 240
RELOADS = 20
STEADY = 16
"""Equal looks, a tenth of a second apart, at what an engine holds; the launcher looks every half second."""

PROMPT = "The capital of France is"


class Engine:
    """A running `weightkeeper engine` of its own, with its config file, sockets and log."""

    def __init__(self, config: dict[str, Any], *options: str):
        self.dir = Path(tempfile.mkdtemp(prefix="wk"))
        self.sockets = self.dir / "run"
        self.sockets.mkdir(mode=0o700)
        self.config = {"host": "127.0.0.1", "port": free_port()} | config
        self.write()
        command = [
            sys.executable,
            "-m",
            "weightkeeper.cli",
            "engine",
            "--name",
            "test",
            "--socket-dir",
            str(self.sockets),
        ]
        command += [*options, "--", "--config", str(self.dir / "engine.yaml")]
        self._log = (self.dir / "log").open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=os.environ | QUIET)

    def write(self, **changes: Any) -> None:
        self.config |= changes
        (self.dir / "engine.yaml").write_text(yaml.safe_dump(self.config))

    def log(self) -> str:
        return (self.dir / "log").read_text()

    def status(self) -> EngineStatus:
        return client.status(str(self.sockets), "test")

    def until(self, condition: Callable[[EngineStatus], Any]) -> EngineStatus:
        """The status once the condition holds."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(WeightkeeperError):
                if condition(status := self.status()):
                    return status
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"not so within {SECONDS} s: {self.status()}\n{self.log()[-8000:]}")

    def ready(self, generation: int) -> EngineStatus:
        """The status once this generation serves."""
        return self.until(lambda status: status.state == "ready" and status.generation == generation)

    def ask(self) -> str:
        """A greedy completion."""
        request = {"model": self.config["model"], "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.config['port']}/v1/completions",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return json.load(answer)["choices"][0]["text"]

    def ask_first(self) -> str:
        """As `ask`, of an engine whose launcher may not listen yet."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return self.ask()
            except urllib.error.URLError:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.02)

    def reload(self) -> tuple[EngineStatus, str, float]:
        """Have the server replaced: the status, the new server's first answer, and the seconds up to it."""
        generation = self.status().generation + 1
        began = time.monotonic()
        self.process.send_signal(signal.SIGHUP)
        status = self.ready(generation)
        return status, self.ask(), time.monotonic() - began

    def pid(self, name: str) -> int:
        """Of the server's process whose name contains this, as vLLM titles it."""
        found = [pid for pid in self.status().processes if name.encode() in processes.command_line(pid)]
        assert len(found) == 1, (name, self.status().processes)
        return found[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)
        self._log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def config_of(model: Path, **options: Any) -> dict[str, Any]:
    values = {"model": str(model), "dtype": "bfloat16", "enforce-eager": True, "max-model-len": 256}
    return values | {"kv-cache-memory-bytes": 64 << 20} | options


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The real chat model, by links, with a tokenizer file of its own."""
    path = tmp_path_factory.mktemp("model") / "m"
    path.mkdir()
    for file in smollm2().iterdir():
        (path / file.name).symlink_to(file.resolve())
    (path / "tokenizer.json").unlink()
    shutil.copyfile(smollm2() / "tokenizer.json", path / "tokenizer.json")
    return path


class Plain(NamedTuple):
    """A cold start without a fork, whose launcher was then killed.

    Attributes:
        left: those of its processes that were still there ten seconds after that.
    """

    answer: str
    status: EngineStatus
    left: list[int]


@pytest.fixture(scope="module")
def plain(model):
    engine = Engine(config_of(model), "--no-prefork")
    try:
        answer = engine.ask_first()
        status = engine.until(lambda status: status.state == "ready")
        engine.process.kill()
        engine.process.wait()
        return Plain(answer, status, left_of(status.processes))
    finally:
        engine.close()


def left_of(pids: Collection[int]) -> list[int]:
    """Those of these processes that are there after ten seconds, or none as soon as all are gone."""
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if pid in processes.table()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(scope="module")
def engine(plain, model):
    """An engine whose servers are forked, after that of `plain` has ended."""
    running = Engine(config_of(model), "--restart-delay", "0.01")
    try:
        running.ready(1)
        yield running
    finally:
        running.close()


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def resident_kib(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))


def shared_files(pids: Any) -> set[str]:
    """Files of /dev/shm that these processes map by name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    return {name for name in found if not name.endswith(" (deleted)")}


def held(launcher: int, template: int) -> dict[str, Any]:
    """What an engine has of what could leak."""
    both = {"launcher": launcher, "template": template}
    everything = processes.with_descendants([launcher], processes.table())
    return {
        "processes": sorted(each.name for each in everything),
        "descriptors": {name: descriptors(pid) for name, pid in both.items()},
        "threads": {name: threads(pid) for name, pid in both.items()},
    }


def descriptors(pid: int) -> list[str]:
    """Kinds of what a process has open: `socket`, `pipe`, `anon_inode:[pidfd]`, or a path."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(re.sub(r":\[\d+\]$", "", os.readlink(path)))
    return sorted(found)


def at_rest(engine: Engine) -> dict[str, Any]:
    """As `held`, once it stays the same over several of the launcher's looks at the server's processes.

    The descriptor of a process begun last may not be open yet. Nothing is asked of the launcher in that time: a
    question's descriptor is open there for a moment longer than here.
    """
    template = engine.status().template
    deadline = time.monotonic() + 30
    found = [held(engine.process.pid, template)]
    while len(found) < STEADY and time.monotonic() < deadline:
        time.sleep(0.1)
        now = held(engine.process.pid, template)
        found = [*found, now] if now == found[-1] else [now]
    return found[-1]


def test_a_forked_server_answers_as_a_plain_one_does(plain, engine):
    """Same greedy tokens; the template has one thread, the plain start has its imports among its phases."""
    answer, status = plain.answer, plain.status
    assert (status.prefork, "imports" in status.phases) == (False, True)
    status = engine.status()
    assert engine.ask() == answer
    assert (status.prefork, status.why_plain, status.threads) == (True, "", 1)
    assert threads(status.template) == 1


def test_a_plain_launcher_that_is_killed_leaves_no_process_of_vllm(plain):
    """Engine core and workers that vLLM itself has spawned do not see the server's end in time, if at all."""
    assert len(plain.status.processes) >= 3
    assert plain.left == []


def test_twenty_reloads_import_nothing_and_leave_nothing(plain, engine):
    """Processes, descriptors, threads, shared memory and memory stay flat; a whole reload takes less than the imports.

    How much faster it is than a cold start is for the benchmark to say; here others share the processors.
    """
    answer, imports = plain.answer, plain.status.phases["imports"]
    template = engine.status().template
    seconds, files = [], set()
    for number in range(RELOADS):
        status, said, took = engine.reload()
        assert said == answer
        assert status.template == template
        assert "imports" not in status.phases
        assert {"fork", "config", "engine core", "device", "load", "warm-up", "server"} <= status.phases.keys()
        assert sum(status.phases.values()) == pytest.approx(status.start_seconds)
        seconds.append(took)
        files |= shared_files(status.processes)
        if number == 2:
            before = at_rest(engine)
            resident = {pid: resident_kib(pid) for pid in (engine.process.pid, template)}
    assert at_rest(engine) == before
    for pid, kib in resident.items():
        assert resident_kib(pid) - kib < 2048
    left = {file for file in files if Path(file).exists()}
    assert left == shared_files(engine.status().processes)
    middle = statistics.median(seconds)
    print(f"imports {imports:.2f} s; reloads {min(seconds):.2f} to {max(seconds):.2f} s, median {middle:.2f} s")
    assert middle < imports, seconds


DRAINING = {"shutdown-timeout": 20}
"""Many times what the tokens take that are left, also on two busy cores."""


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Have an engine core compute nothing, so that its requests are in flight still when something has happened."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_without_a_drain_time_what_is_in_flight_at_a_reload_gets_an_error(engine):
    """Status 500, or a stream that breaks off: never an `abort` that looks like a result."""
    before, core = engine.status(), engine.pid("VLLM::EngineCore")
    with paused(core):
        asked = InFlight(engine.config["port"], engine.config["model"], tokens=240)
        asked.until_taken()
        engine.write(**DRAINING)
        engine.process.send_signal(signal.SIGHUP)
        engine.until(lambda status: status.state == "reloading")
    answer, stream = asked.plain.result(), asked.stream.result()
    engine.ready(before.generation + 1)
    assert answer.status == 500, answer.content
    assert isinstance(stream.error, httpx.RemoteProtocolError)
    assert not stream.is_done
    assert {choice["finish_reason"] for each in stream.chunks for choice in each["choices"]} <= {None}


def test_with_a_drain_time_what_is_in_flight_ends_whole_and_new_clients_wait(engine):
    """A hundred of them queue on the listening socket, none is refused or reset, and the next server answers them."""
    if not DRAINING.items() <= engine.config.items():
        engine.write(**DRAINING)
        engine.reload()
    before, core = engine.status(), engine.pid("VLLM::EngineCore")
    port, model = engine.config["port"], engine.config["model"]
    with Clients(port, "/v1/models", lambda answer: answer["data"][0]["id"], keeping=CLIENTS // 2) as clients:
        clients.until_all_are_answered_by(model)
        with paused(core):
            asked = InFlight(port, model, tokens=40)
            asked.until_taken()
            engine.write(**{"served-model-name": ["next", model]})
            engine.process.send_signal(signal.SIGHUP)
            wait_for(lambda: waiting(port) >= CLIENTS, "all clients wait to be accepted")
            late = asked.ask(tokens=1)
            assert asked.ended() == []
        answer, stream = asked.plain.result(), asked.stream.result()
        engine.ready(before.generation + 1)
        clients.until_all_are_answered_by("next")
    assert not clients.failures
    assert clients.answers.keys() == {model, "next"}
    assert late.result().content["model"] == "next"
    assert (answer.content["model"], answer.content["choices"][0]["finish_reason"]) == (model, "length")
    assert answer.content["usage"]["completion_tokens"] == 40
    assert stream.is_done and stream.error is None
    *_, last, usage = stream.chunks
    assert (last["model"], last["choices"][0]["finish_reason"]) == (model, "length")
    assert usage["usage"]["completion_tokens"] == 40
    del engine.config["shutdown-timeout"], engine.config["served-model-name"]
    engine.write()


def waiting(port: int) -> int:
    """Connections to this port of 127.0.0.1 that nobody has accepted yet."""
    with Path("/proc/net/tcp").open() as table:
        next(table)
        for address, _, state, queues in (line.split()[1:5] for line in table):
            if state != "0A":  # those that listen come first, before thousands of others
                return 0
            if address == f"0100007F:{port:04X}":
                return int(queues.split(":")[1], 16)
    return 0


@pytest.mark.parametrize("victim", ["server", "EngineCore", "Worker"])
def test_a_killed_process_is_replaced_without_anybodys_help(plain, engine, victim):
    """G08: nothing of the old server is left, and the new one is right."""
    answer = plain.answer
    status = engine.status()
    pid = status.pid if victim == "server" else engine.pid(f"VLLM::{victim}")
    files = shared_files(status.processes)
    os.kill(pid, signal.SIGKILL)
    after = engine.ready(status.generation + 1)
    assert engine.ask() == answer
    assert after.template == status.template
    assert after.last_exit.pid == status.pid
    assert not after.last_exit.was_asked
    assert not [each for each in status.processes if each in processes.table()]
    assert not [file for file in files if Path(file).exists()]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_server_that_is_starting_is_replaced_at_once_and_no_client_is_lost(plain, engine, count):
    """With so many processes. While it waits for its engine core, vLLM drops a SIGTERM and goes on to serve."""
    generation = engine.status().generation
    client.restart(str(engine.sockets), "test", "first")
    engine.until(lambda now: now.state == "starting" and len(now.processes) >= count)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.ask)
        client.restart(str(engine.sockets), "test", "second")
        status = engine.ready(generation + 2)
        assert asked.result() == plain.answer
    assert (status.last_exit.generation, status.last_exit.signal) == (generation + 1, signal.SIGKILL)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float7"}, "argument --dtype: invalid choice: 'float7'"),
        ({"max-model-len": 10**9}, "User-specified max_model_len (1000000000) is greater than the derived"),
        ({"tool-call-parser": "nobody", "enable-auto-tool-choice": True}, "invalid tool call parser: nobody"),
        ({"model": "/nowhere/model"}, "/nowhere/model"),
        ({"no-such-option": 1}, "unrecognized arguments: --no-such-option"),
        ({"api-server-count": 2}, "--api-server-count: a server with it cannot be forked"),
        ({"data-parallel-size": 2}, "--data-parallel-size: a server with it cannot be forked"),
    ],
)
def test_a_refused_configuration_leaves_the_server_serving(plain, engine, change, words):
    """Checked by vLLM's own parser and configuration before the good server is stopped, and said in vLLM's words."""
    answer = plain.answer
    before = engine.status()
    good = dict(engine.config)
    engine.write(**change)
    engine.process.send_signal(signal.SIGHUP)
    status = engine.until(lambda status: status.refused_at > before.refused_at)
    assert words in status.refusal
    assert (status.state, status.pid, status.generation) == ("ready", before.pid, before.generation)
    engine.config = good
    engine.write()
    assert engine.ask() == answer


@pytest.mark.parametrize(("rest", "words"), [(None, "no such file"), (100_000, "bytes")], ids=["removed", "cut"])
def test_a_model_that_is_broken_by_now_leaves_the_server_serving(plain, engine, model, rest, words):
    """A new server could not read it, and the old one has no need to."""
    before = engine.status()
    shard = min(model.glob("*.safetensors"))
    target = shard.readlink()
    shard.unlink()
    if rest is not None:
        shard.write_bytes(target.read_bytes()[:rest])
    try:
        engine.process.send_signal(signal.SIGHUP)
        status = engine.until(lambda status: status.refused_at > before.refused_at)
        assert (status.state, status.pid, status.generation) == ("ready", before.pid, before.generation)
        assert str(shard) in status.refusal
        assert words in status.refusal
        assert engine.ask() == plain.answer
    finally:
        shard.unlink(missing_ok=True)
        shard.symlink_to(target)
    assert engine.reload()[1] == plain.answer


def test_a_changed_tokenizer_is_read_again(plain, engine, model):
    """What the template has of the model's directory counts only while its files are as they were."""
    answer = plain.answer
    file = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    decoder = tokenizer.decoder
    tokenizer.decoder = decoders.Sequence([decoder, decoders.Replace(Regex("[\\s\\S]"), "!")])
    tokenizer.save(str(file))
    _, said, _ = engine.reload()
    assert set(said) == {"!"}
    assert f"the tokenizer's files in {model} changed and are read again" in engine.log()
    tokenizer.decoder = decoder
    tokenizer.save(str(file))
    assert engine.reload()[1] == answer


def test_two_ranks_on_a_keepers_weights_come_back_from_the_loss_of_one(engine, tmp_path):
    """Tensor parallel by an edit of the configuration; each rank maps its half; no shared memory is left behind."""
    model = models.write(tmp_path / "m", hidden=256)
    with keeper(model, tensor_parallel_size=2) as running:
        engine.write(
            **{
                "model": str(model),
                "tensor-parallel-size": 2,
                "load-format": "weightkeeper",
                "model-loader-extra-config": running.extra(fallback=False),
            }
        )
        status, answer, _ = engine.reload()
        assert "map" in status.phases
        assert sorted(lease.device for lease in running.status().leases) == ["cpu-0", "cpu-1"]
        files = shared_files(status.processes)
        os.kill(engine.pid("VLLM::Worker_TP1"), signal.SIGKILL)
        after = engine.ready(status.generation + 1)
        assert engine.ask() == answer
        assert sorted(lease.device for lease in running.status().leases) == ["cpu-0", "cpu-1"]
        files |= shared_files(after.processes)
    engine.close()
    assert files
    assert not [file for file in files if Path(file).exists()]


def test_forked_workers_have_the_cpus_that_vllm_gives_to_spawned_ones(model, tmp_path):
    """All of their threads; what vLLM would refuse of it in the engine core is refused while the old server serves."""
    cpu = max(os.sched_getaffinity(0))
    (tmp_path / "variables").write_text(f"VLLM_CPU_OMP_THREADS_BIND={cpu}\nOMP_NUM_THREADS=\n")
    engine = Engine(config_of(model), "--env-file", str(tmp_path / "variables"))
    try:
        before = engine.ready(1)
        assert engine.ask()
        worker = engine.pid("VLLM::Worker")
        assert {tuple(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{worker}/task")} == {(cpu,)}
        assert os.sched_getaffinity(before.pid) == os.sched_getaffinity(0)
        assert f"weightkeeper: worker 0 has the CPUs {cpu}, and as many threads" in engine.log()
        engine.write(**{"tensor-parallel-size": 3})
        engine.process.send_signal(signal.SIGHUP)
        status = engine.until(lambda status: status.refusal)
        assert f"Given number of CPU id list ['{cpu}'] doesn't match local world size 3" in status.refusal
        assert (status.state, status.pid) == ("ready", before.pid)
    finally:
        engine.close()
