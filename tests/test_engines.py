"""The Docker side without Docker: what its descriptions and events mean, and how a lost connection comes back."""

import contextlib
import gc
import http.server
import json
import logging
import os
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from weightkeeper.errors import DockerLostError, NotSupervisedError, ServiceError
from weightkeeper.supervisor import inside
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.deaths import Death, Reader, Recovery
from weightkeeper.supervisor.engines import Engines, is_stopped
from weightkeeper.supervisor.follow import Outcome, judge, nanoseconds, patience
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.plan import Restart
from weightkeeper.supervisor.say import put, said
from weightkeeper.supervisor.stop import Stop

START = "2026-01-31T12:00:00.5Z"
LATER = "2026-01-31T12:00:07.123456789Z"


# --- descriptions


@pytest.mark.parametrize(
    ("policy", "state", "expected"),
    [
        ("unless-stopped", {"Status": "exited", "ExitCode": 1}, True),
        ("always", {"Status": "exited", "ExitCode": 137}, True),
        ("no", {"Status": "exited", "ExitCode": 0}, True),
        ("", {"Status": "exited", "ExitCode": 143}, True),
        ("no", {"Status": "exited", "ExitCode": 1}, False),
        ("on-failure", {"Status": "exited", "ExitCode": 1}, False),
        ("no", {"Status": "exited", "ExitCode": 137, "OOMKilled": True}, False),
        ("unless-stopped", {"Status": "created", "ExitCode": 128, "Error": "port is already allocated"}, False),
        ("unless-stopped", {"Status": "running", "ExitCode": 0}, False),
        ("unless-stopped", {"Status": "restarting", "ExitCode": 1}, False),
    ],
)
def test_stopped_on_purpose_is_told_from_crashed(policy, state, expected):
    """What somebody stopped stays down; what fell over is brought up by the right configuration."""
    assert is_stopped({"State": state, "HostConfig": {"RestartPolicy": {"Name": policy}}}) is expected


@pytest.mark.parametrize(
    ("state", "waited", "expected"),
    [
        ({"Health": {"Status": "starting"}}, 9.0, None),
        ({"Health": {"Status": "healthy"}}, 0.1, "healthy"),
        ({"Health": {"Status": "unhealthy"}}, 0.1, "unhealthy"),
        ({}, 1.0, None),
        ({}, 3.0, "running"),
        ({"Health": {"Status": "none"}}, 3.0, "running"),
        ({"Status": "exited"}, 0.1, "exited"),
        ({"Status": "restarting", "Health": {"Status": "healthy"}}, 0.1, "exited"),
        ({"StartedAt": LATER, "Health": {"Status": "healthy"}}, 9.0, "exited"),
        ({"Status": "paused", "Health": {"Status": "starting"}}, 9.0, None),
    ],
)
def test_a_start_is_judged_by_its_own_container_state(state, waited, expected):
    """A later start means that this one failed, however healthy it looks by now."""
    description = {"State": {"Status": "running", "StartedAt": START} | state}
    assert judge(description, START, waited) == expected


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (None, 33.0),
        ({"Test": ["NONE"]}, 33.0),
        ({"Test": ["CMD", "x"]}, 4 * 60 + 30.0),
        ({"Test": ["CMD", "x"], "Interval": 5e9, "Timeout": 5e9, "Retries": 3, "StartPeriod": 600e9}, 670.0),
    ],
)
def test_patience_follows_the_health_check(check, expected):
    """Longer than Docker itself needs to call it unhealthy, and no longer than that and some."""
    assert patience(check) == expected


