"""The supervisor on real containers: a stand-in engine that starts in a second, a sidecar and one more service.

Each test says what has to happen; the fixture checks after each that sidecar and other service were never touched.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.docker

DEADLINE = 60.0
"""Seconds for anything that has to happen; on a quiet machine it takes one to five."""

STANDIN = Path(__file__).parent / "standin"
IMAGE = "weightkeeper-standin:test"
SOCKET = "/var/run/docker.sock"

COMPOSE = """\
name: {name}
x-stand-in: &stand-in
  image: {image}
  restart: unless-stopped
  stop_grace_period: 5s
services:
  engine:
    <<: *stand-in
    healthcheck:
      test: [CMD, bash, -c, ": </dev/tcp/127.0.0.1/8000"]
      interval: 0.5s
      timeout: 3s
      retries: 3
      start_period: 60s
    command: [--config, /config/engine.yaml]
    environment:
      LEVEL: ${{LEVEL:-one}}
    env_file: engine.env
    volumes: ["./config:/config:ro"]
    labels:
      weightkeeper.supervise: "true"
  sidecar:
    <<: *stand-in
    environment:
      SIDE: one
  unlabelled:
    <<: *stand-in
    command: [--config, /config/engine.yaml]
    volumes: ["./config:/config:ro"]
"""

ENGINE = "# an engine\nmodel: /model\nmax-model-len: 2048\n"


def run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def until(look: Callable[[], Any], what: Callable[[], str] | str) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (found := look()):
        text = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {DEADLINE:.0f} s: {text}"
        time.sleep(0.05)
    return found


class Stand:
    """One compose project with its supervisor.

    Attributes:
        directory: of the project.
        engine_yaml: the file that the engine reads.
        compose_yaml: the project's own.
        log: the supervisor's standard error.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = f"wkstand-{uuid.uuid4().hex[:8]}"
        self.engine_yaml = directory / "config" / "engine.yaml"
        self.compose_yaml = directory / "compose.yaml"
        self.engine_yaml.parent.mkdir()
        self.engine_yaml.write_text(ENGINE)
        self.compose_yaml.write_text(COMPOSE.format(name=self.name, image=IMAGE))
        (directory / "engine.env").write_text("A=1\nB=2\n")
        self.log = directory.parent / "supervisor.log"
        self._supervisor: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        run("docker", "compose", "--project-directory", self.directory, "up", "--detach", "--wait")

    def down(self) -> None:
        run("docker", "compose", "--project-name", self.name, "down", "--volumes", "--timeout", "1")

    def supervise(self, *options: str, **environment: str) -> None:
        with self.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "weightkeeper.cli", "supervise", *self._options(), *options],
                stderr=log,
                env=os.environ | environment,
            )
        self.expect(f"supervising {self.name} in {self.directory}: engine ({self.engine_yaml})")

    def end(self) -> int:
        """End the supervisor as `docker stop` does; its exit code."""
        self._supervisor.send_signal(signal.SIGTERM)
        return self._supervisor.wait(timeout=DEADLINE)

    def close(self) -> None:
        if self._supervisor and self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()

    def weightkeeper(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = self._options() if verb == "restart" else self._options()[2:]
        command = [sys.executable, "-m", "weightkeeper.cli", verb, *arguments, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)

    def _options(self) -> list[str]:
        return ["--project-directory", str(self.directory), "--state-dir", str(self.directory.parent / "state")]

    def messages(self) -> list[str]:
        """What the supervisor logged after it had begun, with all seconds as `S`."""
        begun = self.log.read_text().partition("supervising ")[2].splitlines()[1:]
        return [re.sub(r"\b\d+\.\d s\b", "S", line.split(": ", 1)[1]) for line in begun]

    def expect(self, text: str) -> None:
        """Wait for a line of the log that begins like this."""

        def look() -> bool:
            assert self._supervisor.poll() is None, self.log.read_text()
            return any(line.split(": ", 1)[-1].startswith(text) for line in self.log.read_text().splitlines())

        until(look, lambda: f"{text!r} in\n{self.log.read_text()}")

    def only(self, *messages: str) -> None:
        """Nothing but these lines was logged, and nothing more comes: a last edit without effect is answered next."""
        self.expect(messages[-1].split(" S ")[0]) if messages else None
        with self.engine_yaml.open("a") as file:
            file.write("# mark\n")
        self.expect("nothing to do: engine.yaml changed, no value did")
        assert self.messages() == [*messages, "nothing to do: engine.yaml changed, no value did"]

    def inspect(self, service: str = "engine") -> dict[str, Any]:
        return json.loads(run("docker", "inspect", f"{self.name}-{service}-1"))[0]

    def start_of(self, service: str = "engine") -> tuple[str, str]:
        """Container id and start time."""
        description = self.inspect(service)
        return description["Id"], description["State"]["StartedAt"]

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.weightkeeper("history", "--json").stdout.splitlines()]

    def options(self) -> str:
        """What the running engine has read."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/health').read().decode())"
        return run("docker", "exec", f"{self.name}-engine-1", "python3", "-c", script)


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """The stand-in's image, on the project's own base."""
    bases = [os.environ.get("BASE_IMAGE", ""), "weightkeeper-base:local", "weightkeeper-supervisor:local"]
    there = [base for base in bases if base and run("docker", "images", "--quiet", base)]
    assert there, f"none of the images {bases} is here; scripts/base-image makes one"
    run("docker", "build", "--quiet", "--build-arg", f"BASE_IMAGE={there[0]}", "--tag", IMAGE, STANDIN)
    yield IMAGE
    run("docker", "rmi", "--force", IMAGE)


@pytest.fixture
def prepared(tmp_path: Path, image: str) -> Iterator[Stand]:
    """A project whose files can still be changed before it is started."""
    directory = tmp_path / "project"
    directory.mkdir()
    one = Stand(directory)
    try:
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture
def stand(prepared: Stand) -> Iterator[Stand]:
    """A running project under supervision. Afterwards, what is not supervised has the id and start it had before."""
    prepared.up()
    before = [prepared.start_of(service) for service in ("sidecar", "unlabelled")]
    prepared.supervise()
    yield prepared
    assert [prepared.start_of(service) for service in ("sidecar", "unlabelled")] == before


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    new = path.with_name(".new")
    new.write_text(text)
    new.replace(path)


RESTART = "restart engine: engine.yaml max-model-len 2048 → 1024"
HEALTHY = "engine healthy S after restart"


@pytest.mark.parametrize("save", [in_place, by_rename])
def test_a_save_restarts(stand, save):
    """In place and by rename: the same container, started again, with the new value, on record."""
    before = stand.start_of()
    save(stand.engine_yaml, ENGINE.replace("2048", "1024"))
    stand.only(RESTART, HEALTHY)
    after = stand.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert "'max-model-len': '1024'" in stand.options()
    [record] = stand.history()
    assert record["seconds"] > 0
    assert record | {"time": "", "seconds": 0} == {
        "time": "", "service": "engine", "action": "restart", "cause": "engine.yaml max-model-len 2048 → 1024",
        "result": "healthy", "seconds": 0, "before": before[0], "after": before[0], "detail": "",
    }  # fmt: skip


def test_comments_order_and_line_ends_do_nothing(stand):
    """Values are compared, in the config file and in the environment file."""
    before = stand.start_of()
    stand.engine_yaml.write_bytes(b"max-model-len: 2048 # tokens\r\n'model': \"/model\"\r\n")
    stand.expect("nothing to do: engine.yaml changed, no value did")
    (stand.directory / "engine.env").write_text("# both\nB='2'\nA=1\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    assert stand.start_of() == before
    assert stand.history() == []


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("LEVEL: ${LEVEL:-one}", "LEVEL: two", "environment LEVEL"),
        ("/config/engine.yaml]\n    environment", "/config/engine.yaml, --seed, '1']\n    environment", "command"),
    ],
)
def test_an_edit_of_the_definition_recreates(stand, old, new, cause):
    """Another container, healthy, on record with both ids."""
    before = stand.start_of()
    text = stand.compose_yaml.read_text()
    assert old in text
    by_rename(stand.compose_yaml, text.replace(old, new, 1))
    stand.only(f"recreate engine: {cause}", "engine healthy S after recreate")
    after = stand.start_of()
    assert after[0] != before[0]
    assert [(one["action"], one["result"], one["before"], one["after"]) for one in stand.history()] == [
        ("recreate", "healthy", before[0], after[0])
    ]


def test_a_value_that_one_service_uses_recreates_that_one(stand):
    """In the project's `.env`, which did not exist before, and in an environment file."""
    (stand.directory / ".env").write_text("LEVEL=two\n")
    stand.expect("engine healthy")
    (stand.directory / "engine.env").write_text("A=1\nB=3\n")
    stand.expect("recreate engine: environment B")
    until(lambda: len(stand.messages()) == 4, "two recreations")
    stand.only(
        "recreate engine: environment LEVEL",
        "engine healthy S after recreate",
        "recreate engine: environment B",
        "engine healthy S after recreate",
    )
    assert {"LEVEL=two", "B=3"} < set(stand.inspect()["Config"]["Env"])


