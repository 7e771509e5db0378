"""What hostile, broken and dying clients and keepers can do to a keeper: nothing that others notice (C03, G10)."""

import array
import contextlib
import os
import resource
import signal
import socket
import struct
import threading

import pytest
from keepers import KeeperProcess, as_user, connected, descriptors_of, keeper, settled_descriptors, wait_for

from weightkeeper import client
from weightkeeper.errors import CacheUnusableError, LostError, RefusedError, WrongOwnerError
from weightkeeper.frames import HEADER, encode
from weightkeeper.protocol import (
    MAX_REQUEST_BYTES,
    VERSION,
    Done,
    Hello,
    LoadRequest,
    MapRequest,
    Progress,
    ReceiptsRequest,
    Refusal,
    ReleaseRequest,
    Report,
    StatusRequest,
)

FINGERPRINT = {"dtype": "bfloat16"}
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's identity, which only root can")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One keeper that has to survive all of it."""
    with keeper(tmp_path_factory.mktemp("one"), tensors=8000) as one:
        one.wait_for_state("ready")
        started, loads = one.status().started_at, one.status().loads
        yield one
        assert "broke on a fault of our own" not in one.text()
        assert "Traceback" not in one.text()
        assert (one.status().started_at, one.status().loads) == (started, loads)
        assert one.stop() == 0


@pytest.fixture(autouse=True)
def nothing_is_left(one):
    """After each attack: an honest engine is served, and descriptors and memory are as before."""
    before = settled_descriptors(one.process.pid, one.socket_dir)
    yield
    with client.open_session(one.socket_dir, "cpu-0") as session:
        granted = session.map(FINGERPRINT, "zero_copy")
        assert len(granted.descriptors) == 1
        os.close(granted.descriptors[0])
    wait_for(lambda: one.status().leases == (), "the end of the honest engine's lease")
    wait_for(lambda: settled_descriptors(one.process.pid, one.socket_dir) == before, "descriptors as before")
    assert one.status().own_bytes < 60_000_000


@pytest.fixture(params=["control", "engine"])
def role(request):
    return request.param


def path_of(one, role):
    return f"{one.socket_dir}/{'control' if role == 'control' else 'cpu-0'}.sock"


@contextlib.contextmanager
def raw(path):
    """A connected socket without any manners."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(path)
        yield connection


def everything(connection):
    """All messages until the keeper closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    found = []
    while data:
        nbytes, _ = HEADER.unpack(data[: HEADER.size])
        found.append(data[HEADER.size : HEADER.size + nbytes])
        data = data[HEADER.size + nbytes :]
    return found


def frame(body, descriptors=0, length=None):
    return struct.pack("!IH", len(body) if length is None else length, descriptors) + body


HELLO = {role: encode(Hello(VERSION, role, "attacker")) for role in ("control", "engine")}
NOT_HELLO = {"control": encode(StatusRequest()), "engine": encode(ReceiptsRequest())}

