"""The whole product under Docker Compose, with a real model: one project, used as a user uses it, from up to down.

The tests run in the order of this file, on one running project; an engine start takes 25 s.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose_project import (
    FALLBACK,
    MAPPED,
    ROOT,
    Project,
    docker,
    stopped_at_end,
    swap_cities,
    until,
)

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

MODEL_BYTES = 269_030_016
"""Of SmolLM2-135M's parameters in bfloat16."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project that `scripts/up` has brought up on a copy of the default model."""
    place = tmp_path_factory.mktemp("compose")
    subprocess.run([str(ROOT / "scripts" / "model")], check=True, stdin=subprocess.DEVNULL)
    model = place / "model"
    shutil.copytree(ROOT / ".work" / "models" / "SmolLM2-135M-Instruct", model)
    with stopped_at_end(Project(place / "project", model, f"wktest{os.getpid()}")) as made:
        made.said_by_up = made.script("up")
        yield made


@pytest.fixture
def engine(project: Project) -> tuple[str, str, int]:
    """The container and the server of a healthy engine, from which a test starts."""
    until("the engine is healthy", lambda: project.health("engine") == "healthy")
    until("the supervisor is there", lambda: project.health("supervisor") == "healthy")
    return project.server()


@pytest.fixture
def sidecar(project: Project) -> Iterator[tuple[str, str]]:
    """The identity of the sidecar, which is the same after the test."""
    before = project.identity("sidecar")
    yield before
    assert project.identity("sidecar") == before, "the sidecar was restarted or replaced"


def test_up_ends_with_a_right_answer_and_the_commands_to_go_on_with(project: Project):
    """`make up` shows progress, one real answer, and what can be done next."""
    assert "sidecar: holds /model: 0.27 GB" in project.said_by_up
    assert "Paris" in project.said_by_up
    assert "make restart-engine" in project.said_by_up
    assert "Paris" in project.answer()


def test_first_engine_maps_all_parameters(project: Project, engine, sidecar):
    """The engine says what it mapped, and the keeper shows one lease on the bytes that it holds."""
    assert project.mapped_bytes() >= MODEL_BYTES
    status = project.status()
    assert status["state"] == "ready" and status["held"]["nbytes"] >= MODEL_BYTES
    assert [lease["mode"] for lease in status["leases"]] == ["zero_copy"]
    assert status["last_report"]["event"] == "mapped" and status["fallbacks"] == {}