def test_an_override_file_that_appears_takes_part(stand):
    """With a list that replaces the command; the new config file is watched from then on."""
    (stand.directory / "config" / "other.yaml").write_text("max-model-len: 1\n")
    (stand.directory / "compose.override.yaml").write_text(
        "services: {engine: {command: !override [--config, /config/other.yaml]}}\n"
    )
    stand.expect("engine healthy")
    (stand.directory / "config" / "other.yaml").write_text("max-model-len: 2\n")
    stand.expect("restart engine: other.yaml max-model-len 1 → 2")
    until(lambda: len(stand.messages()) == 4, "recreation and restart")
    assert stand.messages() == [
        "recreate engine: command; other.yaml max-model-len 2048 → 1, model /model → (unset) "
        "(shapes the weights: `make load` prepares them)",
        "engine healthy S after recreate",
        "restart engine: other.yaml max-model-len 1 → 2",
        HEALTHY,
    ]


def test_a_burst_of_both_kinds_is_one_recreation(stand):
    """One plan for all that came to rest together."""
    stand.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    stand.compose_yaml.write_text(stand.compose_yaml.read_text().replace("-one", "-two"))
    stand.only(
        "recreate engine: environment LEVEL; engine.yaml max-model-len 2048 → 1024",
        "engine healthy S after recreate",
    )
    assert len(stand.history()) == 1