FIRST_MESSAGES = {
    "4 GiB": (lambda role: frame(b"", length=0xFFFFFFFF), "a frame of 4294967295 bytes; 1 to 262144 are allowed"),
    "a byte too long": (lambda role: frame(b"", length=MAX_REQUEST_BYTES + 1), "a frame of 262145 bytes; 1 to 262144"),
    "an HTTP request": (lambda role: b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
    "a pickle": (lambda role: frame(b"\x80\x04\x95\x00."), "a message cannot be read"),
    "an unknown command": (lambda role: frame(b'{"type":"shutdown"}'), "a message cannot be read: Invalid value"),
    "no greeting": (lambda role: NOT_HELLO[role], "the first message has to be a Hello"),
    "another version": (
        lambda role: encode(Hello(2, role)),
        f"this side speaks version {VERSION} and the client 2; run the same release",
    ),
    "another role": (lambda role: encode(Hello(VERSION, "loader")), "is for the role"),
    "a message of the loader's": (
        lambda role: encode(Progress("x")),
        "a message cannot be read: Invalid value 'progress'",
    ),
    "descriptors announced": (lambda role: frame(b"{}", 9), "a frame announces 9 descriptors and 0 came with it"),
    "deep JSON": (lambda role: frame(b'{"type":"hello","x":' + b"[" * 200_000), "a message cannot be read"),
}


@pytest.mark.parametrize("name", FIRST_MESSAGES)
def test_c03_a_bad_first_message_is_refused_with_its_fault(one, role, name):
    """C03: code, words, and the end of the connection."""
    make, message = FIRST_MESSAGES[name]
    with raw(path_of(one, role)) as connection:
        connection.sendall(make(role))
        (refusal,) = everything(connection)
        assert refusal.startswith(b'{"type":"refusal","code":"protocol","message":')
        assert message.encode() in refusal


SECOND_MESSAGES = [
    ("control", MapRequest({}, "copy"), "MapRequest has no place on the control socket"),
    ("control", ReceiptsRequest(), "ReceiptsRequest has no place on the control socket"),
    ("control", Hello(VERSION, "control"), "Hello has no place on the control socket"),
    ("engine", StatusRequest(), "StatusRequest is out of place on an engine socket"),
    ("engine", LoadRequest(), "LoadRequest is out of place on an engine socket"),
    ("engine", ReleaseRequest(True), "ReleaseRequest is out of place on an engine socket"),
    ("engine", Report("mapped"), "Report is out of place on an engine socket"),
    ("engine", Hello(VERSION, "engine"), "Hello is out of place on an engine socket"),
    ("control", Report("mapped", nbytes=-1), "a report with a number below 0"),
    ("control", Report("mapped", nbytes=10**300), "a report with a number below 0"),
    ("control", Report("mapped", milliseconds=1e300), "a report with a number below 0"),
    ("control", Report("mapped", phases={"x": -0.1}), "a report with a number below 0"),
]


@pytest.mark.parametrize(
    ("wanted", "message", "words"), SECOND_MESSAGES, ids=[f"{each[0]} {each[2]}" for each in SECOND_MESSAGES]
)
def test_a_message_out_of_place_is_refused_by_name(one, wanted, message, words):
    """No message means anything on the wrong socket or at the wrong time, and no number is taken on trust."""
    with connected(path_of(one, wanted), wanted) as channel:
        channel.send(message)
        answer = channel.receive().message
        assert answer.code == "protocol"
        assert words in answer.message


def test_a_second_map_request_on_one_lease_is_refused(one):
    """One connection is one lease; a protocol fault ends it."""
    with connected(path_of(one, "engine"), "engine") as channel:
        channel.send(MapRequest(FINGERPRINT, "zero_copy"))
        channel.receive()
        for descriptor in channel.receive().descriptors:
            os.close(descriptor)
        channel.send(MapRequest(FINGERPRINT, "zero_copy"))
        assert channel.receive().message == Refusal("protocol", "MapRequest is out of place on an engine socket")


@pytest.mark.parametrize("when", ["greeting", "request", "middle of a request"])
def test_descriptors_where_none_belong_are_closed_and_refused(one, role, when):
    """Also as many as the kernel lets through, and in the middle of a frame."""
    request = NOT_HELLO[role]
    with raw(path_of(one, role)) as connection:
        sent = [os.dup(connection.fileno()) for _ in range(200)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))]
        if when == "greeting":
            connection.sendmsg([HELLO[role]], ancillary)
        else:
            connection.sendall(HELLO[role])
            cut = 10 if when == "middle of a request" else 0
            if cut:
                connection.sendall(request[:cut])
            connection.sendmsg([request[cut:]], ancillary)
        *_, refusal = everything(connection)
        assert b"more descriptors arrived beside a frame than the 0 allowed" in refusal
        for descriptor in sent:
            os.close(descriptor)


def test_c03_silent_clients_are_refused_within_the_limit_and_others_are_served_meanwhile(one):
    """C03: nothing, half a header, half a frame, on both sockets; honest clients notice nothing."""
    silent = [(role, cut) for role in ("control", "engine") for cut in (0, 3, 20)]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw(path_of(one, role))) for role, _ in silent]
        for connection, (role, cut) in zip(connections, silent, strict=True):
            connection.sendall(HELLO[role][:cut])
        over, answers = threading.Event(), []

        def honest():
            while not over.is_set():
                answers.append((client.status(one.socket_dir).state, served(one)))

        others = threading.Thread(target=honest)
        others.start()
        refusals = [everything(connection) for connection in connections]
        over.set()
        others.join()
    for (refusal,) in refusals:
        assert refusal.startswith(b'{"type":"refusal","code":"timeout"')
    assert len(answers) > 10
    assert set(answers) == {("ready", True)}