def test_docker_s_times_are_read_to_the_nanosecond():
    """Events are compared with starts."""
    assert nanoseconds(LATER) - nanoseconds("2026-01-31T12:00:00Z") == 7_123_456_789
    assert nanoseconds("1970-01-01T00:00:01.5Z") == 1_500_000_000


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Outcome("healthy", 23.44), "engine healthy 23.4 s after restart"),
        (Outcome("running", 3.0), "engine running 3.0 s after restart (it has no health check)"),
        (
            Outcome("exited", 2.0, "with code 1", after="4f" * 32),
            "engine exited with code 1 2.0 s after restart: see docker logs 4f4f4f4f4f4f",
        ),
        (
            Outcome("unhealthy", 9.0, "refused", after="4f" * 32),
            "engine unhealthy 9.0 s after restart (refused): see docker logs 4f4f4f4f4f4f",
        ),
        (Outcome("starting", 60.0, "a change"), "engine still starting 60.0 s after restart (a change)"),
        (
            Outcome("skipped", 0.0, "it is stopped"),
            "engine left down: it is stopped; the change counts when it is started by hand",
        ),
        (Outcome("failed", 0.0, "no room"), "engine restart failed: no room"),
        (Outcome("refused", 0.0, "block-size: x"), "engine goes on as it is: block-size: x"),
        (Outcome("done", 2.0, "loaded"), "engine restart done after 2.0 s (loaded)"),
        (Outcome("undecided", 2.0, "told to end"), "engine restart undecided after 2.0 s (told to end)"),
    ],
)  # fmt: skip
def test_every_outcome_is_one_line(outcome, line):
    """Stable text, in words."""
    assert said("restart", "engine", outcome) == line


def test_a_full_disk_stops_no_supervisor(tmp_path, caplog):
    """The history is a record, not a condition."""
    (tmp_path / "history.jsonl").mkdir()
    put(History(tmp_path), "restart", Restart("engine", "x"), Outcome("healthy", 1.0))
    assert caplog.records[0].getMessage().startswith("the history cannot be written: ")


# --- events


class Story:
    """Events of one container, a second apart."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.second = 0

    def tell(self, action: str, container: str = "c", **attributes: str) -> Any:
        self.second += 1
        return self.reader.feed(self.event(action, container, **attributes))

    def event(self, action: str, container: str = "c", **attributes: str) -> dict[str, Any]:
        attributes["com.docker.compose.service"] = "engine"
        actor = {"ID": container, "Attributes": attributes}
        return {"Action": action, "timeNano": self.second * 10**9, "Actor": actor}


def test_a_death_that_nobody_asked_for_is_a_crash():
    """With its exit code, and with its recovery."""
    story = Story()
    assert story.tell("start") is None
    death = story.tell("die", exitCode="137")
    assert death == Death("engine", "c", "137")
    assert death.cause == "exit code 137 (SIGKILL)"
    assert story.tell("start") is None
    assert story.tell("health_status: unhealthy") is None
    assert story.tell("health_status: healthy") == Recovery(death, 3.0)
    assert story.tell("health_status: healthy") is None


@pytest.mark.parametrize("signal", ["15", "9", "2", "SIGTERM", "3"])
def test_a_death_after_a_stop_is_none(signal):
    """`docker stop`, `restart` and `kill` leave a kill event first."""
    story = Story()
    assert story.tell("kill", signal=signal) is None
    assert story.tell("die", exitCode="143") is None
    assert story.tell("start") is None
    assert story.tell("health_status: healthy") is None
    assert story.tell("die", exitCode="1") == Death("engine", "c", "1")


def test_a_reload_does_not_excuse_a_crash():
    """SIGHUP is sent by Docker too."""
    story = Story()
    story.tell("kill", signal="1")
    assert story.tell("die", exitCode="1") == Death("engine", "c", "1")


def test_a_stop_of_one_container_does_not_excuse_another():
    """Events of engines come mixed."""
    story = Story()
    story.tell("kill", "other", signal="15")
    assert story.tell("die", exitCode="1") == Death("engine", "c", "1")


def test_the_end_of_memory_is_named():
    """Exit code 137 alone says too little."""
    story = Story()
    story.tell("oom")
    assert story.tell("die", exitCode="137").cause == "exit code 137 (SIGKILL), out of memory"


def test_events_told_twice_count_once():
    """After a reconnection Docker tells the last second again."""
    story = Story()
    assert story.tell("die", exitCode="1")
    assert story.reader.feed(story.event("die", exitCode="1")) is None


def test_a_crash_loop_is_told_ever_less():
    """The 1st, 2nd, 4th, 8th time; healthy once, and it starts again."""
    story = Story()
    deaths = [story.tell("die", exitCode="1") for _ in range(20)]
    assert [death.count for death in deaths if death.is_told] == [1, 2, 4, 8, 16]
    assert deaths[3].cause == "exit code 1, 4 times without being healthy"
    story.tell("health_status: healthy")
    assert story.tell("die", exitCode="1").count == 1


# --- connection

leaks = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""The SDK does not close a socket that it could not connect."""


