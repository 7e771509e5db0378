"""Random deaths and requests, in any order: at the end one server answers and nothing is left of the others."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from keepers import wait_for
from launchers import LauncherProcess, launcher

from weightkeeper.errors import WeightkeeperError
from weightkeeper.launcher import client

ACTIONS = (
    "server",
    "core",
    "worker",
    "template",
    "warden",
    "reload",
    "restart",
    "hangup",
    "refused",
    "variable",
    "nothing",
)


def act(engine: LauncherProcess, action: str, number: int) -> None:
    """One blow to whatever is there at this moment."""
    status = engine.status()
    pids = sorted(status.processes) if status else []
    victims = {
        "server": pids[:1],
        "core": pids[1:2],
        "worker": pids[2:3],
        "template": [status.template] if status else [],
        "warden": [status.warden] if status else [],
    }
    with suppress(ProcessLookupError, WeightkeeperError):
        for pid in victims.get(action, []):
            if pid:
                os.kill(pid, signal.SIGKILL)
        if action == "reload":
            engine.edit(answer=str(number))
            client.reload(engine.socket_dir, "e", timeout_s=30)
        elif action == "refused":
            engine.edit(refuse="no")
            engine.send(signal.SIGHUP)
        elif action == "restart":
            client.restart(engine.socket_dir, "e")
        elif action == "hangup":
            engine.send(signal.SIGHUP)
        elif action == "variable":
            (engine.directory / "variables").write_text(f"NUMBER={number}\n")
            engine.send(signal.SIGHUP)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_the_engine_comes_back(seed):
    """With a right answer from a whole tree, one template, and no process, directory or zombie of earlier servers."""
    engine = LauncherProcess()
    variables = engine.directory / "variables"
    variables.write_text("")
    engine.options = ("--env-file", str(variables), "--restart-delay-max", "0.1")
    draw = random.Random(seed)
    try:
        engine.start()
        engine.ready()
        for number in range(25):
            act(engine, draw.choice(ACTIONS), number)
            time.sleep(draw.choice((0, 0, 0.01, 0.05, 0.2)))
        engine.edit(answer="last")
        wait_for(lambda: reloaded(engine), "a reload that is accepted")
        facts = wait_for(lambda: answer(engine, "last"), "the last configuration answers")
        status = wait_for(lambda: whole(engine, facts), f"a whole tree; {engine.text()}")
        known = {status.launcher, status.warden, status.template, *status.processes}
        wait_for(lambda: {each.pid for each in engine.left()} == known, "nobody else")
        (private,) = engine.temporary.iterdir()
        assert {path.name for path in private.glob("generation-*")} == {f"generation-{status.generation}"}
        assert len(list(private.glob("config-*"))) == 1
        assert "Traceback" not in engine.text(), engine.text()
        assert engine.end() == 0
        assert not engine.left() and not list(engine.temporary.iterdir())
    finally:
        engine.close()


def reloaded(engine: LauncherProcess) -> bool:
    with suppress(WeightkeeperError):
        return bool(client.reload(engine.socket_dir, "e", timeout_s=30))
    return False


def answer(engine: LauncherProcess, text: str) -> dict | None:
    with suppress(OSError):
        facts = engine.facts()
        return facts if facts["answer"] == text else None
    return None


def whole(engine: LauncherProcess, facts: dict):
    status = engine.status()
    parts = {facts["pid"], facts["core"], facts["worker"]}
    is_whole = status.state == "ready" and set(status.processes) == parts and status.template and status.warden
    return status if is_whole else None


@pytest.mark.parametrize("state", ["warming", "ready", "ending"])
def test_a_launcher_that_is_killed_leaves_nothing_to_the_next(state):
    """In any state: the next launcher of the same name, on the same port, starts at once and cleans up."""
    engine = LauncherProcess(drain=0.3)
    try:
        for _ in range(3):
            engine.start()
            if state != "warming":
                engine.ready()
            if state == "ending":
                engine.send(signal.SIGHUP)
                engine.wait_for_state("reloading")
            engine.process.kill()
            engine.wait()
            wait_for(lambda: not engine.left(), "the end of everything")
        engine.start()
        engine.ready()
        assert engine.end() == 0
        assert not list(engine.temporary.iterdir())
        assert not list(Path(engine.socket_dir).rglob("*.sock"))
    finally:
        engine.close()


def test_a_server_that_dies_again_and_again_while_it_answers_is_never_given_up():
    """It became healthy each time, so the delays grow and nothing is broken."""
    with launcher() as engine:
        for generation in range(1, 9):
            os.kill(engine.ready(generation)["pid"], signal.SIGKILL)
        engine.ready(9)
        assert engine.status().restarts == {"crash": 8}
