"""An action from the plan to what is written down of it: real actor, keeper's side and record, on a stand-in Docker."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weightkeeper.errors import ServiceError
from weightkeeper.launcher.messages import Ended, EngineStatus
from weightkeeper.supervisor import inside, project
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.apply import Applier
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.engines import Engines
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.inside import Done
from weightkeeper.supervisor.keepers import POLICY_LABEL, Keeper
from weightkeeper.supervisor.loop import Settings, Supervisor
from weightkeeper.supervisor.plan import Action, Recreate, Reload, plan
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.project import Service, Snapshot
from weightkeeper.supervisor.state import State
from weightkeeper.supervisor.stop import Stop
from weightkeeper.supervisor.watch import Timing
from weightkeeper.supervisor.weights import Weights

LAUNCHER = "2026-11-30 04:52:57,001 INFO weightkeeper.launcher.generation: generation"
GONE = "has no container in the project t; make it with `docker compose up -d engine`"
DONE = Done(0, "done", "")


class Container:
    """A healthy one. `log` is pairs of a time and a line; `calls` is what Docker was asked to do with it."""

    def __init__(self, service: str, started: float) -> None:
        self.id, self.name = f"{service}-id", f"t-{service}-1"
        self.labels = {"com.docker.compose.service": service, project.LABEL: "true"}
        at = datetime.fromtimestamp(started, timezone.utc).replace(tzinfo=None).isoformat() + "Z"
        state = {"Status": "running", "StartedAt": at, "ExitCode": 0, "Health": {"Status": "healthy"}}
        self.attrs = {"State": state, "Config": {}, "HostConfig": {}}
        self.log: list[tuple[float, str]] = []
        self.calls: list[str] = []

    def reload(self) -> None:
        """What is known is true."""

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, timeout: int) -> None:
        self.calls.append("stop")

    def logs(self, since: float, tail: int) -> bytes:
        return "\n".join([line for at, line in self.log if at >= since][-tail:]).encode()


class Stand:
    """A project with one engine behind a launcher and its keeper.

    Attributes:
        answers: a word of a command in a container → what it ends with.
        asked: those words, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started = time.time() - 3600
        self.containers = {name: [Container(name, self.started)] for name in ("engine", "sidecar")}
        self.generation = 1
        self.answers: dict[str, Callable[[], Done | None]] = {
            "--check": lambda: DONE,
            "room": lambda: Done(0, '{"needed": 1, "free": 2}', ""),
            "release": lambda: DONE,
            "load": lambda: DONE,
            "engine-status": lambda: self.status("ready"),
            "engine-reload": self.reload,
            "status": lambda: Done(1, "", ""),
        }
        self.asked: list[str] = []
        self.begin()

    def begin(self) -> None:
        """A new supervisor."""
        self.stop = Stop()
        client = SimpleNamespace(containers=SimpleNamespace(list=self.listed))
        connection = SimpleNamespace(client=lambda: client, wait=lambda: None)
        self.engines = Engines("t", connection, self.stop)
        self.history = History(self.directory)
        self.actor = Actor(self.engines, connection, self.history, self.stop)
        weights = Weights(self.engines, self.actor, self.history, self.stop)
        self.state = State(self.directory, "t")
        self.applier = Applier(self.engines, self.actor, weights, self.state, self.history)

    def listed(self, filters: dict[str, list[str]], all: bool = False) -> list[Container]:
        service = filters["label"][1].partition("=")[2]
        return self.containers[service]

    def run(self, container: Container, command: list[str], limit_s: float, stop: Stop) -> Done | None:
        word = next(word for word in self.answers if word in command)
        self.asked.append(word)
        return self.answers[word]()

    def status(self, state: str, **more: Any) -> Done:
        status = EngineStatus("e", "1", state, 0.0, 1.0, 1, generation=self.generation, **more)
        return Done(0, msgspec.json.encode(status).decode(), "")

    def reload(self) -> Done:
        self.generation += 1
        return DONE

    def told_to_end(self) -> None:
        self.stop.set()

    def done(self) -> list[tuple[str, str]]:
        return [(one.action, one.result) for one in self.history.read()]

    def apply(self, snapshot: Snapshot, kind: type[Action] | None = None) -> str:
        """Carry out the one action that there is to do for this snapshot, as the supervisor does; how it ended."""
        self.applier.note(snapshot)
        self.applier.settle()
        [action] = self.applier.untried(plan(self.applier.now, snapshot), snapshot)
        self.applier.take(snapshot, {action.service})
        if kind:
            action = kind(action.service, action.cause)
        return self.applier.apply(action, snapshot, None)


