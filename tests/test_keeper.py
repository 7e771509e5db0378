"""A keeper's life: what it holds, when it answers what, and what every log line says. Real processes and sockets."""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from keepers import DEADLINE_SECONDS, KeeperProcess, connected, keeper, links_of, settled_descriptors, wait_for

from weightkeeper import client
from weightkeeper.errors import (
    BuildFailedError,
    ConfigError,
    Difference,
    KeeperFailedError,
    MismatchError,
    NotLoadedError,
    ReleaseRefusedError,
)
from weightkeeper.holding import Generation
from weightkeeper.loading import ProgressLog
from weightkeeper.loads import Loads
from weightkeeper.memory.host import HostMemory
from weightkeeper.protocol import Progress, Report

MEGABYTE = 1 << 20
FINGERPRINT = {"dtype": "bfloat16"}


def first_byte(granted):
    """Map what was granted, close it all again; the first byte's value."""
    region = HostMemory().map(granted.descriptors, granted.grant.sizes)
    value = ctypes.string_at(region.address, 1)[0]
    region.close()
    for descriptor in granted.descriptors:
        os.close(descriptor)
    return value


def served_byte(socket_dir, device="cpu-0", name="engine"):
    with client.open_session(socket_dir, device, name=name) as session:
        return first_byte(session.map(FINGERPRINT, "zero_copy"))


def close_all(granted):
    for descriptor in granted.descriptors:
        os.close(descriptor)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or between that and the reading
        return False


def test_a_keeper_loads_serves_and_ends(tmp_path):
    """From start to SIGTERM: state, sockets, log lines and exit code."""
    with keeper(tmp_path, fill=42) as one:
        state = one.wait_for_state("ready")
        assert one.names() == ["control.sock", "cpu-0.sock", "keeper.lock", "publish.sock"]
        assert len([link for link in links_of(one.process.pid) if "memfd:weightkeeper" in link]) == 1
        assert (state.held.model, state.held.nbytes, state.held.tensors) == ("/models/tiny", MEGABYTE, 1)
        assert (state.held.devices, state.held.kind, state.held.generation) == ({"cpu-0": MEGABYTE}, "host", 1)
        assert (state.loads, state.failure, state.loading, state.leases) == (1, "", None, ())
        assert (state.pid, state.config) == (one.process.pid, str(one.config))
        assert served_byte(one.socket_dir) == 42
        assert one.stop() == 0
        assert one.names() == ["keeper.lock"]
        lines = [re.sub(r"\d+\.\d s", "N s", line) for line in one.lines()]
        assert lines == [
            f"weightkeeper 0.1.0 answers on {one.socket_dir}/control.sock",
            f"load started: {one.config}",
            "loading: reading, 50 % (524.3 kB of 1.0 MB)",
            "ready: /models/tiny, 1.0 MB on cpu-0, loaded in N s (generation 1)",
            "lease begins: engine on cpu-0 (zero_copy, generation 1)",
            "lease ends: engine on cpu-0 (zero_copy, generation 1) after N s",
            "SIGTERM: ending",
        ]


def test_a_keeper_without_a_config_is_empty_and_says_so(tmp_path):
    """Nothing is loaded, a load is refused with the reason, and that is fine."""
    with keeper(tmp_path, with_config=False) as one:
        assert one.wait_for_state("empty").held is None
        with pytest.raises(ConfigError, match="this keeper was started without --config, so it has nothing to load"):
            client.load(one.socket_dir)
        with pytest.raises(NotLoadedError, match="the keeper holds no weights, none was ever loaded"):
            client.open_session(one.socket_dir, "cpu-0")
        assert client.release(one.socket_dir) == "nothing was held"


