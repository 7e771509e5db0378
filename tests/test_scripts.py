"""Scripts without Docker: env, which turns what a user gives `make up` into compose/.env, and what others say then."""

import importlib.machinery
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory in place of compose/."""
    made = tmp_path / "compose"
    made.mkdir()
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What looks like the directory of a checkpoint."""
    made = tmp_path / "models" / "a model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    return made


def env(project: Path, cwd: Path = ROOT, **given: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "WEIGHTKEEPER_COMPOSE_DIR": str(project)} | given
    return subprocess.run(
        [str(ROOT / "scripts" / "env")], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def written(project: Path) -> dict[str, str]:
    lines = (project / ".env").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: value.strip("'") for name, value in pairs}


def test_settings_are_kept_for_the_next_time(project: Path, model: Path):
    """What was given once is in .env afterwards; a second run without it changes nothing, not even the file's times."""
    assert env(project, MODEL=str(model), PORT="8123").returncode == 0
    values = written(project)
    assert values["MODEL"] == values["MODEL_BLOBS"] == str(model)
    assert values["PORT"] == "8123" and values["PROJECT_DIR"] == str(project)
    before = (project / ".env").stat()
    assert env(project).returncode == 0
    assert (project / ".env").stat() == before


def test_lines_of_the_user_stay(project: Path, model: Path):
    """Comments, other variables and a port of the user's own are left alone; the file can be read by the supervisor."""
    (project / ".env").write_text("# ours\nHTTPS_PROXY=http://proxy:3128\nPORT=9000\n")
    (project / ".env").chmod(0o600)
    assert env(project, MODEL=str(model)).returncode == 0
    assert (project / ".env").read_text().startswith("# ours\nHTTPS_PROXY=http://proxy:3128\nPORT=9000\n")
    assert written(project)["PORT"] == "9000"
    assert (project / ".env").stat().st_mode & 0o777 == 0o644


def test_relative_path_is_made_absolute(project: Path, model: Path):
    """MODEL=../x means what it means in the shell of the caller."""
    assert env(project, cwd=model.parent, MODEL="a model").returncode == 0
    assert written(project)["MODEL"] == str(model)


def test_snapshot_of_a_cache_brings_its_blobs(project: Path, tmp_path: Path):
    """The links of a Hugging Face snapshot lead to ../../blobs, which is mounted beside the model."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00d").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    assert env(project, MODEL=str(snapshot)).returncode == 0
    assert written(project)["MODEL_BLOBS"] == str(repository / "blobs")
    refused = env(project, MODEL=str(repository))
    assert refused.returncode == 1 and str(snapshot) in refused.stderr


def test_default_model_follows_the_checkout(project: Path):
    """Without MODEL, or with an empty one, it is the default model of this checkout, wherever that lay before."""
    (project / ".env").write_text("MODEL='/old/place/.work/models/SmolLM2-135M-Instruct'\n")
    assert env(project).returncode == 0
    default = str(ROOT / ".work" / "models" / "SmolLM2-135M-Instruct")
    assert written(project)["MODEL"] == default
    (project / ".env").write_text("MODEL='/gone'\n")
    assert env(project, MODEL="").returncode == 0
    assert written(project)["MODEL"] == default


@pytest.mark.parametrize(
    ("listed", "files"), [("GPU 0: NVIDIA H200 (UUID: GPU-af7b61d8)", True), ("No devices found", False)]
)
def test_gpu_brings_its_compose_file(project: Path, model: Path, tmp_path: Path, listed: str, files: bool):
    """Where nvidia-smi lists a GPU, compose.gpu.yaml takes part; a choice already in .env stays."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    assert env(project, MODEL=str(model), PATH=path).returncode == 0
    assert written(project)["COMPOSE_FILE"] == ("compose.yaml:compose.gpu.yaml" if files else "compose.yaml")
    (project / ".env").write_text("COMPOSE_FILE=compose.yaml:mine.yaml\n")
    assert env(project, MODEL=str(model), PATH=path).returncode == 0
    assert written(project)["COMPOSE_FILE"] == "compose.yaml:mine.yaml"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "is no directory on this machine"),
        ("models/a model/config.json", "is a file; name the directory it lies in"),
        ("models", "has no config.json"),
    ],
)
def test_unusable_model_is_refused_before_anything_is_written(
    project: Path, model: Path, tmp_path: Path, path: str, why: str
):
    """The path is named, in plain words, and .env stays as it was."""
    assert model.exists()
    refused = env(project, MODEL=str(tmp_path / path))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"weightkeeper: MODEL={tmp_path / path} ") and why in refused.stderr
    assert list(project.iterdir()) == []