@pytest.fixture
def stand(tmp_path, monkeypatch) -> Stand:
    one = Stand(tmp_path)
    monkeypatch.setattr(inside, "run", one.run)
    one.applier.begin(edited("bfloat16"))
    one.applier.take(edited("bfloat16"), ())
    return one


def edited(dtype: str, policy: str = "refuse") -> Snapshot:
    """The project with an engine whose weights are of this type."""
    path = Path("/p/engine.yaml")
    config = project.parse_config(path, f"model: /m\nload-format: weightkeeper\ndtype: {dtype}\n".encode())
    engine = Program(("weightkeeper",), "engine", ())
    keeper = Keeper("sidecar", Program(("weightkeeper",), "serve", ()), path)
    definition = {"image": "i", "labels": {project.LABEL: "true", POLICY_LABEL: policy}}
    return Snapshot("t", {"engine": Service("engine", definition, True, config, engine, keeper)}, {}, (), {"name": "t"})


@pytest.mark.parametrize("moment", ["--check", "room", "load", "engine-status", "engine-reload"])
def test_an_edit_that_was_not_decided_when_the_supervisor_ended_is_begun_again_by_the_next(stand, moment):
    """Whatever it waited for: it is neither written down as tried nor as applied."""
    before = stand.answers[moment]
    stand.answers[moment] = stand.told_to_end
    assert stand.apply(edited("half")) == "undecided"
    assert stand.done()[-1][1] == "undecided"
    assert stand.asked[-1] == moment
    stand.answers[moment] = before
    stand.begin()
    stand.applier.begin(edited("half"))
    assert stand.apply(edited("half")) == "good"
    assert stand.done()[-2:] == [("load", "done"), ("reload", "healthy")]
    assert plan(stand.applier.now, edited("half")) == []


def test_an_edit_is_not_begun_when_the_supervisor_has_been_told_to_end_between_load_and_reload(stand):
    """No launcher was asked for anything, so nothing counts as applied."""

    def loaded() -> Done:
        stand.told_to_end()
        return DONE

    stand.answers["load"] = loaded
    assert stand.apply(edited("half")) == "undecided"
    assert stand.done() == [("load", "done"), ("reload", "undecided")]
    assert "engine-reload" not in stand.asked
    assert (
        stand.state.read()["engine"].service(edited("half").services["engine"]) == edited("bfloat16").services["engine"]
    )


@pytest.mark.parametrize(
    ("state", "ended", "records"),
    [("ready", "good", [("reload", "healthy")]), ("broken", "kept", [("reload", "exited"), ("rollback", "healthy")])],
)
def test_a_server_that_was_still_starting_when_the_supervisor_ended_is_seen_to_by_the_next(
    stand, state, ended, records
):
    """It may never come up, and somebody has to roll it back then."""
    ready, reload = stand.answers["engine-status"], stand.answers["engine-reload"]

    def begun() -> Done:
        stand.answers["engine-status"] = starting
        return reload()

    def starting() -> Done:
        stand.told_to_end()
        return stand.status("starting")

    stand.answers["engine-reload"] = begun
    assert stand.apply(edited("half")) == "undecided"
    assert stand.done() == [("load", "done"), ("reload", "starting")]
    assert stand.state.read()["engine"].failed == ""

    def again() -> Done:
        died = Ended(stand.generation + 1, 9, 2.0, "crash: exit code 1", False)
        stand.answers["engine-status"] = ready
        if state == "broken":
            stand.answers["engine-status"] = lambda: stand.status("broken", last_exit=died)
            stand.answers["engine-reload"] = rolled_back
        return reload()

    def rolled_back() -> Done:
        stand.answers["engine-status"] = ready
        return reload()

    stand.answers |= {"engine-status": ready, "engine-reload": again}
    stand.begin()
    stand.applier.begin(edited("half"))
    assert stand.apply(edited("half")) == ended
    assert stand.done()[-len(records) :] == records