def test_a_keeper_stays_small_and_loads_neither_torch_nor_vllm(tmp_path):
    """Under 40 MB of its own while it holds 512 MB, none of it mapped; asked of the real process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys\n"
        "from pathlib import Path\n"
        f"tell = lambda *_: Path({str(tmp_path / 'modules')!r}).write_text('\\n'.join([*sys.modules, 'END']))\n"
        "signal.signal(signal.SIGUSR1, tell)\n"
        "from weightkeeper.cli import main\n"
        "main()\n"
    )
    one = KeeperProcess(tmp_path, program=(str(program),), nbytes=512 * MEGABYTE, tensors=5000).start()
    try:
        state = one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0") as session:
            close_all(session.map(FINGERPRINT, "zero_copy"))
            state = one.status()
        assert (state.held.nbytes, state.held.tensors) == (512 * MEGABYTE, 5000)
        rollup = Path(f"/proc/{one.process.pid}/smaps_rollup").read_text()
        resident = int(re.search(r"^Rss: +(\d+) kB", rollup, re.MULTILINE)[1]) * 1024
        assert resident < 40_000_000
        assert abs(state.own_bytes - resident) < 4_000_000
        maps = Path(f"/proc/{one.process.pid}/maps").read_text()
        assert "memfd:weightkeeper" not in maps
        assert "torch" not in maps
        one.process.send_signal(signal.SIGUSR1)
        one.status()  # wakes the event loop, which runs the handler
        modules = wait_for(
            lambda: (tmp_path / "modules").exists() and (tmp_path / "modules").read_text().split("\n"), "its modules"
        )
        assert modules[-1] == "END"
        assert "weightkeeper.keeper" in modules
        assert not {"torch", "vllm", "numpy", "weightkeeper.vllm_api"} & set(modules)
    finally:
        one.kill()


def test_it_answers_while_it_loads(tmp_path):
    """Status, progress and a second load's answer, all while the loader runs; no engine socket yet."""
    with keeper(tmp_path, stop_at="progress") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        state = wait_for(lambda: (now := one.status()) and now.loading.total_bytes and now, "progress")
        assert state.state == "loading"
        assert (state.loading.stage, state.loading.done_bytes, state.loading.total_bytes) == (
            "reading", MEGABYTE // 2, MEGABYTE,
        )  # fmt: skip
        assert client.load(one.socket_dir) == "already loading"
        assert one.names() == ["control.sock", "keeper.lock", "publish.sock"]


@pytest.mark.parametrize("stage", ["publish 0", "rank 0", "publish 1"])
def test_no_engine_socket_before_all_ranks_are_there(tmp_path, stage):
    """A model of two ranks is ready when both are published, and not a moment before."""
    with keeper(tmp_path, ranks=2, stop_at=stage) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        assert one.status().state == "loading"
        assert one.names() == ["control.sock", "keeper.lock", "publish.sock"]


def test_a_model_of_several_ranks_has_a_socket_a_rank(tmp_path):
    """Each with its own part; bytes and tensors are summed."""
    with keeper(tmp_path, ranks=3, fill=9) as one:
        state = one.wait_for_state("ready")
        assert one.names() == ["control.sock", "cpu-0.sock", "cpu-1.sock", "cpu-2.sock", "keeper.lock", "publish.sock"]
        assert state.held.devices == {"cpu-0": MEGABYTE, "cpu-1": MEGABYTE, "cpu-2": MEGABYTE}
        assert (state.held.nbytes, state.held.tensors) == (3 * MEGABYTE, 3)
        assert [served_byte(one.socket_dir, f"cpu-{rank}") for rank in range(3)] == [9, 9, 9]


def test_an_arena_of_many_segments_arrives_whole(tmp_path):
    """More segments than one frame carries; the descriptors keep their order."""
    with keeper(tmp_path, segments=150, nbytes=4096) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0") as session:
            granted = session.map(FINGERPRINT, "zero_copy")
            region = HostMemory().map(granted.descriptors, granted.grant.sizes)
            found = [ctypes.string_at(region.address + index * 4096, 1)[0] for index in range(150)]
            region.close()
            close_all(granted)
        assert found == list(range(150))