def test_services_run_as_one_unprivileged_user_on_a_read_only_root(project: Project):
    """uid 1000 in all three, nothing writable but volumes and tmpfs, no capability, no way to gain one."""
    for service in ("sidecar", "engine", "supervisor"):
        described = project.container(service)
        assert described["Config"]["User"] == "1000:1000"
        assert described["HostConfig"]["ReadonlyRootfs"] is True
        assert described["HostConfig"]["CapDrop"] == ["ALL"]
        assert described["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"]
        assert described["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    labelled = docker("ps", "-q", "--no-trunc", "--filter", "label=weightkeeper.supervise=true").split()
    assert project.identity("engine")[0] in labelled
    assert project.identity("sidecar")[0] not in labelled


def test_doctor_says_from_a_container_of_its_own_that_memory_can_be_shared(project: Project, engine, sidecar):
    """Tried in the sidecar's image, user and mounts; nothing of it stays."""
    report = json.loads(project.script("doctor", "--json"))
    assert (report["works"], report["needed"]) == (True, "host")
    assert report["facts"]["container"] == "docker"
    assert report["facts"]["uid"] == int(project.compose("exec", "-T", "sidecar", "id", "-u"))
    assert len(project.compose("ps", "-a", "-q").split()) == 3


def test_up_again_changes_nothing(project: Project, engine, sidecar):
    """`make up` on a running project replaces and restarts nothing, and .env stays as it is."""
    settings = (project.directory / ".env").stat()
    project.script("env")
    project.compose("up", "-d", "--no-build")
    assert project.server() == engine
    assert (project.directory / ".env").stat() == settings


def test_restart_engine_maps_and_tells_where_the_seconds_went(project: Project, engine, sidecar):
    """The same container, another server; the rows of the table add up; the history has the cause."""
    said = project.script("restart-engine")
    assert project.server() == (*engine[:2], engine[2] + 1)
    assert project.mapped_bytes() >= MODEL_BYTES
    assert len(project.status()["leases"]) == 1
    rows = [line.split(" s  ") for line in said.splitlines() if " s  " in line]
    *parts, (whole, text) = [(float(seconds), name) for seconds, name in rows]
    assert sum(seconds for seconds, _ in parts) == pytest.approx(whole, abs=0.1)
    assert {"asked, read and checked", "stop", "fork", "map", "first answer"} <= {name for _, name in parts}
    assert "Paris" in text
    assert "sidecar: the same container, not restarted" in said
    last = project.history()[-1]
    assert last["service"] == "engine" and "make restart-engine" in last["cause"]


def test_status_shows_model_bytes_lease_and_last_cause(project: Project, engine, sidecar):
    """`make status` has it all in words, and as JSON behind them."""
    shown = project.script("status")
    assert "/model" in shown and "healthy" in shown and "make restart-engine" in shown
    told = json.loads(project.script("status", "--json"))
    assert told["keeper"]["held"]["nbytes"] >= MODEL_BYTES
    assert told["engine"]["state"] == "healthy" and told["engine"]["id"] == engine[0][:12]
    assert (told["engine"]["launcher"]["state"], told["engine"]["launcher"]["prefork"]) == ("ready", True)
    assert "make restart-engine" in told["last_restart"]["cause"]


def test_option_edited_in_place_reloads_the_engine_alone(project: Project, engine, sidecar):
    """A saved engine.yaml is acted on by itself; the log has old → new; the weights are mapped."""
    text = project.engine_yaml.read_text()
    project.engine_yaml.write_text(text.replace("max-model-len: 2048", "max-model-len: 1024"))
    project.wait_for_new_engine(engine)
    assert project.server() == (*engine[:2], engine[2] + 1)
    assert project.get("/v1/models")["data"][0]["max_model_len"] == 1024
    assert project.log("supervisor").count("reload engine: engine.yaml max-model-len 2048 → 1024") == 1
    assert project.mapped_bytes() >= MODEL_BYTES
    assert "Paris" in project.answer()


def test_an_option_that_shapes_weights_has_them_loaded_first(project: Project, engine, sidecar):
    """The keeper loads, then the engine reloads and maps; the sidecar's container is not touched, there and back."""
    text, actions = project.engine_yaml.read_text(), len(project.history())
    for before, after, factor in (("bfloat16", "float32", 2), ("float32", "bfloat16", 1)):
        engine, loads = project.server(), project.status()["loads"]
        project.engine_yaml.write_text(text.replace("dtype: bfloat16", f"dtype: {after}"))
        project.wait_for_new_engine(engine)
        assert f"load, then reload engine: engine.yaml dtype {before} → {after}" in project.log("supervisor")
        assert project.server() == (*engine[:2], engine[2] + 1)
        assert project.status()["loads"] == loads + 1
        assert project.mapped_bytes() >= factor * MODEL_BYTES
        assert "Paris" in project.answer()
    until("it is written down", lambda: len(project.history()) == actions + 4)
    assert [each["action"] for each in project.history()[actions:]] == 2 * ["load", "reload"]


def test_bad_edit_keeps_the_engine_until_a_right_file_comes_by_rename(project: Project, engine, sidecar):
    """G20: what is no YAML is said once with its line and restarts nothing; the file renamed over it is acted on."""
    good = project.engine_yaml.read_text()
    actions = len(project.history())
    project.engine_yaml.write_text(good + "max-model-len: [512\n")
    line = good.count("\n") + 2
    until("the fault is said", lambda: f"line {line}" in project.log("supervisor"))
    assert project.server() == engine
    assert "Paris" in project.answer()
    written = project.directory / ".engine.yaml.swp"
    written.write_text(good.replace("max-model-len: 1024", "max-model-len: 512"))
    written.rename(project.engine_yaml)
    project.wait_for_new_engine(engine)
    assert project.get("/v1/models")["data"][0]["max_model_len"] == 512
    until("it is written down", lambda: len(project.history()) == actions + 1)
    assert "max-model-len 1024 → 512" in project.history()[-1]["cause"]
    assert project.log("supervisor").count(f"line {line}") == 1
    assert project.mapped_bytes() >= MODEL_BYTES


def test_what_vllm_refuses_leaves_the_engine_serving(project: Project, engine, sidecar):
    """An edit that is YAML and no configuration: vLLM's own words in the supervisor's log, the same server goes on."""
    good = project.engine_yaml.read_text()
    project.engine_yaml.write_text(good + "block-size: seventeen\n")
    until("the refusal is said", lambda: "block-size" in project.launcher()["refusal"])
    assert "seventeen" in project.log("supervisor")
    loads = project.status()["loads"]
    project.engine_yaml.write_text(good + "max-modell-len: 256\n")
    until("the refusal is said", lambda: "unrecognized arguments" in project.launcher()["refusal"])
    assert "load, then reload engine: engine.yaml max-modell-len" in project.log("supervisor")
    assert (project.status()["loads"], project.keeper_state()) == (loads, "ready")
    assert project.server() == engine
    assert "Paris" in project.answer()
    actions = len(project.history())
    project.engine_yaml.write_text(good)
    until("the supervisor has seen it", lambda: "nothing to do: engine.yaml" in project.log("supervisor"))
    assert project.server() == engine and len(project.history()) == actions
    assert "Paris" in project.answer()


def save(project: Project, how: str, text: str) -> None:
    """Write engine.yaml as editors and tools do it."""
    file = project.engine_yaml
    if how in ("in place", "its target"):
        file.write_text(text)
    elif how == "rename":
        (project.directory / "engine.yaml~").write_text(text)
        (project.directory / "engine.yaml~").rename(file)
    elif how == "truncate, then write":
        with file.open("w") as stream:
            time.sleep(0.2)
            stream.write(text)
    else:
        target = project.directory / "versions"
        target.mkdir(mode=0o755)
        (target / "engine.yaml").write_text(text)
        (project.directory / "link").symlink_to(f"{target.name}/engine.yaml")
        (project.directory / "link").rename(file)


@pytest.mark.parametrize("how", ["in place", "rename", "truncate, then write", "symlink", "its target"])
def test_a_save_in_any_way_is_one_reload(project: Project, engine, sidecar, how: str):
    """G13: real vLLM has the new value, in the same container; the sidecar is not touched; one line of history."""
    text = project.engine_yaml.read_text()
    length = int(re.search(r"max-model-len: (\d+)", text)[1])
    actions = len(project.history())
    save(project, how, text.replace(f"max-model-len: {length}", f"max-model-len: {length + 16}"))
    project.wait_for_new_engine(engine)
    until("it is written down", lambda: len(project.history()) > actions)
    assert project.server() == (*engine[:2], engine[2] + 1)
    assert project.get("/v1/models")["data"][0]["max_model_len"] == length + 16
    (last,) = project.history()[actions:]
    assert (last["action"], last["result"], last["cause"]) == (
        "reload", "healthy", f"engine.yaml max-model-len {length} → {length + 16}"
    )  # fmt: skip
    assert project.mapped_bytes() >= MODEL_BYTES


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "# a comment\n" + "\n".join(sorted(text.splitlines())) + "\n",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("enforce-eager: true", "enforce-eager:   True   # as before"),
    ],
    ids=["comments and order", "line ends", "spelling"],
)
def test_a_save_that_changes_no_value_does_nothing(project: Project, engine, sidecar, change):
    """G14: it is said, and the same server goes on."""
    text = project.engine_yaml.read_text()
    told, actions = project.log("supervisor").count("nothing to do"), len(project.history())
    project.engine_yaml.write_bytes(change(text).encode())
    until("it is said", lambda: project.log("supervisor").count("nothing to do") > told)
    assert project.server() == engine and len(project.history()) == actions
    project.engine_yaml.write_text(text)
    until("it is said again", lambda: project.log("supervisor").count("nothing to do") > told + 1)