@pytest.mark.parametrize("policy", ["refuse", "swap"])
def test_a_file_that_changes_while_weights_are_loaded_for_it_is_looked_at_again(stand, tmp_path, policy):
    """The keeper may have read either, so nothing is reloaded for what was decided, and nothing is told of it."""
    path = tmp_path / "engine.yaml"
    before, decided = at(path, edited("bfloat16", policy)), at(path, edited("half", policy))
    stand.applier.begin(before)
    stand.applier.take(before, ())
    path.write_bytes(decided.services["engine"].config.text)
    if policy == "swap":
        stand.answers["room"] = lambda: Done(0, '{"needed": 2, "free": 1}', "")

    def load() -> Done:
        path.write_bytes(before.services["engine"].config.text)
        return DONE

    stand.answers["load"] = load
    assert stand.apply(decided) == "undecided"
    assert ("load", "undecided") in stand.done()
    assert "engine-reload" not in stand.asked
    assert plan(stand.applier.now, before) == []
    stand.asked.clear()
    assert stand.applier.restore_weights(before, ())
    assert "load" in stand.asked
    assert not stand.applier.restore_weights(before, ())


def at(path: Path, snapshot: Snapshot) -> Snapshot:
    """The same project with the config file of engine and keeper at this path."""
    service = snapshot.services["engine"]
    config, keeper = project.parse_config(path, service.config.text), replace(service.keeper, config=path)
    moved = replace(service, config=config, keeper=keeper)
    return replace(snapshot, services={"engine": moved})


def test_a_server_that_does_not_come_up_as_the_supervisor_ends_is_left_to_the_next_one(stand):
    """Nobody is there to roll it back, so it counts neither as applied nor as tried."""

    def reload() -> Done:
        stand.answers["engine-status"] = broken
        return DONE

    def broken() -> Done:
        stand.told_to_end()
        return stand.status("broken", last_exit=Ended(2, 9, 2.0, "crash: exit code 1", False))

    stand.answers["engine-reload"] = reload
    assert stand.apply(edited("half")) == "undecided"
    assert stand.done() == [("load", "done"), ("reload", "exited")]
    assert stand.asked.count("engine-reload") == 1
    assert plan(stand.applier.now, edited("half"))


def test_a_service_that_docker_refuses_to_show_is_said_and_ends_no_supervisor(tmp_path, caplog):
    """The others have their turn."""

    def apply(action: Action, *_: object) -> None:
        applied.append(action.service)
        raise ServiceError("Docker refused: server error")

    applied: list[str] = []
    supervisor = Supervisor(Settings(Compose(tmp_path), tmp_path, Timing(0.5, 5.0, 5.0, True)), Stop())
    supervisor._applier = SimpleNamespace(apply=apply)
    assert supervisor._act([Reload("a", "x"), Reload("b", "x")], {"a", "b"}, edited("half"))
    assert applied == ["a", "b"]
    assert caplog.messages.count("Docker refused: server error") == 2


def test_a_keeper_that_ends_with_the_supervisor_has_refused_nothing(stand):
    """`docker compose stop` ends both."""

    def ended() -> Done:
        stand.told_to_end()
        return Done(1, "", "weightkeeper: the connection broke off\n")

    for moment in ("load", "room"):
        stand.answers[moment] = ended
        assert stand.apply(edited("half")) == "undecided"
        assert stand.done()[-1] == ("load", "undecided")
        assert "engine" not in stand.applier._tried
        stand.begin()
        stand.applier.begin(edited("half"))


@pytest.mark.parametrize("moment", ["release", "load"])
def test_an_engine_that_was_stopped_for_other_weights_is_started_again_also_when_the_supervisor_ends(stand, moment):
    """And the edit is begun again by the next one."""
    stand.applier.take(edited("bfloat16", "swap"), ())
    stand.answers["room"] = lambda: Done(0, '{"needed": 2, "free": 1}', "")
    stand.answers[moment] = stand.told_to_end
    assert stand.apply(edited("half", "swap")) == "undecided"
    assert stand.containers["engine"][0].calls == ["stop", "start"]
    assert stand.state.read()["engine"].failed == ""


