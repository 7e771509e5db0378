"""The keeper's real loader: what it refuses before vLLM is imported, and what its end leaves behind."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
from engines import Engine, Keeper, keeper, mapped, run

from weightkeeper import client
from weightkeeper.errors import ConfigError
from weightkeeper.launcher.processes import command_line
from weightkeeper.options import read

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(tmp_path):
    return models.write(tmp_path / "m")


@pytest.fixture
def serving():
    """Starts keepers and ends them."""
    running: list[Keeper] = []

    def start(model: Path, **options) -> Keeper:
        running.append(Keeper(model, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


def edit(model: Path, **values) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def children(pid: int) -> list[int]:
    """Of a process, by the kernel's account; none where it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def loader_of_rank(rank: int, running: Keeper) -> int:
    """Process id of another rank's loader, which rank 0 starts; what else that starts (a compiler, say) is none."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in [child for loader in children(running.process.pid) for child in children(loader)]:
            if command_line(child).endswith(f"--rank\0{rank}\0".encode()):
                return child
        time.sleep(0.02)
    raise AssertionError(f"no loader of rank {rank}: {running.status()}")


def loader_of(running: Keeper) -> int:
    """Process id of the keeper's child."""
    return children(running.process.pid)[0]


def test_every_fault_of_a_checkpoint_is_in_the_status_and_nothing_was_imported(serving, model):
    """G25: refused before any allocation, with the list."""
    shards = sorted(model.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-10])
    shards[1].unlink()
    running = serving(model)
    status = running.settle()
    assert status.state == "failed"
    assert shards[0].name in status.failure
    assert shards[1].name in status.failure
    assert "vllm" not in running.text().lower().replace("weightkeeper", "")
    assert status.held is None


def test_a_failed_load_is_tried_again_when_the_files_change_and_not_before(serving, model):
    """Its failure is retried only when something changed."""
    shard = min(model.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    running = serving(model)
    assert running.settle().state == "failed"
    time.sleep(3)
    assert running.text().count("load started") == 1
    shard.write_bytes(content)
    status = running.until(lambda status: status.state not in ("failed", "loading"))
    assert status.state == "ready"
    assert running.text().count("load started") == 2


@pytest.mark.parametrize("where", ["config.json", "engine.yaml"])
def test_an_unverified_quantization_is_refused_with_the_verified_ones(serving, model, where):
    """Before any byte is read: design decision 12."""
    if where == "config.json":
        edit(model, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
        running = serving(model)
    else:
        running = serving(model, quantization="fp8")
    status = running.settle()
    assert status.state == "failed"
    assert "quantization 'fp8' is not verified for sharing on cpu (verified: none)" in status.failure
    assert "hashing" not in running.text()


def test_an_option_that_vllm_refuses_is_said_with_the_file(serving, model):
    """The user edits a file, so the file is named."""
    status = serving(model, max_model_len=-5).settle()
    assert status.state == "failed"
    assert "engine.yaml" in status.failure


def test_a_misspelled_key_of_the_extra_config_is_refused(serving, model):
    """The same check on both sides."""
    status = serving(model, model_loader_extra_config={"fallbak": True}).settle()
    assert "unknown key 'fallbak'" in status.failure


def test_a_killed_loader_leaves_nothing_and_the_engine_is_told(serving, model):
    """Nothing half-published; an engine with fallback goes to disk with the keeper's cause."""
    running = serving(model)
    deadline = time.monotonic() + 60
    while "loading:" not in running.text() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(loader_of(running), signal.SIGKILL)
    status = running.settle()
    assert status.state == "failed"
    assert "signal 9" in status.failure
    answer, log = run(model, load_format="weightkeeper", extra=running.extra())
    assert "fallback to disk, code=keeper_failed" in log
    assert answer["parameter_bytes"]["shared"] == 0
    assert not (running.sockets / "cpu-0.sock").exists()


def test_an_engine_waits_for_a_keeper_that_is_loading(serving, model):
    """Instead of loading a second copy."""
    running = serving(model)
    deadline = time.monotonic() + 60
    while "load started" not in running.text() and time.monotonic() < deadline:
        time.sleep(0.02)
    _, log = run(model, load_format="weightkeeper", extra=running.extra())
    assert "weightkeeper: waiting:" in log or "weightkeeper: zero_copy, mapped" in log
    assert "weightkeeper: zero_copy, mapped" in log
    assert running.status().fallbacks == {}


def test_a_waiting_time_that_is_over_is_a_cause_of_its_own(serving, model):
    """Bounded, and named."""
    running = serving(model)
    deadline = time.monotonic() + 60
    while "loading:" not in running.text() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(loader_of(running), signal.SIGSTOP)
    _, log = run(model, load_format="weightkeeper", extra=running.extra(state_timeout_s=1))
    assert "fallback to disk, code=still_loading" in log
    os.kill(loader_of(running), signal.SIGCONT)
    running.wait("ready")


def test_load_replaces_what_is_held_and_keeps_it_when_the_new_load_fails(tmp_path, model):
    """`make load` after another checkpoint came into the path."""
    other = models.write(tmp_path / "other", seed=7)
    with keeper(model) as running:
        first = running.status().held
        (model / "config.json").rename(tmp_path / "kept.json")
        client.load(str(running.sockets))
        failed = running.until(lambda status: status.failure != "")
        assert failed.held == first
        assert "config.json" in failed.failure
        for file in other.glob("*.safetensors"):
            (model / file.name).write_bytes(file.read_bytes())
        (tmp_path / "kept.json").rename(model / "config.json")
        client.load(str(running.sockets))
        second = running.until(lambda status: status.loading is None and status.held != first).held
        assert second.generation > first.generation
        assert second.fingerprint != first.fingerprint
        answer, _ = mapped(model, running)
        disk, _ = run(other, repack=False)
        assert answer["tokens"] == disk["tokens"]


@pytest.mark.filterwarnings("ignore")  # vLLM is imported here, and torch warns about itself
@pytest.mark.parametrize(("option", "words"), [("sleep", "enable-sleep-mode moves"), ("eplb", "enable-eplb rewrites")])
def test_options_that_move_weights_end_the_start_in_zero_copy_only(option, words):
    """Refused by name and without a fallback. vLLM itself refuses both on the CPU, so the check is called directly."""
    from weightkeeper.mapped_loader import check_supported

    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=option == "sleep"),
        parallel_config=SimpleNamespace(enable_eplb=option == "eplb"),
    )
    with pytest.raises(ConfigError, match=words):
        check_supported(config, read({}))
    check_supported(config, read({"mode": "copy"}))


