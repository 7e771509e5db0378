"""The recovery benchmark on a compose project: real containers, keeper, launcher and supervisor; vLLM is a stand-in."""

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightkeeper.recovery import result

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

from models import write  # noqa: E402
from recovery_runs import ENVIRONMENT, free_port  # noqa: E402

pytestmark = pytest.mark.docker

SOURCES = TESTS.parent / "sidecar"
IMAGE = "weightkeeper-supervisor:local"
CONFIG = """\
model: /model
served-model-name: local
host: 0.0.0.0
port: 8000
load-format: weightkeeper
model-loader-extra-config: {socket_dir: /run/weightkeeper}
standin: {token: 0.03, start: 1.0}
"""
COMPOSE = """\
name: {name}
x-service: &service
  image: {image}
  init: true
  restart: unless-stopped
  stop_grace_period: 5s
  entrypoint: []
  environment: &environment
    PYTHONPATH: /src:/tests
    PATH: /standin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin
    PYTHONDONTWRITEBYTECODE: "1"
    WEIGHTKEEPER_ENGINE: engine
    WEIGHTKEEPER_APPLICATION: standin_model
  volumes: &volumes
    - {sources}:/src:ro
    - {tests}:/tests:ro
    - ./standin:/standin:ro
    - ./config:/config:ro
    - {model}:/model:ro
    - sockets:/run/weightkeeper
  healthcheck: {{disable: true}}
services:
  sidecar:
    <<: *service
    command: [weightkeeper, serve, --config, /config/engine.yaml, --loader, python3 /tests/publishing_loader.py]
    healthcheck: {{test: [CMD, weightkeeper, health], interval: 0.5s, timeout: 10s, retries: 20}}
  engine:
    <<: *service
    command: [weightkeeper, engine, --restart-delay, "0.05", --, --config, /config/engine.yaml]
    ports: ["127.0.0.1:{port}:8000"]
    labels: {{weightkeeper.supervise: "true"}}
  supervisor:
    <<: *service
    user: "0:0"
    command: [weightkeeper, supervise, --project-directory, {directory}, --state-dir, /tmp]
    volumes:
      - {sources}:/src:ro
      - {directory}:{directory}:ro
      - {model}:/model:ro
      - /var/run/docker.sock:/var/run/docker.sock
volumes:
  sockets:
"""
SCENARIOS = ("recreate", "reload", "server-crash", "config-edit", "sidecar-crash")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory):
    """A project that is up; removed afterwards."""
    directory = tmp_path_factory.mktemp("project")
    model = write(tmp_path_factory.mktemp("model"))
    for name in ("config", "standin"):
        (directory / name).mkdir()
    (directory / "config/engine.yaml").write_text(CONFIG)
    (directory / "standin/vllm").write_text('#!/bin/sh\nexec python3 /tests/standin_model.py "$@"\n')
    (directory / "standin/vllm").chmod(0o755)
    name = f"wkrecovery-{secrets.token_hex(4)}"
    places = {"sources": SOURCES, "tests": TESTS, "model": model, "directory": directory}
    (directory / "compose.yaml").write_text(COMPOSE.format(name=name, image=IMAGE, port=free_port(), **places))
    for one in (directory, model, *directory.iterdir(), *directory.glob("*/*")):
        one.chmod(0o755)  # whatever our umask is: the containers' user is another one
    try:
        compose(directory, "up", "-d", "--no-build", "--wait", "sidecar")
        compose(directory, "up", "-d", "--no-build")
        yield directory
    finally:
        compose(directory, "down", "--volumes", "--timeout", "2")


@pytest.fixture(scope="module")
def measured(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[result.Run, str]:
    """A run over all scenarios but the one that restarts Docker."""
    out = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "weightkeeper.cli", "recovery", "run", "--project", str(project), "-n", "1"]
    command += [
        "--scenarios",
        ",".join([*SCENARIOS, "docker-restart"]),
        "--throughput",
        "0",
        "--tokens",
        "8",
        "--steps",
        "12",
    ]
    done = subprocess.run(
        [*command, "--out", str(out / "out"), "--json", str(out / "run.json"), "--limit", "60"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return result.read(out / "run.json"), done.stdout


def compose(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["docker", "compose", *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_way_of_the_project_is_measured(measured):
    """Each comes back, with the agent's work whole; and it says that it was in containers."""
    run, out = measured
    assert {sample.scenario: sample.outcome for sample in run.samples} == dict.fromkeys((*SCENARIOS, "disk"), "right")
    assert run.subject.place == "compose" and run.control.caught
    assert "| config-edit   | 1 of 1 |" in out


def test_moments_and_phases_are_those_of_the_containers(measured):
    """In order, and with the launcher's own phases where there is one."""
    run, _ = measured
    for sample in run.samples:
        assert 0 <= sample.gone_s <= sample.right_s, sample.scenario
        assert sample.first_s <= sample.right_s
        pause = sample.agent.longest
        if sample.scenario != "sidecar-crash":
            assert pause.start <= sample.gone_s <= pause.start + pause.seconds + 0.01, sample.scenario
    samples = {sample.scenario: sample for sample in run.samples}
    for name in ("recreate", "reload", "server-crash", "config-edit"):
        assert "fork" in samples[name].phases and samples[name].memory.keeper_bytes == 1 << 20
    assert "server imported" in samples["disk"].phases and "fork" not in samples["disk"].phases


def test_what_was_not_allowed_or_has_no_form_in_containers_is_listed(measured):
    """With the option that would allow it."""
    run, _ = measured
    reasons = {each.name: each.reason for each in run.skipped}
    assert reasons["docker-restart"] == "was not allowed; --restart-docker COMMAND names what restarts Docker"
    assert reasons["ipc_cache"] == reasons["copy"] == "was not asked for"


def test_the_project_is_left_as_it_was_found(measured, project):
    """Its config file, its supervisor, and an engine by the project's own command that answers."""
    assert (project / "config/engine.yaml").read_text() == CONFIG
    running = json.loads("[" + ",".join(compose(project, "ps", "--format", "json").splitlines()) + "]")
    assert {each["Service"]: each["State"] for each in running} == dict.fromkeys(
        ("sidecar", "engine", "supervisor"), "running"
    )
    deadline = time.monotonic() + 120
    while json.loads(compose(project, "exec", "-T", "engine", "weightkeeper", "engine-status", "--json"))["state"] != (
        "ready"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
