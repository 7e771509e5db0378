"""How supervision begins and ends, and what it survives: each test has a project and a supervisor of its own."""

import contextlib
import os
import re
import signal
import socket
import threading
from pathlib import Path

import pytest
from stand import ENGINE, SOCKET, by_rename, run, until

pytestmark = pytest.mark.docker

RELOAD = "reload engine: engine.yaml max-model-len 2048 → 1024"
HEALTHY = "engine healthy S after reload"
EDITED = ENGINE.replace("2048", "1024")


def test_what_was_edited_while_no_supervisor_ran_is_applied_when_one_begins(prepared):
    """Of both kinds, once; what was not edited is left alone, and a supervisor that begins anew does nothing."""
    prepared.up()
    prepared.supervise()
    assert prepared.end() == 0
    start = prepared.start_of()
    prepared.supervise()
    prepared.mark()
    assert prepared.history() == []
    assert prepared.end() == 0
    by_rename(prepared.engine_yaml, EDITED)
    prepared.supervise()
    until(lambda: prepared.messages() == [RELOAD, HEALTHY], lambda: prepared.log.read_text())
    assert prepared.start_of() == start
    assert prepared.end() == 0
    prepared.compose_yaml.write_text(prepared.compose_yaml.read_text().replace("-one", "-two"))
    prepared.supervise()
    until(lambda: len(prepared.messages()) == 2, lambda: prepared.log.read_text())
    assert prepared.messages() == ["recreate engine: environment LEVEL", "engine healthy S after recreate"]
    assert prepared.done() == [("reload", "healthy"), ("recreate", "healthy")]