class Answers(http.server.BaseHTTPRequestHandler):
    """The smallest Docker: a version, a ping, and what a test says of the containers."""

    containers: list[dict[str, Any]] = []  # noqa: RUF012
    printed: list[tuple[int, bytes]] = []  # noqa: RUF012
    code = 0
    started = 200
    is_slow = False
    most: int | None = None

    def do_GET(self) -> None:
        body: Any = {"ApiVersion": "1.41"}
        if "/containers/json" in self.path:
            body = [{"Id": one["Id"]} for one in self.containers]
        elif "/exec/" in self.path:
            body = {"ExitCode": self.code}
        elif "/containers/" in self.path:
            body = next(one for one in self.containers if f"/containers/{one['Id']}/" in self.path)
        raw = b"OK" if self.path.endswith("_ping") else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_POST(self) -> None:
        """A program in a container, which prints `printed` and ends with `code`.

        A busy Docker sends headers and print together, a slow program's print comes later; `most` bytes of both come.
        """
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/exec"):
            raw = b'{"Id": "e"}'
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
            return
        self.close_connection = True
        parts = [struct.pack(">BxxxL", number, len(part)) + part for number, part in self.printed]
        head = f"HTTP/1.1 {self.started} x\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n".encode()
        raw = (head + b"".join(parts))[: self.most]
        first = len(head) if self.is_slow else len(raw)
        with contextlib.suppress(BrokenPipeError):  # the client may have had enough
            self.wfile.write(raw[:first])
            time.sleep(0.05 if self.is_slow else 0.0)
            self.wfile.write(raw[first:])

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        pass


class Daemon:
    """A Docker that a test starts and stops."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._connections: list[Connection] = []
        self.server: socketserver.ThreadingUnixStreamServer | None = None

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.server = socketserver.ThreadingUnixStreamServer(str(self.socket), Answers)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        if self.server:
            self.server.shutdown()
            self.server.server_close()

    def connection(self, stop: Stop) -> Connection:
        made = Connection(stop, lambda: docker.DockerClient(f"unix://{self.socket}", timeout=5, version="auto"))
        self._connections.append(made)
        return made


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    one = Daemon(tmp_path / "docker.sock")
    yield one
    one.stop()
    gc.collect()  # where `leaks` still holds
    Answers.containers, Answers.printed, Answers.code = [], [], 0
    Answers.started, Answers.is_slow, Answers.most = 200, False, None


@leaks
def test_a_docker_that_does_not_answer_is_lost(daemon):
    """With the socket's own words."""
    with pytest.raises(DockerLostError, match=r"Docker does not answer: .*No such file"):
        daemon.connection(Stop()).client()


@leaks
def test_lost_and_back_are_said_once_each(daemon, caplog):
    """However often it is tried in between."""
    caplog.set_level(logging.INFO)
    connection = daemon.connection(Stop())
    waiting = threading.Thread(target=connection.wait)
    waiting.start()
    while not caplog.records:
        waiting.join(0.01)
    waiting.join(0.8)  # one more attempt in vain
    daemon.start()
    waiting.join(10)
    assert not waiting.is_alive()
    lost, back = [record.getMessage() for record in caplog.records]
    assert lost.startswith("Docker does not answer: ")
    assert back.startswith("Docker answers again after ")
    assert connection.client().ping() is True


@leaks
def test_waiting_for_docker_ends_when_told_to(daemon):
    """A supervisor without Docker can be stopped too."""
    stop = Stop()
    waiting = threading.Thread(target=daemon.connection(stop).wait)
    waiting.start()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()