def test_a_lease_is_the_open_connection(tmp_path):
    """It begins with the Grant, shows who has it, and ends at the end of the stream, also when the engine is killed."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0", name="vllm-a") as session:
            assert one.status().leases == ()
            close_all(session.map(FINGERPRINT, "zero_copy"))
            (lease,) = one.status().leases
            assert (lease.name, lease.device, lease.mode, lease.generation) == ("vllm-a", "cpu-0", "zero_copy", 1)
            assert (lease.uid, lease.pid) == (os.geteuid(), os.getpid())
        wait_for(lambda: one.status().leases == (), "the lease's end")
        script = (
            "import sys, time\nfrom weightkeeper import client\n"
            f"session = client.open_session({one.socket_dir!r}, 'cpu-0', name='victim')\n"
            f"granted = session.map({FINGERPRINT!r}, 'zero_copy')\nprint('mapped', flush=True)\ntime.sleep(60)\n"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as engine:
            assert engine.stdout.readline() == b"mapped\n"
            assert [(lease.name, lease.pid) for lease in one.status().leases] == [("victim", engine.pid)]
            engine.kill()
        wait_for(lambda: one.status().leases == (), "the end of the killed engine's lease")


def test_fifty_engines_one_after_the_other_leave_nothing_behind(tmp_path):
    """G03's keeper half: descriptors and memory are flat while one engine stays mapped."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0", name="stays") as stays:
            granted = stays.map(FINGERPRINT, "zero_copy")
            region = HostMemory().map(granted.descriptors, granted.grant.sizes)
            close_all(granted)
            for _ in range(5):
                served_byte(one.socket_dir)
            wait_for(lambda: len(one.status().leases) == 1, "the others' ends")
            memory = one.status().own_bytes
            before = settled_descriptors(one.process.pid, one.socket_dir)
            for _ in range(50):
                assert served_byte(one.socket_dir) == 7
            wait_for(lambda: len(one.status().leases) == 1, "the others' ends")
            assert settled_descriptors(one.process.pid, one.socket_dir) == before
            assert one.status().own_bytes < memory + 1_000_000
            assert ctypes.string_at(region.address, 1) == b"\x07"
            region.close()


def test_other_weights_are_refused_with_every_field(tmp_path):
    """A mismatch names both values and ends the connection; no lease comes of it."""
    with keeper(tmp_path, fingerprint={"dtype": "bfloat16", "rank": "0"}) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0") as session:
            with pytest.raises(MismatchError) as caught:
                session.map({"dtype": "float16", "extra": "1", "rank": "0"}, "zero_copy")
            assert sorted(caught.value.differences, key=lambda each: each.field) == [
                Difference("dtype", "bfloat16", "float16"),
                Difference("extra", "nothing", "1"),
            ]
        assert one.status().leases == ()


def test_receipts_are_those_of_the_loader(tmp_path):
    """What the loader knew of the files is what an engine gets."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0") as session:
            (receipt,) = session.receipts()
            assert (receipt.name, receipt.size, receipt.blake3) == ("model.safetensors", MEGABYTE, "ab" * 32)


def test_release_is_refused_while_engines_map_and_names_them(tmp_path):
    """Forced, the weights go from the keeper, and the engine keeps what it mapped."""
    with keeper(tmp_path, fill=5) as one:
        one.wait_for_state("ready")
        session = client.open_session(one.socket_dir, "cpu-0", name="vllm-a")
        granted = session.map(FINGERPRINT, "zero_copy")
        region = HostMemory().map(granted.descriptors, granted.grant.sizes)
        close_all(granted)
        with pytest.raises(ReleaseRefusedError, match=r"1 engine\(s\) map the weights: vllm-a; stop them first"):
            client.release(one.socket_dir)
        assert one.status().state == "ready"
        assert client.release(one.socket_dir, force=True) == "generation 1, 1.0 MB; 1 engine(s) still map it"
        state = one.status()
        assert (state.state, state.held) == ("released", None)
        assert [(old.generation, old.nbytes) for old in state.releasing] == [(1, MEGABYTE)]
        assert one.names() == ["control.sock", "engines.json", "keeper.lock", "publish.sock"]
        assert ctypes.string_at(region.address, 1) == b"\x05"
        session.close()
        wait_for(lambda: one.status().releasing == (), "the end of the old generation")
        assert one.names() == ["control.sock", "keeper.lock", "publish.sock"]
        region.close()


def test_released_weights_come_back_on_request(tmp_path):
    """Release, an engine's answer meanwhile, load, and it is as before."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        before = settled_descriptors(one.process.pid, one.socket_dir)
        for generation in range(2, 6):
            assert client.release(one.socket_dir) == f"generation {generation - 1}, 1.0 MB"
            with pytest.raises(NotLoadedError, match="the keeper holds no weights, they were released"):
                client.open_session(one.socket_dir, "cpu-0")
            assert client.load(one.socket_dir) == "loading"
            assert one.wait_for_state("ready").held.generation == generation
        assert settled_descriptors(one.process.pid, one.socket_dir) == before