def test_what_was_tried_in_vain_is_not_tried_again_by_the_next_supervisor(prepared):
    """Until the file changes."""
    prepared.up()
    prepared.supervise()
    prepared.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    prepared.expect("engine goes on as it is: ")
    until(lambda: "tried already" in prepared.weightkeeper("plan").stdout, "it is written down as tried")
    prepared.end()
    prepared.supervise()
    (prepared.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    prepared.expect("nothing to do: engine.env changed, no value did")
    assert prepared.done() == [("reload", "refused")]
    prepared.engine_yaml.write_text(ENGINE.replace("2048", "-1") + "# once more\n")
    until(lambda: prepared.done() == [("reload", "refused")] * 2, "a changed file is tried again")


def test_a_container_made_with_another_environment_is_not_recreated(prepared):
    """Compose would silently give it other values: refused with the names, until they are in `.env`."""
    prepared.up(LEVEL="theirs")
    prepared.supervise()
    said = f"its container {prepared.name}-engine-1 was made with other values than Compose resolves here"
    assert f"engine: {said} (environment LEVEL); put them into .env" in prepared.log.read_text()
    start = prepared.start_of()
    (prepared.directory / "engine.env").write_text("A=1\nB=3\n")
    prepared.expect("engine goes on as it is: its container")
    assert prepared.start_of() == start
    prepared.engine_yaml.write_text(EDITED)
    prepared.end()
    (prepared.directory / ".env").write_text("LEVEL=theirs\n")
    (prepared.directory / "engine.env").write_text("A=1\nB=2\n")
    prepared.supervise()
    (prepared.directory / "engine.env").write_text("A=1\nB=3\n")
    prepared.expect("engine healthy")
    until(lambda: prepared.done()[-1] == ("recreate", "healthy"), lambda: prepared.log.read_text())
    assert "LEVEL=theirs" in prepared.inspect()["Config"]["Env"]


def test_a_container_that_somebody_recreated_already_is_left(prepared):
    """`docker compose up` by hand right after the edit: one recreation, theirs."""
    prepared.up()
    prepared.supervise("--settle", "3")
    prepared.compose_yaml.write_text(prepared.compose_yaml.read_text().replace("-one", "-two"))
    prepared.up()
    start = prepared.start_of()
    prepared.expect("engine: its container is made from these files already")
    assert prepared.start_of() == start


def test_a_container_of_no_service_is_named(prepared):
    """And left alone."""
    prepared.up()
    labels = [f"com.docker.compose.project={prepared.name}", "com.docker.compose.service=former"]
    labels += ["weightkeeper.supervise=true", "com.docker.compose.oneoff=False"]
    image = prepared.inspect()["Config"]["Image"]
    options = [part for label in labels for part in ("--label", label)]
    name = f"{prepared.name}-former-1"
    run("docker", "run", "--detach", "--name", name, *options, image, "sleep", "100")
    try:
        prepared.supervise()
        line = f"{name} is no service of the project any more; end it with `docker rm -f {name}`"
        assert line in prepared.log.read_text()
        assert prepared.inspect("former")["State"]["Running"]
    finally:
        run("docker", "rm", "--force", name)


def test_a_swapped_link_is_exactly_one_reload(prepared):
    """engine.yaml → ..data/engine.yaml, and ..data goes to a new dated directory."""
    config = prepared.engine_yaml.parent
    prepared.engine_yaml.unlink()
    for name, length in (("..2026-01-01", "2048"), ("..2026-01-02", "1024")):
        (config / name).mkdir()
        (config / name / "engine.yaml").write_text(ENGINE.replace("2048", length))
    (config / "..data").symlink_to("..2026-01-01")
    prepared.engine_yaml.symlink_to("..data/engine.yaml")
    prepared.up()
    prepared.supervise()
    before = [prepared.start_of(service) for service in ("engine", "sidecar", "unlabelled")]
    (config / "..data_tmp").symlink_to("..2026-01-02")
    (config / "..data_tmp").replace(config / "..data")
    prepared.only(RELOAD, HEALTHY)
    assert prepared.options()["max-model-len"] == "1024"
    assert [prepared.start_of(service) for service in ("engine", "sidecar", "unlabelled")] == before
    assert prepared.engine()["generation"] == 2
    assert prepared.done() == [("reload", "healthy")]


def test_polling_applies_a_change_too(prepared):
    """Where a file system sends no events."""
    prepared.up()
    prepared.supervise("--poll")
    by_rename(prepared.engine_yaml, EDITED)
    prepared.only(RELOAD, HEALTHY)


def test_a_project_that_cannot_be_read_at_the_start_is_waited_for(prepared):
    """The engines run on, and supervision begins with the right file."""
    prepared.up()
    text = prepared.compose_yaml.read_text()
    prepared.compose_yaml.write_text("services: [\n")
    prepared.begin()
    until(lambda: prepared.log.exists() and "keep every engine" in prepared.log.read_text(), "the fault is said")
    prepared.compose_yaml.write_text(text)
    prepared.expect("supervising ")
    prepared.engine_yaml.write_text(EDITED)
    prepared.expect("engine healthy")


def test_it_ends_at_once_while_it_follows_an_engine(prepared):
    """Exit code 0, and the reload is on record as it stood."""
    prepared.up()
    prepared.supervise()
    prepared.engine_yaml.write_text(ENGINE + "start-delay: 300\n")
    prepared.expect("reload engine: ")
    until(lambda: prepared.engine()["state"] == "starting", "the new server starts")
    assert prepared.end() == 0
    assert prepared.messages()[-1] == "ended"
    [record] = prepared.history()
    assert (record["result"], record["detail"]) == ("starting", "the supervisor was told to end")


def test_a_server_that_does_not_come_up_is_rolled_back_also_when_the_supervisor_was_replaced_meanwhile(prepared):
    """The next one begins the reload again, since nobody saw what became of it."""
    prepared.up()
    prepared.supervise()
    prepared.engine_yaml.write_text(ENGINE + "crash: true\nstart-delay: 3\n")
    prepared.expect("reload engine: ")
    until(lambda: prepared.engine()["state"] == "starting", "the new server starts")
    assert prepared.end() == 0
    prepared.supervise()
    prepared.expect("roll back engine to the last configuration that was healthy")
    until(lambda: ("rollback", "healthy") in prepared.done(), "the rollback is on record")
    assert prepared.engine()["state"] == "ready"


def test_a_stop_by_hand_is_no_crash_and_an_edit_does_not_undo_it(prepared):
    """Who stopped an engine wants it down."""
    prepared.up()
    prepared.supervise()
    run("docker", "stop", f"{prepared.name}-engine-1")
    prepared.engine_yaml.write_text(EDITED)
    line = f"engine left down: {prepared.name}-engine-1 is stopped; the change counts when it is started by hand"
    prepared.only(RELOAD, line)
    prepared.compose_yaml.write_text(prepared.compose_yaml.read_text().replace("-one", "-two"))
    prepared.expect("engine left down: it is stopped")
    assert prepared.inspect()["State"]["Status"] == "exited"
    assert prepared.done() == [("reload", "skipped"), ("recreate", "skipped")]


class Proxy:
    """A way to Docker's socket that a test cuts and mends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: list[socket.socket] = []

    def start(self) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen()
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def stop(self) -> None:
        self.path.unlink()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(SOCKET)
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_lost_docker_is_said_and_the_change_is_applied_when_it_is_back(prepared):
    """Once, not more; and what crashed meanwhile is said."""
    prepared.up()
    with_proxy = Proxy(prepared.directory.parent / "p.sock")
    with_proxy.start()
    prepared.supervise(DOCKER_HOST=f"unix://{with_proxy.path}")
    with_proxy.stop()
    prepared.expect("Docker does not answer: ")
    generation = prepared.engine()["generation"]
    prepared.engine_yaml.write_text(EDITED)
    prepared.expect(RELOAD)
    with_proxy.start()
    prepared.expect("Docker answers again after ")
    until(lambda: HEALTHY in prepared.messages(), lambda: prepared.log.read_text())
    assert prepared.options()["max-model-len"] == "1024"
    assert prepared.done() == [("reload", "healthy")]
    assert prepared.engine()["generation"] == generation + 1
    lines = prepared.messages()
    assert sum(line.startswith("Docker does not answer") for line in lines) == 1
    os.kill(prepared.inspect()["State"]["Pid"], signal.SIGKILL)
    prepared.expect("engine went down by itself: exit code 137 (SIGKILL)")
    prepared.close()
    with_proxy.stop()


def test_the_state_directory_is_checked_at_the_start(prepared):
    """Before anything is supervised: exit code 2 and the path."""
    prepared.state.write_text("a file")
    done = prepared.weightkeeper("supervise")
    assert done.returncode == 2
    assert re.search(re.escape(str(prepared.state)), done.stderr)


ROLLED_BACK = "roll back engine to the last configuration that was healthy: the new one did not come up"


def test_a_configuration_that_does_not_come_up_is_rolled_back_once(prepared):
    """The check passes and the server ends: the last good one serves again, the file is not touched, an edit counts."""
    prepared.up()
    prepared.supervise()
    crashing = EDITED + "crash: true\nwords: 'ValueError: there is no room for it'\n"
    prepared.engine_yaml.write_text(crashing)
    until(lambda: len(prepared.done()) == 2, lambda: prepared.log.read_text())
    assert prepared.done() == [("reload", "exited"), ("rollback", "healthy")]
    assert prepared.options()["max-model-len"] == "2048"
    assert prepared.engine_yaml.read_text() == crashing
    (prepared.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    prepared.expect("nothing to do: engine.env changed, no value did")
    prepared.engine_yaml.write_text(EDITED)
    until(lambda: prepared.messages()[-1:] == [HEALTHY], lambda: prepared.log.read_text())
    assert prepared.messages() == [
        "reload engine: engine.yaml max-model-len 2048 → 1024, crash (unset) → true, "
        "words (unset) → ValueError: there is no room for it",
        "engine exited with exit code 3 (ValueError: there is no room for it) S after reload: "
        f"see docker logs {prepared.start_of()[0][:12]}",
        ROLLED_BACK,
        "engine healthy S after rollback",
        "nothing to do: engine.env changed, no value did",
        RELOAD,
        HEALTHY,
    ]


def test_an_engine_that_reads_its_weights_from_disk_is_healthy_with_the_reason_said(prepared):
    """In the log and in the history; the next start without one is told without."""
    prepared.up()
    prepared.supervise()
    prepared.engine_yaml.write_text(EDITED + "words: 'weightkeeper: fallback to disk, code=timeout: it loads'\n")
    said = f"{HEALTHY} (weights from disk, code=timeout: it loads)"
    until(lambda: prepared.messages()[-1:] == [said], lambda: prepared.log.read_text())
    assert prepared.history()[-1]["detail"] == "weights from disk, code=timeout: it loads"
    prepared.engine_yaml.write_text(EDITED)
    until(lambda: prepared.messages()[-1:] == [HEALTHY], lambda: prepared.log.read_text())


def test_what_was_rolled_back_and_then_started_by_docker_is_undone_by_the_right_file(prepared):
    """A container that starts by itself reads the wrong file; the engine is up once the file is right."""
    prepared.up()
    prepared.supervise()
    prepared.engine_yaml.write_text(EDITED + "crash: true\n")
    prepared.expect("engine healthy")
    os.kill(prepared.inspect()["State"]["Pid"], signal.SIGKILL)
    prepared.expect("engine went down by itself: ")
    prepared.engine_yaml.write_text(ENGINE + "# right again\n")
    until(
        lambda: prepared.messages()[-1].startswith("engine healthy") and prepared.options()["max-model-len"] == "2048",
        lambda: prepared.log.read_text(),
    )
    assert "crash" not in prepared.options()
