"""What restarts the Docker engine of a measured project may start that engine itself."""

import shlex
import socket
import sys
from pathlib import Path

import pytest
from keepers import wait_for

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery import processes
from weightkeeper.recovery.composed import ComposedBench
from weightkeeper.recovery.composed_scenarios import DockerRestart

DAEMON = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
STARTS = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {DAEMON!r}, sys.argv[1]], start_new_session=True).returncode = 0
"""
"""It has the pipe of our stderr as the command had it."""


def bench(command: str) -> ComposedBench:
    """One without a project, whose engine does not answer."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    made = object.__new__(ComposedBench)
    made.restart_docker, made.port = command, port
    return made


def test_a_docker_engine_that_the_command_starts_outlives_the_benchmark(tmp_path: Path, monkeypatch):
    """At its end the benchmark ends every process that carries its mark; where there is no systemd, dockerd is a child
    of the command."""
    monkeypatch.setenv(processes.MARK, "of this run")
    started = tmp_path / "daemon"
    DockerRestart().interrupt(bench(shlex.join([sys.executable, "-c", STARTS, str(started)])))
    wait_for(lambda: started.exists() and started.read_text(), "the daemon")
    pid = int(started.read_text())
    try:
        processes.kill_marked("of this run")
        assert pid not in processes.marked("of this run")
        assert pid in processes.family(pid)
    finally:
        processes.kill_family(pid)


def test_a_command_that_fails_is_named_with_its_words():
    """And its exit code."""
    with pytest.raises(ServerStartError, match=r"ended with exit code 3: no such engine"):
        DockerRestart().interrupt(bench("sh -c 'echo no such engine >&2; exit 3'"))