def test_copy_mode_gives_the_weights_back_with_the_last_lease(tmp_path):
    """An engine that has its own copy ends its lease; the weights go when nobody else maps them."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        first, second = (client.open_session(one.socket_dir, "cpu-0", name=name) for name in ("a", "b"))
        close_all(first.map(FINGERPRINT, "copy"))
        close_all(second.map(FINGERPRINT, "copy"))
        assert first.release() == "kept: 1 other engine(s) map these weights"
        assert [lease.name for lease in one.status().leases] == ["b"]
        assert second.release() == "generation 1, 1.0 MB"
        assert (one.status().state, one.status().leases) == ("released", ())
        first.close()
        second.close()


def test_a_load_replaces_what_is_held_when_it_is_ready(tmp_path):
    """New engines get the new weights, the old lease goes on with the old ones, the socket never goes away."""
    with keeper(tmp_path, fill=1) as one:
        one.wait_for_state("ready")
        old = client.open_session(one.socket_dir, "cpu-0", name="old")
        granted = old.map(FINGERPRINT, "zero_copy")
        region = HostMemory().map(granted.descriptors, granted.grant.sizes)
        close_all(granted)
        inode = os.stat(f"{one.socket_dir}/cpu-0.sock").st_ino
        one.plan(fill=2, stop_at="progress")
        client.load(one.socket_dir)
        wait_for(one.stopped.exists, "the second loader at its stage")
        assert (one.status().state, one.status().loading.stage) == ("ready", "reading")
        assert served_byte(one.socket_dir) == 1
        os.kill(int(one.stopped.read_text()), signal.SIGKILL)
        wait_for(lambda: one.status().failure, "the failure")
        one.plan(fill=3)
        wait_for(lambda: one.status().loads == 2, "the second load")
        assert served_byte(one.socket_dir) == 3
        assert ctypes.string_at(region.address, 1) == b"\x01"
        state = one.status()
        assert (state.failure, state.held.generation) == ("", 3)
        assert [lease.generation for lease in state.leases if lease.name == "old"] == [1]
        assert [held.generation for held in state.releasing] == [1]
        assert os.stat(f"{one.socket_dir}/cpu-0.sock").st_ino == inode
        old.close()
        region.close()
        wait_for(lambda: one.status().releasing == (), "the end of the old generation")


def test_a_load_for_other_devices_moves_the_sockets(tmp_path):
    """Sockets of devices that are no longer served go, new ones come."""
    with keeper(tmp_path, ranks=2) as one:
        one.wait_for_state("ready")
        one.plan(device="GPU-{rank}")
        client.load(one.socket_dir)
        wait_for(lambda: one.status().loads == 2, "the second load")
        assert one.names() == ["GPU-0.sock", "control.sock", "keeper.lock", "publish.sock"]


def test_a_failed_load_leaves_what_was_held_serving(tmp_path):
    """The cause shows in status, the weights from before are still handed out."""
    with keeper(tmp_path, fill=1) as one:
        one.wait_for_state("ready")
        one.plan(failed=["checkpoint", "model.safetensors is cut"])
        client.load(one.socket_dir)
        state = wait_for(lambda: (now := one.status()).failure and now, "the failure")
        assert (state.state, state.failure, state.loads) == ("ready", "model.safetensors is cut", 1)
        assert served_byte(one.socket_dir) == 1
        one.wait_for_text("load failed: model.safetensors is cut")


FAILURES = {
    "told": ({"failed": ["checkpoint", "two\nlines"]}, "two\nlines"),
    "told without words": ({"failed": ["no_room", ""]}, "no_room"),
    "exit code": (
        {"exit_at": "hello", "last_words": "Traceback\nOSError: no such model\n"},
        "the loader ended with exit code 3 before it had published a model: OSError: no such model",
    ),
    "nothing published": (
        {"exit_at": "progress", "exit_code": 0},
        "the loader ended with exit code 0 before it had published a model",
    ),
    "half the ranks": (
        {"ranks": 2, "exit_at": "rank 0", "last_words": "gone"},
        "the loader ended with exit code 3 before it had published a model: gone",
    ),
    "unsealed": (
        {"unsealed": True},
        r"the loader was refused: descriptor \d+ is shared memory that can still be written or resized",
    ),
    "wrong size": (
        {"changes": {"sizes": [MEGABYTE + 4096]}},
        r"the loader was refused: descriptor \d+ holds 1048576 bytes, expected 1052672",
    ),
    "no such device": ({"device": "../x"}, "the loader was refused: '../x' is no device name: .*"),
    "impossible rank": ({"changes": {"rank": 1}}, "the loader was refused: rank 1 of 1 cannot be"),
    "no segments": ({"changes": {"sizes": []}}, "the loader was refused: 0 segments on cpu-0; 1 to 4096 are allowed"),
    "negative size": (
        {"changes": {"sizes": [-1]}},
        "the loader was refused: the segments on cpu-0 have impossible sizes",
    ),
    "same rank twice": (
        {"ranks": 2, "changes": {"rank": 0}},
        "the loader was refused: rank 0 on cpu-1 is published twice",
    ),
    "other model": (
        {"ranks": 2, "models": ["a", "b"]},
        "the loader was refused: rank 1 does not belong to .* as rank 0",
    ),
    "outside the arena": (
        {"tensor": {"offset": 1}},
        "the loader was refused: tensor 'model.layers.0.weight' lies outside the arena's 1048576 bytes",
    ),
    "negative offset": (
        {"tensor": {"offset": -8}},
        "the loader was refused: tensor 'model.layers.0.weight' lies outside the arena's 1048576 bytes",
    ),
    "overflowing shape": (
        {"tensor": {"shape": [1 << 62, 1 << 62], "stride": [1 << 62, 1]}},
        "the loader was refused: tensor 'model.layers.0.weight' lies outside the arena's 1048576 bytes",
    ),
    "stride out of the arena": (
        {"tensor": {"shape": [2], "stride": [MEGABYTE]}},
        "the loader was refused: tensor 'model.layers.0.weight' lies outside the arena's 1048576 bytes",
    ),
    "unknown dtype": (
        {"tensor": {"dtype": "float3"}},
        "the loader was refused: tensor 'model.layers.0.weight' has the unknown dtype 'float3'",
    ),
    "strides missing": (
        {"tensor": {"stride": []}},
        "the loader was refused: tensor 'model.layers.0.weight' has 1 sizes and 0 strides",
    ),
    "alias to nowhere": (
        {"aliases": {"head": "nowhere"}},
        "the loader was refused: alias 'head' of 'nowhere' does not fit the tensors",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_load_says_its_cause_and_publishes_nothing(tmp_path, name):
    """State, cause, sockets, descriptors, an engine's answer; and it is not tried again by itself."""
    plan, cause = FAILURES[name]
    with keeper(tmp_path, **plan) as one:
        state = one.wait_for_state("failed")
        assert re.fullmatch(cause, state.failure)
        assert (state.held, state.loads, state.loading) == (None, 0, None)
        assert one.names() == ["control.sock", "keeper.lock", "publish.sock"]
        with pytest.raises(KeeperFailedError) as caught:
            client.open_session(one.socket_dir, "cpu-0")
        assert str(caught.value) == f"the keeper's last load failed: {state.failure}"
        assert not [link for link in links_of(one.process.pid) if "memfd" in link]