@leaks
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the place of another user")
def test_a_socket_without_permission_names_the_group(daemon):
    """The usual fault of a container that is not root."""
    daemon.start()
    daemon.socket.chmod(0o600)
    for parent in daemon.socket.parents:
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        with pytest.raises(DockerLostError, match=r"Permission denied.*; is the socket's group in group_add"):
            daemon.connection(Stop()).client()
    finally:
        os.seteuid(0)


def container(identity: str, **labels: str) -> dict[str, Any]:
    return {"Id": identity, "Name": f"/{identity}", "Config": {"Labels": labels}, "State": {"Status": "running"}}


def test_containers_of_a_service_are_found(daemon):
    """What `docker compose run` made is not one of them."""
    Answers.containers = [
        container("b", **{"weightkeeper.supervise": "true"}),
        container("a", **{"weightkeeper.supervise": "true", "com.docker.compose.oneoff": "False"}),
        container("once", **{"weightkeeper.supervise": "true", "com.docker.compose.oneoff": "True"}),
    ]
    daemon.start()
    engines = Engines("p", daemon.connection(Stop()), Stop())
    assert [one.id for one in engines.containers("engine")] == ["a", "b"]


def test_a_container_without_the_label_is_refused_by_name(daemon):
    """Also where another one of the service has it."""
    Answers.containers = [container("a", **{"weightkeeper.supervise": "true"}), container("b")]
    daemon.start()
    with pytest.raises(NotSupervisedError, match="the container of sidecar does not carry the label"):
        Engines("p", daemon.connection(Stop()), Stop()).containers("sidecar")


def test_a_service_without_container_is_refused_by_name(daemon):
    """With the command that makes one."""
    daemon.start()
    with pytest.raises(ServiceError) as caught:
        Engines("p", daemon.connection(Stop()), Stop()).containers("engine")
    assert str(caught.value) == ("engine has no container in the project p; make it with `docker compose up -d engine`")


def run_inside(daemon: Daemon, *printed: tuple[int, bytes], code: int = 0) -> inside.Done | None:
    """What comes of a program that prints this, by stream, in a container."""
    Answers.containers = [{"Id": "a", "Name": "/engine"}]
    Answers.printed, Answers.code = list(printed), code
    daemon.start()
    container = daemon.connection(Stop()).client().containers.get("a")
    return inside.run(container, ["weightkeeper", "x"], 30, Stop())


@leaks
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_program_inside_says_what_it_printed_and_how_it_ended(daemon, is_slow):
    """Its two streams apart, each whole, also what came together with Docker's headers; what is no text is marked."""
    Answers.is_slow = is_slow
    done = run_inside(daemon, (1, b"one "), (2, b"weightkeeper: no\n"), (1, b"two\xff"), code=2)
    assert done == inside.Done(2, "one two\ufffd", "weightkeeper: no\n")


@leaks
@pytest.mark.parametrize("cut", [3, 8, 11])
def test_an_answer_that_ends_in_the_middle_is_docker_s_loss(daemon, cut):
    """Neither a part's header nor its bytes are taken for the whole."""
    Answers.most = len(b"HTTP/1.1 200 x\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n") + cut
    with pytest.raises(DockerLostError, match=r"Docker does not answer: .*IncompleteRead"):
        run_inside(daemon, (1, b"whole"))


@leaks
def test_a_program_that_docker_does_not_start_is_refused_in_its_words(daemon):
    """As where the container ended in between."""
    Answers.started = 409
    with pytest.raises(ServiceError, match=r"^Docker refused: "):
        run_inside(daemon, (1, b"x"))


@leaks
def test_a_program_inside_that_prints_without_end_is_given_up(daemon):
    """No more than a limit is kept of what a container says, on both streams together; nor what belongs to none."""
    most = b"x" * (inside.MAX_OUTPUT_BYTES // 2)
    assert run_inside(daemon, (1, most), (2, most)).output == most.decode()
    daemon.stop()
    with pytest.raises(ServiceError, match=r"^engine: Docker's answer to `weightkeeper x` cannot be read: stream 7$"):
        run_inside(daemon, (7, b"x"))
    daemon.stop()
    with pytest.raises(ServiceError, match=r"^engine: `weightkeeper x` printed over 1048576 bytes; does the container"):
        run_inside(daemon, (1, most), (2, most), (1, b"x"))
