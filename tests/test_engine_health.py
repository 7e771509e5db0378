"""The health check of the engine's container, as a program beside a launcher with the stand-in for vLLM's server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from keepers import wait_for
from launchers import LauncherProcess

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "images/engine/engine-health"


@pytest.fixture
def engine(tmp_path) -> Iterator[LauncherProcess]:
    made = LauncherProcess()
    yield made
    made.close()


def check(engine: LauncherProcess, directory: Path) -> subprocess.Popen[str]:
    """Begin one check, with our commands on its path as in the image."""
    command = directory / "weightkeeper"
    if not command.exists():
        command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}/sidecar exec {sys.executable} -m weightkeeper.cli "$@"\n')
        command.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    own = {"PATH": path, "WEIGHTKEEPER_ENGINE": "e", "WEIGHTKEEPER_SOCKET_DIR": engine.socket_dir}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", PROGRAM, str(engine.port)],
        env=os.environ | own, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def outcome(checking: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said of what is wrong."""
    said = checking.communicate(timeout=60)[1]
    return checking.returncode, said


def test_a_first_start_that_goes_on_is_waited_for(engine, tmp_path):
    """From before there is a launcher to the first answer: one check, which ends well."""
    gate = tmp_path / "gate"
    gate.touch()
    engine.edit(hang=str(gate))
    checking = check(engine, tmp_path)
    engine.start()
    engine.wait_for_state("starting", 1)
    assert checking.poll() is None
    gate.unlink()
    assert outcome(checking) == (0, "")
    assert engine.status().restarts == {}


def test_servers_that_never_come_up_fail_it_at_once_with_the_cause(engine, tmp_path):
    """The check that was there from the first death on ends when the launcher gives up."""
    engine.edit(crash=3)
    engine.start()
    wait_for(lambda: (now := engine.status()) and now.generation >= 1, "the first server")
    checking = check(engine, tmp_path)
    assert outcome(checking) == (1, "the engine is broken: exit code 3\n")
    assert engine.status().state == "broken"


def test_a_server_that_was_healthy_and_is_not_fails_it(engine, tmp_path):
    """Whatever its launcher does meanwhile: a client would get no answer."""
    marker = tmp_path / "marker"
    engine.edit(crash_while=str(marker))
    engine.start()
    assert engine.ready()
    assert outcome(check(engine, tmp_path)) == (0, "")
    marker.touch()
    os.kill(engine.status().pid, 9)
    wait_for(lambda: engine.status().generation >= 3, "servers that do not come up")
    code, said = outcome(check(engine, tmp_path))
    assert code == 1
    assert said.startswith(("nothing answers on port", "the engine is broken: exit code 3"))


def test_without_a_launcher_only_a_server_that_is_not_there_yet_is_waited_for(engine, tmp_path):
    """Somebody may run another program in the image: what listens and does not answer fails."""
    import socket

    checking = check(engine, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        checking.communicate(timeout=3)
    with socket.create_server(("127.0.0.1", engine.port)):
        assert outcome(checking) == (1, f"nothing answers on port {engine.port}: timed out\n")