def test_a_loader_that_cannot_be_started_is_a_failed_load(tmp_path):
    """The keeper goes on and says what is missing."""
    one = KeeperProcess(tmp_path).start(loader="/nonexistent/python -m loader")
    try:
        assert one.wait_for_state("failed").failure == (
            "the loader cannot be started: /nonexistent/python: [Errno 2] No such file or directory: "
            "'/nonexistent/python'"
        )
    finally:
        one.kill()


def loads_started(one):
    return one.text().count("load started:")


def test_a_failed_load_is_tried_again_only_when_something_changed(tmp_path):
    """A changed file of the model, or a changed config, and nothing else."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "part.safetensors").write_bytes(b"x")
    with keeper(tmp_path, failed=["checkpoint", "cut"]) as one:
        one.wait_for_state("failed")
        one.wait_for_text("load failed: cut")
        os.utime(one.config)  # same content
        client.status(one.socket_dir)
        assert loads_started(one) == 1
        (model / "part.safetensors").write_bytes(b"y")
        one.wait_for_text("something changed since the load failed: trying again")
        one.wait_for_text("load failed: cut", 2)
        assert loads_started(one) == 2
        one.plan(fill=4)
        assert one.wait_for_state("ready").failure == ""
        assert loads_started(one) == 3
        assert served_byte(one.socket_dir) == 4


def test_a_failed_load_is_tried_again_on_request(tmp_path):
    """A request counts as a reason."""
    with keeper(tmp_path, failed=["checkpoint", "cut"]) as one:
        one.wait_for_state("failed")
        assert client.load(one.socket_dir) == "loading"
        one.wait_for_text("load failed: cut", 2)
        assert loads_started(one) == 2


def test_a_missing_config_file_is_a_failure_that_its_coming_ends(tmp_path):
    """A volume that is filled later brings the weights without another word."""
    one = KeeperProcess(tmp_path)
    one.config.unlink()
    one.start()
    try:
        assert "FileNotFoundError" in one.wait_for_state("failed").failure
        one.plan(fill=8)
        one.wait_for_state("ready")
        assert served_byte(one.socket_dir) == 8
    finally:
        one.kill()


@pytest.mark.parametrize("stage", ["start", "hello", "progress", "publish 0", "rank 0", "publish 1"])
def test_a_killed_loader_leaves_nothing_half_published(tmp_path, stage):
    """SIGKILL at each stage: the cause names the signal, no descriptor stays, the next load works."""
    with keeper(tmp_path, ranks=2, stop_at=stage) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        os.kill(int(one.stopped.read_text()), signal.SIGKILL)
        state = one.wait_for_state("failed")
        assert state.failure == "the loader ended by signal 9 (killed; out of memory?)"
        assert one.names() == ["control.sock", "keeper.lock", "publish.sock"]
        assert not [link for link in links_of(one.process.pid) if "memfd" in link or "pidfd" in link]
        one.plan(ranks=2)
        assert one.wait_for_state("ready").held.devices == {"cpu-0": MEGABYTE, "cpu-1": MEGABYTE}


def test_release_stops_a_running_load(tmp_path):
    """On a shared machine the memory is wanted now."""
    with keeper(tmp_path, stop_at="publish 0") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        loader = int(one.stopped.read_text())
        assert client.release(one.socket_dir) == "nothing was held; the running load is stopped"
        wait_for(lambda: not is_alive(loader), "the loader's end")
        assert one.wait_for_state("released").failure == ""
        one.plan()
        client.load(one.socket_dir)
        one.wait_for_state("ready")


def test_progress_is_logged_by_stage_and_tenth_and_not_too_often(monkeypatch, caplog):
    """A stage at once, a tenth when a second has passed, anything after ten seconds."""
    now = [100.0]
    monkeypatch.setattr("weightkeeper.loading.time.monotonic", lambda: now[0])
    log = ProgressLog()
    caplog.set_level("INFO")
    for seconds, stage, done in (
        (0, "reading", 0),
        (0.5, "reading", 300),  # too soon
        (0.6, "reading", 350),
        (5, "reading", 390),  # the same tenth
        (5, "reading", 399),  # ten seconds later
        (0.1, "packing", 10),
    ):
        now[0] += seconds
        log.tell(Progress(stage, done, 1000))
    now[0] += 1
    log.tell(Progress("waiting"))
    assert caplog.messages == [
        "loading: reading, 0 % (0 B of 1.0 kB)",
        "loading: reading, 35 % (350 B of 1.0 kB)",
        "loading: reading, 39 % (399 B of 1.0 kB)",
        "loading: packing, 1 % (10 B of 1.0 kB)",
        "loading: waiting",
    ]


def test_a_load_that_is_stopped_before_it_began_leaves_a_quiet_loop(tmp_path):
    """Asked and stopped at the same moment: the loop goes back to waiting and does not spin."""

    async def main():
        config, directory = str(tmp_path / "engine.yaml"), str(tmp_path)
        loads = Loads(config, ("false",), directory, 3600.0, lambda _: None, itertools.count(1))
        loads.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loads.run)
            for _ in range(3):
                assert loads.ask() is True
                assert loads.ask() is False
                assert loads.stop() is True
                with anyio.fail_after(DEADLINE_SECONDS):
                    await anyio.wait_all_tasks_blocked()
            assert (loads.is_running, loads.loading(), loads.count) == (False, None, 0)
            tasks.cancel_scope.cancel()

    anyio.run(main)


def test_a_change_counts_when_it_has_settled(tmp_path, monkeypatch):
    """While files are still being copied, a failed load is not tried again; once they rest, it is, once."""
    keys = ["at the start", "at the start", "copying", "copying more", "copied", "copied", "copied", "copied", "END"]
    seen = []

    async def main():
        over = anyio.Event()

        def key_of(config):
            seen.append(keys[min(len(seen), len(keys) - 1)])
            if seen[-1] == "END":
                anyio.from_thread.run_sync(over.set)
            return seen[-1], ()

        monkeypatch.setattr("weightkeeper.retry_key.key_of", key_of)
        config, directory = str(tmp_path / "engine.yaml"), str(tmp_path)
        loads = Loads(config, ("false",), directory, 0.01, lambda _: None, itertools.count(1))
        started = []
        monkeypatch.setattr(
            "weightkeeper.loads.Generation", lambda number: started.append(len(seen)) or Generation(number)
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loads.run)
            with anyio.fail_after(DEADLINE_SECONDS):
                await over.wait()
            tasks.cancel_scope.cancel()
        assert loads.failure.startswith("the loader ended with exit code 1")
        return started

    # The second load began after the sixth look: the second in a row that found `copied`.
    assert anyio.run(main) == [0, 6]


def test_what_a_loader_leaves_running_ends_with_it(tmp_path):
    """Its whole process group goes, so a stray worker neither holds memory nor keeps the channel open."""
    with keeper(tmp_path, child=str(tmp_path / "child"), exit_at="progress") as one:
        assert one.wait_for_state("failed").failure.startswith("the loader ended with exit code 3")
        child = int((tmp_path / "child").read_text())
        wait_for(lambda: not is_alive(child), "the end of the loader's child")


def test_weights_are_served_once_their_loader_is_gone(tmp_path):
    """An engine that measures free memory is not to find the loader's own. One that does not end is killed."""
    with keeper(tmp_path, linger=True, stop_at="published", fill=1) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        loader = int(one.stopped.read_text())
        wait_for(lambda: one.status().loading.stage == "ending the loader", "the keeper waits for its end")
        assert one.status().state == "loading" and is_alive(loader)
        assert client.load(one.socket_dir) == "already loading"
        one.wait_for_state("ready")
        assert not is_alive(loader)
        assert served_byte(one.socket_dir) == 1
        assert one.status().loads == 1
        one.wait_for_text("does not end; it is killed")