def test_noise_beside_an_edit_delays_it_and_repeats_nothing(project: Project, engine, sidecar):
    """A hundred writes a second to another file of the directory: one reload, while they go on."""
    actions = len(project.history())
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.01):
            (project.directory / "noise").write_text(str(time.monotonic()))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        text = project.engine_yaml.read_text()
        project.engine_yaml.write_text(re.sub(r"max-model-len: \d+", "max-model-len: 640", text))
        project.wait_for_new_engine(engine)
    finally:
        over.set()
        writer.join()
    until("it is written down", lambda: len(project.history()) > actions)
    assert project.server() == (*engine[:2], engine[2] + 1)
    assert [each["action"] for each in project.history()[actions:]] == ["reload"]


def test_a_variable_of_the_service_recreates_its_container_alone(project: Project, engine, sidecar):
    """Another container with the variable; it maps; one line of history; the way back is the same."""
    actions = len(project.history())
    definition = project.directory / "compose.yaml"
    text = definition.read_text()
    definition.write_text(text.replace("WEIGHTKEEPER_ENGINE: engine\n", "WEIGHTKEEPER_ENGINE: engine\n      TZ: UTC\n"))
    project.wait_for_new_engine(engine)
    until("it is written down", lambda: len(project.history()) > actions)
    assert project.server()[0] != engine[0]
    assert "TZ=UTC" in project.container("engine")["Config"]["Env"]
    assert [each["action"] for each in project.history()[actions:]] == ["recreate"]
    assert project.mapped_bytes() >= MODEL_BYTES