def test_clients_that_drip_are_refused_within_the_limit(one):
    """One byte now and then does not buy more time."""
    whole = {role: encode(Hello(VERSION, role, "x" * 10_000)) for role in ("control", "engine")}
    answers = {role: b"" for role in whole}
    with raw(path_of(one, "control")) as control, raw(path_of(one, "engine")) as engine:
        connections = {"control": control, "engine": engine}
        for position in range(10_000):
            for role, connection in connections.items():
                connection.settimeout(0.1)
                with contextlib.suppress(BrokenPipeError):
                    connection.send(whole[role][position : position + 1])
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    answers[role] += connection.recv(65536)
            if all(answers.values()):
                break
    assert all(b'"code":"timeout"' in answer for answer in answers.values())
    assert 0 < position < 1000


def test_a_thousand_silent_connections_keep_nobody_out(one, role):
    """The number is bounded, the silent ones make room, and honest clients get their answers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    before = settled_descriptors(one.process.pid, one.socket_dir)
    silent, told = [], b""
    with contextlib.ExitStack() as crowd:

        def come(count):
            for _ in range(count):
                connection = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.connect(path_of(one, role))  # waits where the queue is full
                connection.setblocking(False)
                silent.append(connection)

        def answered():
            with contextlib.suppress(RefusedError):
                return client.status(one.socket_dir) if role == "control" else served(one)

        come(900)
        assert wait_for(answered, "an answer in the crowd")
        come(100)  # by now the first ones have been silent for long enough to go
        assert wait_for(answered, "an answer in the second crowd")
        assert descriptors_of(one.process.pid) <= before + 65
        for connection in silent:
            with contextlib.suppress(OSError):
                told += connection.recv(4096)
    assert b"the place of this silent connection was needed for another" in told
    assert "64 connections are open, which is the limit; silent ones make room for new ones" in one.text()


def served(one):
    with client.open_session(one.socket_dir, "cpu-0", connect_timeout_s=0.5) as session:
        granted = session.map(FINGERPRINT, "zero_copy")
        os.close(granted.descriptors[0])
        return True


def test_a_keeper_without_free_descriptors_recovers(tmp_path, one):
    """It says what is missing, makes room, and serves again; it does not end."""
    other = KeeperProcess(tmp_path)
    other.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    crowd = []
    try:
        other.wait_for_state("ready")
        for _ in range(60):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            crowd.append(connection)
            connection.connect(path_of(other, "control"))
        other.wait_for_text("a connection cannot be accepted: Too many open files; silent ones make room for new ones")
        assert wait_for(other.status, "an answer in the crowd").state == "ready"
        for connection in crowd:
            connection.close()
        assert wait_for(lambda: quietly_served(other), "an engine that is served")
        assert other.stop() == 0
    finally:
        for connection in crowd:
            connection.close()
        if other.process.poll() is None:
            other.kill()


def quietly_served(one):
    with contextlib.suppress(CacheUnusableError):
        return served(one)


def test_leases_are_never_made_to_go(one):
    """With all places taken by engines that map, the next client is refused with the reason, and no engine is lost."""
    sessions = []
    try:
        for number in range(64):
            session = client.open_session(one.socket_dir, "cpu-0", name=f"engine-{number}")
            sessions.append(session)
            os.close(session.map(FINGERPRINT, "zero_copy").descriptors[0])
        with pytest.raises(RefusedError, match="64 connections are open, which is the limit; try again in a second"):
            client.open_session(one.socket_dir, "cpu-0", connect_timeout_s=0.5)
        assert len(one.status().leases) == 64
        sessions.pop().close()
        wait_for(lambda: len(one.status().leases) == 63, "the end of one lease")
        assert served(one)
        for session in sessions:
            assert session.release().startswith("kept: ")
            if len(one.status().leases) == 1:
                break
    finally:
        for session in sessions:
            session.close()


def test_a_client_that_does_not_read_its_answer_costs_others_nothing(one):
    """A megabyte of Grant, and much more asked for than is read: the client is cut off, honest ones are served."""
    with raw(path_of(one, "engine")) as connection, raw(path_of(one, "control")) as other:
        connection.sendall(HELLO["engine"] + encode(MapRequest(FINGERPRINT, "zero_copy")))
        wait_for(lambda: [each for each in one.status().leases if each.name == "attacker"], "the attacker's lease")
        other.sendall(HELLO["control"])
        other.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while True:
                other.sendall(encode(StatusRequest()) * 1000)
        assert client.status(one.socket_dir).state == "ready"
        assert served(one)
        wait_for(lambda: one.status().leases == (), "the end of the attacker's lease")


def test_a_flood_of_requests_on_one_connection_leaves_time_for_others(one):
    """Whoever asks without end is one client of many."""
    over = threading.Event()

    def flood():
        with connected(path_of(one, "control"), "control") as channel:
            while not over.is_set():
                channel.send(StatusRequest())
                channel.receive()

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [served(one) for _ in range(20)] == [True] * 20
    over.set()
    for thread in threads:
        thread.join()


def test_names_and_messages_cannot_forge_log_lines_or_grow_without_bound(one):
    """Line ends and escapes become question marks; long text is cut; made-up codes share one counter."""
    name = "x\n2026-01-01 INFO weightkeeper.keeper: ready\x1b[31m" + "y" * 100_000
    with connected(path_of(one, "control"), "control", name) as channel:
        for number in range(200):
            report = Report(
                "fallback", name, f"code-{number}", "m\r\n" * 20_000, phases={f"p{i}": 1.0 for i in range(900)}
            )
            channel.send(report)
            assert channel.receive().message == Done()
    state = one.status()
    assert set(state.fallbacks) == {"other"}
    assert len(state.last_report.name) <= 129
    assert len(state.last_report.message) <= 1001
    assert len(state.last_report.phases) == 32
    assert "\nINFO weightkeeper.keeper: ready" not in one.text()
    assert "\x1b" not in one.text()
    assert all(len(line) < 2000 for line in one.text().splitlines())


def test_a_fingerprint_of_any_size_is_compared_or_refused(one):
    """A request with thousands of fields is a mismatch, a larger one is over the limit."""
    with connected(path_of(one, "engine"), "engine") as channel:
        channel.send(MapRequest({f"field {number}": "x" for number in range(5000)}, "zero_copy"))
        assert len(channel.receive().message.differences) == 5001
    with connected(path_of(one, "engine"), "engine") as channel:
        with contextlib.suppress(LostError):  # the refusal may come before the end of the request
            channel.send(MapRequest({"x": "y" * MAX_REQUEST_BYTES}, "zero_copy"))
        assert channel.receive().message.code == "protocol"


@AS_ROOT
def test_another_user_is_turned_away_on_both_sides(one):
    """By directory and socket modes first; then by the keeper, where the modes were loosened; then by the client."""
    control = path_of(one, "control")
    assert as_user(1000, lambda: client.status(one.socket_dir)).startswith("WrongOwnerError: ")
    loosened = [(path, os.stat(path).st_mode & 0o7777) for path in (one.socket_dir, control)]
    parent = one.directory
    while parent.name.startswith(("one", "pytest")):
        loosened.append((str(parent), os.stat(parent).st_mode & 0o7777))
        parent = parent.parent
    try:
        for path, _ in loosened:
            os.chmod(path, 0o777)

        def ask():
            with raw(control) as connection:
                return everything(connection)

        answer = as_user(1000, ask)
        assert '"code":"wrong_owner"' in answer
        assert "the other side runs as uid 1000 and we run as uid 0" in answer
        with pytest.raises(WrongOwnerError, match="can be written by other users"):
            client.status(one.socket_dir)
    finally:
        for path, mode in loosened:
            os.chmod(path, mode)


@AS_ROOT
def test_an_allowed_user_is_served_and_no_other(tmp_path, monkeypatch, one):
    """The allow-list on both sides is what lets two users work together."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o711)
    with keeper(tmp_path, "--allow-uid", "1000") as other:
        monkeypatch.setenv("WEIGHTKEEPER_ALLOW_UID", "0 1000")
        wait_for(lambda: (now := other.status()) and now.state == "ready", "ready")

        def engine():
            with client.open_session(other.socket_dir, "cpu-0", name="theirs") as session:
                granted = session.map(FINGERPRINT, "zero_copy")
                return os.pread(granted.descriptors[0], 4, 0)

        assert as_user(1000, engine) == str(b"\x07" * 4)
        assert "the other side runs as uid 1001" in as_user(1001, engine)
        monkeypatch.delenv("WEIGHTKEEPER_ALLOW_UID")
        assert "belongs to uid 0 and we run as uid 1000" in as_user(1000, engine)