UNENDING = """\
from weightkeeper import child, cli, loading

child.Child.kill = lambda self: None  # as with a process in a driver's call
child.KILLED_SECONDS = loading.END_SECONDS = 0.3
cli.main()
"""


def test_a_loader_that_no_kill_ends_does_not_silence_the_keeper(tmp_path):
    """Its weights are served all the same, and the keeper answers and ends."""
    program = tmp_path / "unending.py"
    program.write_text(UNENDING)
    with keeper(tmp_path, program=(str(program),), linger=True, stop_at="published", fill=1) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        loader = int(one.stopped.read_text())
        try:
            one.wait_for_text("the killed loader is still there")
            one.wait_for_state("ready")
            assert served_byte(one.socket_dir) == 1
            assert is_alive(loader)
            assert one.stop() == 0
        finally:
            os.kill(loader, signal.SIGKILL)


def test_what_holds_on_to_a_loaders_words_is_not_waited_for(tmp_path):
    """The loader has ended; what it left in a session of its own has its stderr and never ends."""
    file = tmp_path / "child"
    with keeper(tmp_path, child=str(file), child_session=True, fill=1) as one:
        one.wait_for_state("ready")
        try:
            assert is_alive(int(file.read_text()))
            assert "does not end" not in one.text()
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("fill", [1, 2], ids=["the same", "changed"])
def test_a_load_that_is_asked_for_while_one_runs_follows_it_where_the_file_has_changed(tmp_path, fill):
    """What is held in the end is what the file named when it was asked for."""
    with keeper(tmp_path, stop_at="progress", fill=1) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        loader = int(one.stopped.read_text())
        if fill != 1:
            one.plan(fill=fill)
        assert client.load(one.socket_dir) == "already loading"
        os.kill(loader, signal.SIGUSR1)
        state = wait_for(lambda: (now := one.status()).held and not now.loading and now, "no load runs any more")
        assert state.loads == fill
        assert served_byte(one.socket_dir) == fill