@pytest.mark.parametrize("name", ["server", "EngineCor", "Worker"])
def test_killed_process_comes_back_by_itself_and_maps(project: Project, engine, sidecar, name: str):
    """SIGKILL of server, engine core or worker: the same container and launcher, another server, weights mapped."""
    project.kill_in_engine(name)
    project.wait_for_new_engine(engine)
    assert project.server() == (*engine[:2], engine[2] + 1)
    assert project.launcher()["last_exit"]["was_asked"] is False
    assert project.mapped_bytes() >= MODEL_BYTES
    assert [lease["mode"] for lease in project.status()["leases"]] == ["zero_copy"]
    assert "Paris" in project.answer()


def test_killed_launcher_ends_the_container_and_docker_starts_it_again(project: Project, engine, sidecar):
    """Nothing of the old server is left beside the new one."""
    project.signal("engine", "weightkeeper engine", signal.SIGKILL)
    project.wait_for_new_engine(engine)
    assert project.server()[0] == engine[0] and project.server()[1] != engine[1]
    assert project.mapped_bytes() >= MODEL_BYTES
    assert len(project.status()["leases"]) == 1


def test_killed_keeper_leaves_the_engine_running_and_takes_over_its_old_socket(project: Project, engine):
    """G10: the engine computes on; the new keeper takes over the dead socket in one line, and the weights from it."""
    before = project.identity("sidecar")
    project.signal("sidecar", "weightkeeper serve", signal.SIGKILL)
    until("the sidecar was started again", lambda: project.identity("sidecar") != before)
    assert "Paris" in project.answer()
    until("the keeper is ready again", lambda: project.keeper_state() == "ready")
    until("the sidecar is healthy", lambda: project.health("sidecar") == "healthy")
    assert project.server() == engine and "Paris" in project.answer()
    assert project.log("sidecar").count("took over") == 1
    status = project.status()
    assert (status["loads"], len(status["leases"])) == (0, 1) and status["held"]["adopted_from"]


def test_keeper_killed_while_loading_is_waited_for(project: Project, engine):
    """G01: nothing of the killed load counts; an engine that starts meanwhile waits for the new one and maps it."""
    project.compose("stop", "engine")  # which would give the next keeper the weights
    before = project.identity("sidecar")
    project.signal("sidecar", "weightkeeper serve", signal.SIGKILL)
    until("the keeper loads", lambda: project.identity("sidecar") != before and project.keeper_state() == "loading")
    loading = project.identity("sidecar")
    project.signal("sidecar", "weightkeeper serve", signal.SIGKILL)
    until("the sidecar was started once more", lambda: project.identity("sidecar") != loading)
    project.compose("start", "engine")
    project.wait_for_new_engine(engine)
    assert project.mapped_bytes() >= MODEL_BYTES
    assert project.status()["loads"] == 1
    assert "Paris" in project.answer()