def test_docker_is_asked_to_start_a_container_though_the_supervisor_ends(stand):
    """A request that is on its way is not left to chance."""
    [container] = stand.containers["engine"]
    is_due, is_asked = threading.Event(), threading.Event()

    def start() -> None:
        is_due.wait(0.2)
        is_asked.set()

    container.start = start
    stand.told_to_end()
    stand.engines.start(container)
    assert is_asked.is_set()


def test_what_was_refused_is_tried_and_not_begun_again(stand):
    """The record says that it was checked, not that a reload was asked for; nothing is loaded for it."""
    stand.answers["--check"] = lambda: Done(2, "", "weightkeeper: dtype: halff is none\n")
    assert stand.apply(edited("halff")) == "kept"
    assert stand.done() == [("check", "refused")]
    assert stand.asked == ["--check", "engine-status"]
    stand.begin()
    stand.applier.begin(edited("halff"))
    assert stand.applier.untried(plan(stand.applier.now, edited("halff")), edited("halff")) == []


def test_weights_are_loaded_for_an_engine_without_a_container_and_the_missing_one_is_named(stand, caplog):
    """Once, without a try to roll back; whoever makes the container then finds the weights that its file asks for."""
    stand.containers["engine"] = []
    assert stand.apply(edited("half")) == "bad"
    assert stand.done() == [("load", "done"), ("reload", "failed")]
    assert f"engine reload failed: engine {GONE}" in caplog.messages
    assert not any("roll back" in message for message in caplog.messages)
    stand.containers["engine"] = [Container("engine", time.time())]
    stand.applier.settle()
    assert plan(stand.applier.now, edited("half")) == []


def test_nothing_is_recreated_where_there_is_no_container(stand, caplog):
    """Who ended it wants it down."""
    stand.containers["engine"] = []
    assert stand.apply(edited("half"), Recreate) == "bad"
    assert stand.done() == [("recreate", "failed")]
    assert [message for message in caplog.messages if "recreate" in message] == [
        f"engine recreate failed: engine {GONE}"
    ]
    assert not any("roll back" in message for message in caplog.messages)


def test_weights_are_swapped_for_an_engine_without_a_container(stand):
    """There is nothing to stop; that there is nothing to reload either is said."""
    stand.applier.take(edited("bfloat16", "swap"), ())
    stand.containers["engine"] = []
    stand.answers["room"] = lambda: Done(0, '{"needed": 2, "free": 1}', "")
    assert stand.apply(edited("half", "swap")) == "bad"
    assert stand.done() == [("load", "done"), ("reload", "failed")]