def test_a_release_while_the_loader_ends_leaves_nothing(tmp_path):
    """What was published and is not served yet goes with it."""
    with keeper(tmp_path, linger=True, stop_at="published", fill=1) as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        wait_for(lambda: one.status().loading.stage == "ending the loader", "the keeper waits for its end")
        before = settled_descriptors(one.process.pid, one.socket_dir)
        client.release(one.socket_dir)
        assert one.wait_for_state("released").held is None
        assert not is_alive(int(one.stopped.read_text()))
        assert settled_descriptors(one.process.pid, one.socket_dir) < before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_loader_ends_with_the_keeper(tmp_path, how):
    """However the keeper ends; told to, it exits 0 and leaves no socket."""
    with keeper(tmp_path, stop_at="hello") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        loader = int(one.stopped.read_text())
        one.process.send_signal(how)
        assert one.process.wait(DEADLINE_SECONDS) == (0 if how != signal.SIGKILL else -signal.SIGKILL)
        wait_for(lambda: not is_alive(loader), "the loader's end")
        sockets = ["control.sock", "publish.sock"] if how == signal.SIGKILL else []
        assert one.names() == sorted(["keeper.lock", *sockets])


def test_it_ends_at_once_while_clients_are_connected(tmp_path):
    """Leases and idle connections do not hold the keeper up; engines keep what they mapped."""
    with keeper(tmp_path, fill=3) as one:
        one.wait_for_state("ready")
        session = client.open_session(one.socket_dir, "cpu-0")
        granted = session.map(FINGERPRINT, "zero_copy")
        with connected(f"{one.socket_dir}/control.sock", "control"):
            assert one.stop() == 0
        assert one.names() == ["engines.json", "keeper.lock"]  # an engine is there for the next keeper
        assert first_byte(granted) == 3
        session.close()