def test_fine_tune_copied_over_the_model_is_never_served_from_the_old_weights(project: Project, engine, sidecar):
    """C01: other bytes under the same headers go to disk with code=mismatch, until `make load` replaces them."""
    old = project.status()["held"]["fingerprint"]
    swap_cities(project.model)
    project.script("restart-engine", "fine-tune")
    code, why = FALLBACK.search(project.engine_log()).groups()
    assert code == "mismatch" and ".safetensors" in why
    assert not MAPPED.search(project.engine_log())
    assert "London" in project.answer()
    assert project.status()["fallbacks"] == {"mismatch": 1}
    assert project.status()["leases"] == []
    project.script("load")
    held = project.status()["held"]
    assert held["fingerprint"] != old and held["generation"] == 2
    project.script("restart-engine", "mapped again")
    assert project.mapped_bytes() >= MODEL_BYTES
    assert "London" in project.answer()
    swap_cities(project.model)


def test_release_gives_the_memory_back_and_load_brings_it_again(project: Project, engine, sidecar):
    """The sidecar stays, healthy and empty, without an engine; `make load` ends with an engine that maps the model."""
    assert shared_bytes(project) >= MODEL_BYTES
    said = project.script("release")
    assert project.keeper_state() == "released"
    assert project.container("engine")["State"]["Running"] is False
    until("the memory is back", lambda: shared_bytes(project) < MODEL_BYTES // 10)
    assert "make load" in said
    project.script("load")
    until("the engine is healthy", lambda: project.health("engine") == "healthy")
    assert project.mapped_bytes() >= MODEL_BYTES
    assert "Paris" in project.answer()


def test_everything_comes_back_by_itself_when_the_docker_engine_restarts(project: Project, engine):
    """Docker starts the containers in any order, without depends_on: the engine waits for the keeper and maps."""
    ours = {project.identity(service)[0] for service in ("sidecar", "engine", "supervisor")}
    foreign = set(docker("ps", "-q", "--no-trunc").split()) - ours
    if foreign:
        pytest.skip(f"{len(foreign)} other containers run here; restarting the Docker engine would stop them")
    subprocess.run([str(ROOT / "scripts" / "docker-engine"), "restart"], check=True, stdin=subprocess.DEVNULL)
    project.wait_for_new_engine(engine)
    assert {project.identity(service)[0] for service in ("sidecar", "engine", "supervisor")} == ours
    assert project.mapped_bytes() >= MODEL_BYTES
    assert "Paris" in project.answer()
    until("the supervisor is healthy", lambda: project.health("supervisor") == "healthy")


def test_up_with_another_model_replaces_sidecar_and_engine_once(project: Project, engine, tmp_path: Path):
    """`MODEL=/path make up` on a running project: the other checkpoint is held, mapped and served."""
    other = tmp_path / "fine-tune"
    shutil.copytree(project.model, other)
    swap_cities(other)
    actions = len(project.history())
    project.environment["MODEL"] = str(other)
    assert "London" in project.script("up")
    assert project.identity("engine") != engine[:2]
    assert project.mapped_bytes() >= MODEL_BYTES
    assert project.status()["fallbacks"] == {} and project.status()["loads"] == 1
    assert len(project.history()) == actions, "the supervisor acted too"


def test_down_leaves_nothing_but_the_named_volumes(project: Project):
    """No container, no network; the three volumes stay, and go with --volumes."""
    project.script("down")
    of_project = f"label=com.docker.compose.project={project.name}"
    assert docker("ps", "-aq", "--filter", of_project) == ""
    assert docker("network", "ls", "-q", "--filter", of_project) == ""
    volumes = set(docker("volume", "ls", "-q", "--filter", of_project).split())
    assert volumes == {f"{project.name}_{name}" for name in ("sockets", "cache", "state")}
    left = {line for line in docker("volume", "ls", "-q").split() if line.startswith(project.name)}
    assert left == volumes


def shared_bytes(project: Project) -> int:
    """Shared memory in the sidecar's control group, where sealed memory files are counted, in bytes."""
    pid = project.container("sidecar")["State"]["Pid"]
    groups = dict(
        (line.split(":")[1], line.split(":")[2]) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    )
    for file in (Path(f"/sys/fs/cgroup{groups.get('', '')}"), Path(f"/sys/fs/cgroup/memory{groups.get('memory', '')}")):
        with contextlib.suppress(OSError):
            fields = dict(line.split() for line in (file / "memory.stat").read_text().splitlines())
            return int(fields.get("total_shmem") or fields["shmem"])
    raise AssertionError("the sidecar's memory control group was not found")