def test_a_launcher_that_knows_no_check_is_not_asked_for_one_and_the_remedy_is_named(stand, caplog):
    """Its image is older; the weights are loaded and it is reloaded, as before there was a check."""
    command = [sys.executable, "-m", "weightkeeper.cli", "engine-reload", "--chek"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    stand.answers["--check"] = lambda: Done(done.returncode, done.stdout, done.stderr)
    assert stand.apply(edited("half")) == "good"
    assert stand.done() == [("load", "done"), ("reload", "healthy")]
    [message] = [one for one in caplog.messages if "cannot be asked" in one]
    assert message.startswith("t-engine-1 cannot be asked to check its configuration first: t-engine-1: Error: No such")
    assert message.endswith("is older than this one; make it anew with `make images` and recreate the container)")


def test_an_edit_whose_rollback_does_not_come_up_either_is_told_as_tried_in_vain(stand):
    """The launcher goes on with the last good configuration by itself, so the edit is not what serves then."""

    def reload() -> Done:
        stand.generation += 1
        dead = Ended(stand.generation, 9, 2.0, "crash: exit code 1", False)
        stand.answers["engine-status"] = lambda: stand.status("broken", last_exit=dead)
        return DONE

    stand.answers["engine-reload"] = reload
    assert stand.apply(edited("half")) == "kept"
    assert stand.done() == [("load", "done"), ("reload", "exited"), ("rollback", "exited")]
    left = plan(stand.applier.now, edited("half"))
    assert [action.service for action in left] == ["engine"]
    assert stand.applier.untried(left, edited("half")) == []


def test_an_edit_whose_container_is_made_anew_during_its_reload_counts_as_applied(stand, caplog):
    """The new container has read the file, whatever became of the question to the old one; as soon as it is started."""
    caplog.set_level("INFO")
    [old] = stand.containers["engine"]
    new = Container("engine", time.time() + 1)
    started, new.attrs["State"]["StartedAt"] = new.attrs["State"]["StartedAt"], "0001-01-01T00:00:00Z"

    def reload() -> Done:
        stand.containers["engine"] = [old, new]  # as Compose has them for a moment
        return Done(137, "", "")

    stand.answers["engine-reload"] = reload
    assert stand.apply(edited("half")) == "kept"
    assert stand.done() == [("load", "done"), ("reload", "failed")]
    for containers in ([old, new], [old], [new], []):
        stand.containers["engine"] = containers
        assert not stand.applier.is_started_anew()
    stand.containers["engine"] = [new]
    new.attrs["State"]["StartedAt"] = started
    assert stand.applier.is_started_anew()
    stand.applier.settle()
    assert not stand.applier.is_started_anew()
    assert "engine: what was tried in vain was read since, and counts as applied" in caplog.messages
    assert plan(stand.applier.now, edited("half")) == []


def test_a_definition_whose_rollback_does_not_come_up_either_is_told_as_tried_in_vain(stand, monkeypatch):
    """The containers that are there are those of the last good definition."""
    dead = Container("engine", time.time())
    dead.attrs["State"] |= {"Status": "exited", "ExitCode": 3}
    dead.client = SimpleNamespace(events=lambda **_: iter(()))
    made = []
    monkeypatch.setattr(stand.engines, "recreate", lambda name, compose, resolved: made.append(resolved) or [dead])
    assert stand.actor.recreate(Recreate("engine", "x"), None, {"services": {}}) == "kept"
    assert made == [None, {"services": {}}]
    assert stand.done() == [("recreate", "exited"), ("rollback", "exited")]


@pytest.mark.parametrize(
    ("said", "shown"), [((), "with exit code 1"), (("MemoryError",), "with exit code 1 (MemoryError)")]
)
def test_the_error_of_the_server_that_was_replaced_is_not_told_as_that_of_the_new_one(stand, said, shown):
    """The old one's end is in the log, too, after the action began."""
    [container] = stand.containers["engine"]

    def reload() -> Done:
        lines = "ValueError: of the old one", f"{LAUNCHER} 2: starts (reload: x)", *said
        container.log = [(time.time(), line) for line in lines]
        dead = Ended(2, 9, 2.0, "crash: exit code 1", False)
        stand.answers["engine-status"] = lambda: stand.status("broken", last_exit=dead)
        return DONE

    stand.answers["engine-reload"] = reload
    launcher = edited("half").services["engine"].launcher
    assert stand.actor.reload(Reload("engine", "x"), launcher, is_rolled_back=False) == "bad"
    assert stand.history.read()[-1].detail == shown


def test_a_container_that_ran_already_is_told_with_the_reason_why_it_reads_from_disk(stand):
    """Its line was logged at its start, and not since it was asked to start."""
    [container] = stand.containers["engine"]
    container.log = [
        (stand.started - 9, "weightkeeper: fallback to disk, code=old: of the start before"),
        (stand.started + 9, "weightkeeper: fallback to disk, code=timeout: it loads"),
    ]
    assert stand.actor.start(Action("engine", "x")) == "good"
    assert stand.history.read()[-1].detail == "weights from disk, code=timeout: it loads"


def test_a_fallback_of_a_server_that_was_replaced_is_not_told_of_the_one_that_serves(stand):
    """A launcher's servers share one log."""
    [container] = stand.containers["engine"]
    fallback = "weightkeeper: fallback to disk, code=timeout: it loads"
    container.log = [(stand.started + 9, line) for line in (fallback, f"{LAUNCHER} 2: starts (reload: x)")]
    assert stand.actor.start(Action("engine", "x")) == "good"
    assert stand.history.read()[-1].detail == ""