def test_reports_are_counted_and_the_last_one_is_kept(tmp_path):
    """Fallbacks by code; a code that no error has counts as other."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        for code in ("mismatch", "no_socket", "mismatch", "made_up", "made_up_too"):
            client.report(one.socket_dir, Report("fallback", "vllm-a", code, "why\nnot"))
        mapped = Report("mapped", "vllm-a", mode="zero_copy", nbytes=MEGABYTE, milliseconds=12.0, phases={"map": 0.5})
        client.report(one.socket_dir, mapped)
        state = one.status()
        assert state.fallbacks == {"mismatch": 2, "no_socket": 1, "other": 2}
        assert state.last_report == mapped
        assert state.last_report_at > state.started_at
        assert "vllm-a does not use these weights, code=mismatch: why?not" in one.lines()
        assert "vllm-a: zero_copy, 1.0 MB in 12 ms" in one.lines()


def test_after_a_failed_build_the_next_engine_is_refused_once(tmp_path):
    """It goes to disk with the cause; the one after it is served."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        client.report(one.socket_dir, Report("build_failed", "vllm-a", "slots", "lm_head is missing"))
        with client.open_session(one.socket_dir, "cpu-0") as session:
            with pytest.raises(BuildFailedError) as caught:
                session.map(FINGERPRINT, "zero_copy")
            assert str(caught.value) == (
                "the last engine failed while it built on these weights: vllm-a: lm_head is missing"
            )
        assert served_byte(one.socket_dir) == 7


def test_a_failed_build_is_not_held_against_new_weights(tmp_path):
    """A load makes a fresh start."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        client.report(one.socket_dir, Report("build_failed", "vllm-a", "slots", "lm_head is missing"))
        client.load(one.socket_dir)
        wait_for(lambda: one.status().loads == 2, "the second load")
        assert served_byte(one.socket_dir) == 7