@pytest.mark.parametrize(("fallback", "code"), [(True, "no_socket"), (False, "no_socket")])
def test_no_keeper_at_all_is_named(tmp_path, model, fallback, code):
    """With fallback the disk, without it the end, with the same code."""
    extra = {"socket_dir": str(tmp_path), "fallback": fallback, "state_timeout_s": 2}
    with Engine(model, load_format="weightkeeper", extra=extra) as engine:
        if fallback:
            assert engine.answer()["parameter_bytes"]["shared"] == 0
            assert engine.end() == 0
        else:
            with pytest.raises(AssertionError, match="ended without an answer"):
                engine.answer()
            assert engine.end() != 0
        assert f"code={code}" in engine.log()


def test_vllms_own_load_format_is_ours_where_the_image_says_so(model):
    """`ipc_cache` on the CPU is an error in vLLM; with the switch it maps."""
    with keeper(model) as running:
        answer, log = run(
            model,
            load_format="ipc_cache",
            extra=running.extra(fallback=False),
            environment={"WEIGHTKEEPER_TAKE_IPC_CACHE": "1"},
        )
    assert "weightkeeper: zero_copy, mapped" in log
    assert answer["parameter_bytes"]["shared"] == answer["parameter_bytes"]["all"]


def test_a_build_that_fails_sends_the_next_start_to_disk_once(model):
    """Design decision 11: the keeper remembers for the engine."""
    with keeper(model) as running:
        broken = running.extra(fallback=True)
        with Engine(model, load_format="weightkeeper", extra=broken, break_build=True) as engine:
            with pytest.raises(AssertionError, match="ended without an answer"):
                engine.answer()
            assert "code=build_failed" in engine.log()
        _, log = run(model, load_format="weightkeeper", extra=broken)
        assert "fallback to disk, code=build_failed" in log
        _, log = run(model, load_format="weightkeeper", extra=broken)
        assert "weightkeeper: zero_copy, mapped" in log


def test_a_rank_that_dies_fails_the_whole_load(serving, tmp_path):
    """All ranks of a model are ready, or none."""
    model = models.write(tmp_path / "two", hidden=256)
    running = serving(model, tensor_parallel_size=2)
    os.kill(loader_of_rank(1, running), signal.SIGKILL)
    status = running.settle()
    assert status.state == "failed"
    assert status.held is None
    assert "rank 1: its loader ended with status -9" in status.failure
    assert not list(running.sockets.glob("cpu-*.sock"))