def test_a_bad_file_keeps_the_engine_and_is_said_once(stand):
    """Line and column; the right file is compared with what was applied last."""
    before = stand.start_of()
    fault = f"keep engine: {stand.engine_yaml}, line 2 column 3: mapping values are not allowed here"
    stand.engine_yaml.write_text("model: a\n b: c\n")
    stand.expect(fault)
    (stand.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    assert stand.start_of() == before
    stand.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    stand.only(fault, "nothing to do: engine.env changed, no value did", RESTART, HEALTHY)


@pytest.mark.parametrize("text", ["", "model: a\n b: c\n", None])
def test_a_bad_file_that_is_restored_does_nothing(stand, text):
    """Empty, broken, deleted; and back as it was."""
    before = stand.start_of()
    stand.engine_yaml.unlink() if text is None else stand.engine_yaml.write_text(text)
    stand.expect("keep engine: ")
    stand.engine_yaml.write_text(ENGINE)
    stand.expect("nothing to do: engine.yaml changed, no value did")
    assert stand.start_of() == before
    assert len(stand.messages()) == 2
    assert stand.history() == []


def test_a_broken_compose_file_keeps_everything_and_is_said_once(stand):
    """Restored it does nothing; the engine's own file counts meanwhile no more than before."""
    text = stand.compose_yaml.read_text()
    before = stand.start_of()
    stand.compose_yaml.write_text(text.replace("services:", "services: ["))
    stand.expect("keep every engine: ")
    stand.compose_yaml.write_text(text)
    stand.expect("nothing to do: compose.yaml changed, no value did")
    assert stand.start_of() == before
    assert len(stand.messages()) == 2
    assert stand.messages()[0].startswith("keep every engine: yaml: line ")


def test_what_is_not_labelled_is_said_and_not_touched(stand):
    """The sidecar above all. The fixture compares its id and its start."""
    text = stand.compose_yaml.read_text()
    line = "keep sidecar: environment SIDE changed, not supervised; apply it with `docker compose up -d sidecar`"
    for count, value in enumerate(("two", "three"), 1):
        stand.compose_yaml.write_text(text.replace("SIDE: one", f"SIDE: {value}"))
        until(lambda count=count: stand.messages().count(line) == count, line)
    stand.only(line, line)
    assert stand.history() == []


def test_a_file_written_in_chunks_is_one_action(stand):
    """Truncate, 200 ms, and the rest in two chunks."""
    with stand.engine_yaml.open("w") as file:
        for chunk in ("", "model: /model\nmax-mod", "el-len: 1024\n"):
            file.write(chunk)
            file.flush()
            time.sleep(0.2)
    stand.only(RESTART, HEALTHY)
    assert len(stand.history()) == 1


def test_a_swapped_link_is_exactly_one_restart(prepared):
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
    (config / "..data_tmp").symlink_to("..2026-01-02")
    (config / "..data_tmp").replace(config / "..data")
    prepared.only(RESTART, HEALTHY)
    assert "'max-model-len': '1024'" in prepared.options()
    assert len(prepared.history()) == 1


def test_a_mount_of_a_single_file_is_said_and_a_rename_is_applied(prepared):
    """The engine sees the renamed file because it is restarted; a reload would show it the old one."""
    text = prepared.compose_yaml.read_text()
    single = '["./config/engine.yaml:/config/engine.yaml:ro"]'
    prepared.compose_yaml.write_text(text.replace('["./config:/config:ro"]', single, 1))
    prepared.up()
    prepared.supervise()
    notice = f"engine mounts the single file {prepared.engine_yaml}: after a save by rename it sees the old one"
    prepared.expect(notice)
    by_rename(prepared.engine_yaml, ENGINE.replace("2048", "1024"))
    prepared.expect("engine healthy")
    assert "'max-model-len': '1024'" in prepared.options()
    assert prepared.log.read_text().count(notice) == 1


def test_a_value_that_ends_the_engine_is_said_and_the_right_one_brings_it_back(stand):
    """The engine is never left down once its file is right again."""
    before = stand.start_of()
    stand.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    stand.expect("engine exited with code 1 ")
    stand.engine_yaml.write_text(ENGINE)
    stand.expect("restart engine: engine.yaml max-model-len -1 → 2048")
    until(lambda: HEALTHY in stand.messages(), "the restart is done")
    ours = [one for one in stand.history() if one["action"] == "restart"]
    assert [(one["result"], one["detail"]) for one in ours] == [("exited", "with code 1"), ("healthy", "")]
    assert stand.inspect()["State"]["Health"]["Status"] == "healthy"
    assert stand.start_of()[0] == before[0]
    assert stand.messages()[:2] == [
        "restart engine: engine.yaml max-model-len 2048 → -1",
        f"engine exited with code 1 S after restart: see docker logs {before[0][:12]}",
    ]


def test_changes_while_an_engine_starts_are_one_action_afterwards(stand):
    """Not one for each save, and not before the engine is up."""
    stand.engine_yaml.write_text(ENGINE + "start-delay: 4\n")
    stand.expect("restart engine: ")
    for length in ("3", "4", "5"):
        stand.engine_yaml.write_text(ENGINE.replace("2048", length))
    stand.expect("restart engine: engine.yaml max-model-len 2048 → 5")
    until(lambda: len(stand.messages()) == 4, "two restarts")
    stand.only(
        "restart engine: engine.yaml start-delay (unset) → 4",
        HEALTHY,
        "restart engine: engine.yaml max-model-len 2048 → 5, start-delay 4 → (unset)",
        HEALTHY,
    )


def test_a_crash_is_recorded_and_docker_brings_the_engine_back(stand):
    """kill -9 of the engine's process: exit code, and the recovery. Nothing is restarted by us."""
    before = stand.start_of()
    os.kill(stand.inspect()["State"]["Pid"], signal.SIGKILL)
    stand.only("engine went down by itself: exit code 137 (SIGKILL)", "engine healthy S after it went down")
    after = stand.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert [(one["action"], one["cause"], one["result"]) for one in stand.history()] == [
        ("crash", "exit code 137 (SIGKILL)", "exited"),
        ("start", "exit code 137 (SIGKILL)", "healthy"),
    ]


def test_a_stop_by_hand_is_no_crash_and_an_edit_does_not_undo_it(stand):
    """Who stopped an engine wants it down."""
    run("docker", "stop", f"{stand.name}-engine-1")
    stand.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    line = f"engine left down: {stand.name}-engine-1 is stopped; the change counts when it is started by hand"
    stand.only(RESTART, line)
    stand.compose_yaml.write_text(stand.compose_yaml.read_text().replace("-one", "-two"))
    stand.expect("engine left down: it is stopped")
    assert stand.inspect()["State"]["Status"] == "exited"
    assert [(one["action"], one["result"]) for one in stand.history()] == [
        ("restart", "skipped"),
        ("recreate", "skipped"),
    ]


def test_it_ends_at_once_while_it_follows_an_engine(stand):
    """Exit code 0, and the restart is on record as it stood."""
    stand.engine_yaml.write_text(ENGINE + "start-delay: 300\n")
    stand.expect("restart engine: ")
    until(lambda: stand.inspect()["State"]["Health"]["Status"] == "starting", "the engine starts")
    assert stand.end() == 0
    assert stand.messages()[-1] == "ended"
    [record] = stand.history()
    assert (record["result"], record["detail"]) == ("starting", "the supervisor was told to end")


def test_restart_by_hand(stand):
    """Exit 0 when it is healthy, 1 when it is not; on record, and no crash for the supervisor."""
    before = stand.start_of()
    done = stand.weightkeeper("restart", "engine", "--cause", "make restart-engine")
    assert done.returncode == 0
    assert "restart engine: make restart-engine" in done.stderr.splitlines()[0]
    assert re.search(r"engine healthy \d+\.\d s after restart$", done.stderr)
    after = stand.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert [(one["cause"], one["result"]) for one in stand.history()] == [("make restart-engine", "healthy")]
    stand.only()


def test_restart_by_hand_says_when_the_engine_does_not_come_up(stand):
    """Exit code 1, with the engine's own."""
    stand.end()
    stand.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    done = stand.weightkeeper("restart", "engine")
    assert done.returncode == 1
    assert re.search(r"engine exited with code 1 \d+\.\d s after restart: see docker logs", done.stderr)


@pytest.mark.parametrize("service", ["sidecar", "unlabelled", "gone"])
def test_restart_by_hand_refuses_what_is_not_supervised(stand, service):
    """By name, with the remedy, and nothing is on record. The fixture compares starts."""
    done = stand.weightkeeper("restart", service)
    assert done.returncode == 1
    assert service in done.stderr
    assert "docker compose up -d" in done.stderr
    assert stand.history() == []


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
    os.kill(prepared.inspect()["State"]["Pid"], signal.SIGKILL)
    prepared.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    prepared.expect(RESTART)
    until(lambda: prepared.inspect()["State"]["Running"], "Docker brings the engine back")
    with_proxy.start()
    prepared.expect("Docker answers again after ")
    until(lambda: HEALTHY in prepared.messages(), "the restart is done")
    assert "'max-model-len': '1024'" in prepared.options()
    restarts = [one for one in prepared.history() if one["action"] == "restart"]
    assert [one["result"] for one in restarts] == ["healthy"]
    lines = prepared.messages()
    assert sum(line.startswith("Docker does not answer") for line in lines) == 1
    assert lines.count("engine went down by itself: exit code 137 (SIGKILL)") == 1
    assert not any("was started again" in line for line in lines)
    prepared.close()
    with_proxy.stop()


def test_polling_applies_a_change_too(prepared):
    """Where a file system sends no events."""
    prepared.up()
    prepared.supervise("--poll")
    by_rename(prepared.engine_yaml, ENGINE.replace("2048", "1024"))
    prepared.only(RESTART, HEALTHY)


def test_a_project_that_cannot_be_read_at_the_start_is_waited_for(prepared):
    """The engines run on, and supervision begins with the right file."""
    prepared.up()
    text = prepared.compose_yaml.read_text()
    prepared.compose_yaml.write_text("services: [\n")
    command = threading.Thread(target=prepared.supervise)
    command.start()
    until(lambda: prepared.log.exists() and "keep every engine" in prepared.log.read_text(), "the fault is said")
    prepared.compose_yaml.write_text(text)
    command.join(DEADLINE)
    prepared.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    prepared.expect("engine healthy")


def test_the_state_directory_is_checked_at_the_start(prepared):
    """Before anything is supervised: exit code 2 and the path."""
    (prepared.directory.parent / "state").write_text("a file")
    done = prepared.weightkeeper("restart", "engine")
    assert done.returncode == 2
    assert str(prepared.directory.parent / "state") in done.stderr


def test_the_stand_in_is_built_from_the_base(image):
    """A wrong value ends it with code 1: without that, the tests above would say nothing."""
    done = subprocess.run(["docker", "run", "--rm", image, "--max-model-len", "0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "max-model-len 0 is not positive" in done.stderr
    assert shutil.which("docker")