def test_directory_that_cannot_be_read_is_refused():
    """An unreadable path is said as such, with the command that shows why."""
    if shutil.which("setpriv") is None or os.getuid():
        pytest.skip("needs root and setpriv, to become another user")
    if any(not parent.stat().st_mode & 0o001 for parent in ROOT.parents):
        pytest.skip(f"another user cannot enter {ROOT}")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o777)
        model = Path(place) / "model"
        model.mkdir(mode=0o700)
        refused = subprocess.run(
            ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", str(ROOT / "scripts" / "env")],
            env={"PATH": os.environ["PATH"], "WEIGHTKEEPER_COMPOSE_DIR": place, "MODEL": str(model)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert refused.returncode == 1
    assert f"MODEL={model} cannot be read by uid 12345: ls -ld {model}" in refused.stderr


def docker_that(tmp_path: Path, *lines: str) -> str:
    """A PATH whose first directory holds a program `docker` of these shell lines."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (programs / "docker").chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


def script(name: str, project: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments], capture_output=True, text=True, check=False,
        env={"PATH": path, "WEIGHTKEEPER_COMPOSE_DIR": str(project)},
    )  # fmt: skip


COMMANDS = [("restart-engine",), ("status",), ("status", "--json"), ("wait-ready", "engine")]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_docker_a_command_says_so(project: Path, tmp_path: Path, command: tuple[str, ...]):
    """In one line, with the remedy."""
    (tmp_path / "empty").mkdir()
    refused = script(command[0], project, *command[1:], path=str(tmp_path / "empty"))
    assert (refused.returncode, refused.stderr) == (
        1,
        f"weightkeeper: docker cannot be run in {project}: No such file or directory (docker); "
        "install Docker with its compose plugin, and run this from the project's checkout\n",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_docker_that_refuses_is_quoted(project: Path, tmp_path: Path, command: tuple[str, ...]):
    """The command ends with Docker's own words."""
    path = docker_that(tmp_path, "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    refused = script(command[0], project, *command[1:], path=path)
    service = "sidecar" if command == ("restart-engine",) else "engine"
    assert refused.returncode == 1
    assert refused.stderr == f"weightkeeper: {service}: Cannot connect to the Docker daemon\n"


def test_a_restart_without_a_supervisor_is_refused_with_the_remedy(project: Path, tmp_path: Path):
    """Whether it is stopped or not there at all; nothing is asked of it."""
    asked = tmp_path / "asked"
    answers = {
        "compose ps -aq sidecar": "k", "inspect k": described("k"), "compose ps -aq supervisor": "s",
        "inspect s": described("s", Status="exited", Running=False),
    }  # fmt: skip
    lines = [f'[ "$*" != {shlex.quote(words)} ] || {{ echo {shlex.quote(text)}; exit 0; }}'
             for words, text in answers.items()]  # fmt: skip
    refused = script("restart-engine", project, path=docker_that(tmp_path, *lines, f'echo "$*" >> {asked}'))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "weightkeeper: supervisor: it is exited; start it with `make up`, or with "
        "`docker compose up -d supervisor` in compose/\n"
    )
    assert not asked.exists()


def test_a_reader_that_has_gone_gets_no_traceback(project: Path, tmp_path: Path):
    """`make status | head`, say."""
    command = f"{sys.executable} {ROOT / 'scripts' / 'status'} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False,
        env={"PATH": running_project(tmp_path, described("s")), "WEIGHTKEEPER_COMPOSE_DIR": str(project)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_restart_without_a_sidecar_is_refused(project: Path, tmp_path: Path):
    """Before anything is asked of the supervisor."""
    asked = tmp_path / "asked"
    path = docker_that(tmp_path, f'echo "$*" >> {asked}')
    refused = script("restart-engine", project, path=path)
    assert (refused.returncode, refused.stderr) == (
        1,
        "weightkeeper: sidecar: it has no container; start the project with `make up`\n",
    )
    assert asked.read_text() == "compose ps -aq sidecar\n"


def test_an_inspection_that_is_no_json_is_said(project: Path, tmp_path: Path):
    """With what came in its place."""
    path = docker_that(tmp_path, '[ "$1" = inspect ] && echo "out of memory" || echo 0123abcd')
    refused = script("restart-engine", project, path=path)
    assert refused.returncode == 1
    assert refused.stderr == (
        "weightkeeper: `docker inspect` printed no JSON (Expecting value: line 1 column 1 (char 0)): out of memory\n"
    )


def test_a_docker_that_does_not_end_is_given_up(project: Path, tmp_path: Path):
    """After the time that its caller gives it."""
    body = "import running, sys; running.docker('compose', 'ps', timeout=0.1)"
    path = docker_that(tmp_path, "exec sleep 600")
    refused = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, check=False,
        env={"PATH": path, "WEIGHTKEEPER_COMPOSE_DIR": str(project), "PYTHONPATH": str(ROOT / "scripts")},
    )  # fmt: skip
    assert refused.stderr.endswith("running.NotRunningError: `docker compose ps` did not end in 0.1 s\n")


def rows_of(phases: dict[str, float], asked: float, up: float) -> list:
    """What restart-engine prints of a start with these phases."""
    loader = importlib.machinery.SourceFileLoader("restart_engine", str(ROOT / "scripts" / "restart-engine"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("restart_engine", loader))
    loader.exec_module(module)
    return module.table(asked, up, up + 1, {"started_at": 1}, {"started_at": 1, "phases": phases})


def test_the_rows_of_a_restart_add_up_also_where_a_start_was_under_way(monkeypatch):
    """None of them is negative: phases that began before the question are not told."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    assert rows_of({"fork": 1.0, "map": 2.0}, 10.0, 14.0) == [
        ("asked, read and checked", 1.0), ("fork", 1.0), ("map", 2.0), ("first answer", 1.0),
    ]  # fmt: skip
    assert rows_of({"fork": 1.0, "map": 4.0}, 10.0, 14.0) == [
        ("rest of a start that was under way", 4.0), ("first answer", 1.0),
    ]  # fmt: skip


def test_status_refuses_words_that_it_does_not_know(project: Path, tmp_path: Path):
    refused = script("status", project, "--jsn", path=docker_that(tmp_path, "exit 1"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("status [--json]: ")


STARTED = "2026-01-01T00:00:00.123456789Z"


def described(service: str, **state: object) -> str:
    """What `docker inspect` prints of a container, as far as it is read."""
    there = {"Status": "running", "Running": True, "StartedAt": STARTED, "FinishedAt": STARTED, **state}
    labels = {"com.docker.compose.project": "mine"}
    return json.dumps([{"Id": service * 12, "RestartCount": 0, "State": there, "Config": {"Labels": labels}}])


def running_project(tmp_path: Path, supervisor: str, plan: str = "[]", history: str = "") -> str:
    """A PATH with a docker that has an engine and a supervisor; `supervisor` is its description, "" for none."""
    answers = {
        "compose ps -aq engine": "e",
        "inspect e": described("e"),
        "compose ps -aq supervisor": "s" if supervisor else "",
        "inspect s": supervisor,
        "compose exec -T supervisor weightkeeper plan --json": plan,
        "compose exec -T supervisor weightkeeper history --json -n 20": history,
    }
    lines = [f'[ "$*" != {shlex.quote(asked)} ] || {{ echo {shlex.quote(text)}; exit 0; }}'
             for asked, text in answers.items()]  # fmt: skip
    wanted = "--filter label=com.docker.compose.project=mine --filter label=weightkeeper.supervise=true"
    lines.append(f'case "$*" in "ps --all {wanted} --format "*) echo engine; echo b; echo engine; exit 0 ;; esac')
    return docker_that(tmp_path, *lines, "echo 'not there' >&2; exit 1")


def test_an_engine_that_does_not_come_up_ends_the_wait_with_its_cause(project: Path, tmp_path: Path):
    """Once Docker calls its container unhealthy and its launcher has given up; not after an hour."""
    broken = json.dumps({"state": "broken", "cause": "exit code 3"})
    answers = {
        "compose ps -aq engine": "e",
        "inspect e": described("e", Health={"Status": "unhealthy"}),
        "compose exec -T engine weightkeeper engine-status --json": broken,
    }
    lines = [f'[ "$*" != {shlex.quote(asked)} ] || {{ echo {shlex.quote(text)}; exit 0; }}'
             for asked, text in answers.items()]  # fmt: skip
    (project / ".env").write_text("PORT=1\n")  # where nobody listens
    refused = script("wait-ready", project, "engine", "60", path=docker_that(tmp_path, *lines, "exit 1"))
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "weightkeeper: engine: no server came up: exit code 3; `docker compose logs engine`"
    )


def status(project: Path, path: str, *options: str) -> str:
    done = script("status", project, *options, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


PLANNED = {"service": "engine", "load": "", "tried": False, "changes": []}


@pytest.mark.parametrize(
    ("plan", "row"),
    [
        ({"action": "reload", "cause": "a 1 → 2", "load": "sidecar"}, "pending      load, then reload engine: a 1 → 2"),
        ({"action": "refuse", "cause": "port: no"}, "refused      engine: port: no"),
        ({"action": "keep", "cause": "empty"}, "kept         engine: empty"),
        ({"action": "reload", "cause": "a 1 → 3", "tried": True}, "in vain      reload engine: a 1 → 3"),
    ],
)
def test_status_tells_what_the_supervisor_has_not_applied(project: Path, tmp_path: Path, plan: dict, row: str):
    """What is pending, refused, kept or was tried in vain, with the cause."""
    path = running_project(tmp_path, described("s", Health={"Status": "healthy"}), json.dumps([PLANNED | plan]))
    lines = status(project, path).splitlines()
    assert lines[-3].startswith("supervisor   healthy for ") and lines[-3].endswith(" d, supervises b engine")
    assert lines[-2:] == [row, "last action  none yet"]


def test_status_tells_the_last_action_with_its_cause_and_how_long_ago(project: Path, tmp_path: Path):
    """And that there is nothing else to tell; as JSON it has the plan and the whole record."""
    moment = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat(timespec="milliseconds")
    record = {
        "time": moment.replace("+00:00", "Z"), "service": "engine", "action": "reload", "cause": "engine.yaml a 1 → 2",
        "result": "healthy", "seconds": 2.25, "detail": "",
    }  # fmt: skip
    path = running_project(tmp_path, described("s"), history=json.dumps(record))
    *_, supervisor, last = status(project, path).splitlines()
    assert supervisor.startswith("supervisor   running for ")
    assert supervisor.endswith(", supervises b engine; nothing is pending, refused or tried in vain")
    assert last == "last action  reload engine: engine.yaml a 1 → 2 — healthy after 2.2 s, 5 min ago"
    told = json.loads(status(project, path, "--json"))
    assert told["supervisor"] == {
        "state": "running", "started_at": STARTED, "supervises": ["b", "engine"], "plan": [],
    }  # fmt: skip
    assert told["last_restart"] == record


def test_status_tells_why_something_was_in_vain(project: Path, tmp_path: Path):
    """By the history's last record of it; the rollback came after that."""
    tried = {"time": STARTED, "service": "engine", "action": "reload", "cause": "engine.yaml a 1 → 3", "seconds": 2.0}
    before = tried | {"result": "exited", "detail": "with exit code 1 (an older reason)"}
    last = tried | {"result": "exited", "detail": "with exit code 1 (ValueError: a is at most 2)"}
    back = tried | {"action": "rollback", "cause": "it did not come up", "result": "healthy", "detail": ""}
    plan = json.dumps([PLANNED | {"action": "reload", "cause": "engine.yaml a 1 → 3", "tried": True}])
    path = running_project(tmp_path, described("s"), plan, "\n".join(map(json.dumps, (before, last, back))))
    row, done = status(project, path).splitlines()[-2:]
    assert row == (
        "in vain      reload engine: engine.yaml a 1 → 3 — exited (with exit code 1 (ValueError: a is at most 2))"
    )
    assert done.startswith("last action  rollback engine: it did not come up — healthy")


@pytest.mark.parametrize(
    ("container", "row"),
    [
        ("", "supervisor   absent, edits of the files are not applied; start it with `make up`, or "),
        (described("s", Status="exited", Running=False), "supervisor   exited since "),
    ],
    ids=["absent", "stopped"],
)
def test_status_says_that_no_supervisor_runs_and_how_to_start_one(
    project: Path, tmp_path: Path, container: str, row: str
):
    """In words; the rest of the status is there."""
    path = running_project(tmp_path, container)
    lines = status(project, path).splitlines()
    assert lines[-2].startswith(row) and lines[-2].endswith("with `docker compose up -d supervisor` in compose/")
    assert lines[0] == "not there" and lines[1].startswith("container    state running, id eeee")
    told = json.loads(status(project, path, "--json"))
    assert told["supervisor"]["unknown"].startswith("it does not run; start it with `make up`")


def test_status_of_a_supervisor_that_cannot_plan_has_its_words(project: Path, tmp_path: Path):
    """A compose file that cannot be read, say."""
    path = running_project(tmp_path, described("s"), plan="")
    *_, supervisor, pending, _ = status(project, path).splitlines()
    assert supervisor.endswith(", supervises b engine")
    assert pending.startswith("pending      not known: supervisor: `weightkeeper plan --json` printed no JSON")