def test_g10_a_killed_keeper_is_taken_over_with_one_line(tmp_path, one):
    """G10: SIGKILL and start on the same directory, again and again; leftovers never count as a keeper."""
    with keeper(tmp_path, fill=1) as other:
        other.wait_for_state("ready")
        for _ in range(3):
            other.kill()
            assert other.names() == ["control.sock", "cpu-0.sock", "keeper.lock", "publish.sock"]
            with pytest.raises(RefusedError, match=r"nobody answers on .*control\.sock; the sidecar has ended"):
                client.open_session(other.socket_dir, "cpu-0")
            other.log.unlink()
            other.start()
            other.wait_for_state("ready")
            assert other.lines()[0] == (
                f"took over {other.socket_dir} from a keeper that ended without cleaning up: "
                "removed control.sock, cpu-0.sock, publish.sock"
            )
            assert "took over" not in "".join(other.lines()[1:])
            assert served(other)
            wait_for(lambda: other.status().leases == (), "the end of the lease, which the next one would wait for")
        assert other.stop() == 0


@pytest.mark.parametrize("stage", ["start", "progress", "publish 0", "rank 0"])
def test_g10_a_keeper_killed_while_loading_leaves_nothing_that_counts(tmp_path, one, stage):
    """G01's keeper half: the next one starts from nothing, and its loader is the only one."""
    with keeper(tmp_path, ranks=2, stop_at=stage) as other:
        wait_for(other.stopped.exists, "the loader at its stage")
        loader = int(other.stopped.read_text())
        other.kill()
        wait_for(lambda: not os.path.exists(f"/proc/{loader}"), "the loader's end")
        other.stopped.unlink()
        other.plan(ranks=2)
        other.start()
        state = other.wait_for_state("ready")
        assert (state.held.generation, state.loads) == (1, 1)
        assert other.names() == ["control.sock", "cpu-0.sock", "cpu-1.sock", "keeper.lock", "publish.sock"]


def test_a_second_keeper_gives_up_and_the_first_serves_on(tmp_path, one):
    """One line with the pid of the one that lives, exit code 1, nothing touched."""
    second = KeeperProcess(tmp_path)
    second._command = [*one._command]
    second.start()
    assert second.process.wait(30) == 1
    assert f"weightkeeper: {one.socket_dir}: a live keeper (pid {one.process.pid}, " in second.text()
    assert "Traceback" not in second.text()
    assert one.names() == ["control.sock", "cpu-0.sock", "keeper.lock", "publish.sock"]


def test_a_keeper_that_may_not_write_its_directory_says_so_in_one_line(tmp_path, one):
    """G11: path, owner, our uid and the remedy, on the first line, with exit code 1."""
    (tmp_path / "run").write_text("")
    other = KeeperProcess(tmp_path).start()
    assert other.process.wait(30) == 1
    assert other.text() == (f"weightkeeper: {tmp_path}/run is not a directory; remove it or choose another one\n")


def test_signals_that_are_not_ours_do_not_end_it(one):
    """A client that closes in the middle of an answer, and a hang-up of nobody's terminal."""
    for _ in range(20):
        with raw(path_of(one, "engine")) as connection:
            connection.sendall(HELLO["engine"] + encode(MapRequest(FINGERPRINT, "zero_copy")))
    os.kill(one.process.pid, signal.SIGPIPE)
    assert one.status().state == "ready"
