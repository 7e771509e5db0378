"""Every cause for which a client does not get what it asked for, with its code; keepers here are real or scripted."""

import contextlib
import os
import signal
import socket
import struct
import threading

import pytest
from keepers import KeeperProcess, keeper, wait_for
from publishing_engine import weights

from weightkeeper import client
from weightkeeper.errors import (
    AlreadyHeldError,
    CacheUnusableError,
    ConfigError,
    KeeperFailedError,
    LostError,
    MismatchError,
    NoSocketError,
    NotLoadedError,
    ProtocolError,
    RefusedError,
    SocketPathError,
    StillLoadingError,
    TimeLimitError,
    WeightkeeperError,
    WrongOwnerError,
)
from weightkeeper.frames import encode
from weightkeeper.layout import Layout
from weightkeeper.protocol import (
    VERSION,
    Done,
    Grant,
    Held,
    Mismatch,
    Receipts,
    Refusal,
    Report,
    Segments,
    Status,
    Welcome,
)

FINGERPRINT = {"dtype": "bfloat16"}
WELCOME = encode(Welcome(VERSION))
GRANT = encode(Grant(1, FINGERPRINT, "host", (4096, 4096), Layout((), {}, {}, 0)))


def read_request(connection):
    """One frame from a client; False when it is gone."""
    header = connection.recv(6, socket.MSG_WAITALL)
    return len(header) == 6 and bool(connection.recv(struct.unpack("!IH", header)[0], socket.MSG_WAITALL))


class Script(threading.Thread):
    """A keeper that reads and then does each step of its script, for one connection after the other.

    A step is bytes to send, a number of descriptors to send with the next bytes, `twice` to read once more, or `close`.
    """

    def __init__(self, path, *steps):
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        os.chmod(path, 0o600)
        self.listener.listen(5)
        self.steps = steps
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    self.play(connection)

    def play(self, connection):
        count = 0
        for step in self.steps:
            if isinstance(step, int):
                count = step
                continue
            if step == "close" or not read_request(connection):
                return
            if step == "twice":
                continue
            if count:
                pipes = [os.memfd_create("x", os.MFD_CLOEXEC) for _ in range(count)]
                socket.send_fds(connection, [step], pipes)
                for each in pipes:
                    os.close(each)
                count = 0
            else:
                connection.sendall(step)
        while read_request(connection):
            pass

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join(10)


@pytest.fixture
def scripted(tmp_path):
    """Make scripted keepers in one directory; returns the directory's path."""
    tmp_path.chmod(0o700)
    running = []

    def make(engine=None, control=None, publish=None):
        for name, steps in (("cpu-0", engine), ("control", control), ("publish", publish)):
            if steps is not None:
                running.append(Script(str(tmp_path / f"{name}.sock"), *steps))
        return str(tmp_path)

    yield make
    for each in running:
        each.close()


def open_session(directory, **settings):
    return client.open_session(directory, "cpu-0", connect_timeout_s=settings.pop("connect_timeout_s", 5), **settings)


def test_no_directory_and_no_socket_are_no_socket(tmp_path):
    """The path is named, and what to look at."""
    tmp_path.chmod(0o700)
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NoSocketError) as caught:
            open_session(directory)
        assert str(caught.value) == (
            f"there is no socket at {directory}/control.sock; is the sidecar running, with the same volume?"
        )
        with pytest.raises(NoSocketError):
            client.status(directory)


def test_a_dead_socket_is_refused(tmp_path):
    """G01: what a dead keeper left never counts as one."""
    tmp_path.chmod(0o700)
    for name in ("control", "cpu-0"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(tmp_path / f"{name}.sock"))
        os.chmod(tmp_path / f"{name}.sock", 0o600)
    with pytest.raises(RefusedError, match=r"nobody answers on .*; the sidecar has ended or is starting again"):
        open_session(tmp_path)


def test_an_old_readiness_file_counts_for_nothing(tmp_path):
    """G01: files beside the sockets are not looked at."""
    tmp_path.chmod(0o700)
    for name in ("ready", "cpu-0.ready", "state.json"):
        (tmp_path / name).write_text("ready")
    with pytest.raises(NoSocketError):
        open_session(tmp_path)


def test_a_path_that_cannot_be_a_sockets_is_told_at_once(tmp_path):
    """Too long, or no device."""
    with pytest.raises(SocketPathError, match="a Unix socket's path has at most 107"):
        client.open_session(tmp_path / ("x" * 100), "cpu-0")
    with pytest.raises(SocketPathError, match="is no device name"):
        client.open_session(tmp_path, "../cpu-0")


def test_loose_modes_are_the_wrong_owner(tmp_path, scripted):
    """Before a byte is sent or believed."""
    directory = scripted(engine=[WELCOME], control=[WELCOME])
    os.chmod(directory, 0o777)
    with pytest.raises(WrongOwnerError, match="can be written by other users"):
        open_session(directory)
    os.chmod(directory, 0o700)
    open_session(directory).close()


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (["close"], LostError),
        ([WELCOME[:4], "close"], LostError),
        ([struct.pack("!IH", 1 << 31, 0)], ProtocolError),
        ([encode(Done())], ProtocolError),
        ([b"HTTP/1.1 400 Bad Request\r\n"], ProtocolError),
        ([], TimeLimitError),
        ([WELCOME[:4]], TimeLimitError),
        ([encode(Refusal("refused", "no"))], RefusedError),
        ([encode(Refusal("wrong_owner", "no"))], WrongOwnerError),
        ([encode(Refusal("protocol", "no"))], ProtocolError),
        ([encode(Refusal("timeout", "no"))], TimeLimitError),
        ([encode(Refusal("from_the_future", "no"))], RefusedError),
    ],
)
def test_a_greeting_that_goes_wrong_has_its_cause(scripted, steps, error):
    """Lost, malformed, silent or refused: each its own class, in bounded time."""
    with pytest.raises(error):
        open_session(scripted(engine=steps, control=steps), connect_timeout_s=0.3)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (["close"], LostError),
        ([GRANT[:100], "close"], LostError),
        ([encode(Refusal("not_loaded", "gone"))], NotLoadedError),
        ([encode(Refusal("build_failed", "gone"))], CacheUnusableError),
        ([encode(Refusal("mismatch", "odd"))], RefusedError),
        ([encode(Mismatch(()))], MismatchError),
        ([encode(Done())], ProtocolError),
        ([1, encode(Done(), 1)], ProtocolError),
        ([1, GRANT[:4] + b"\0\1" + GRANT[6:]], ProtocolError),
        ([GRANT + encode(Done())], ProtocolError),
        ([GRANT + encode(Segments(0))], ProtocolError),
        ([2, encode(Segments(0), 2)], ProtocolError),
        ([GRANT + encode(Refusal("not_loaded", "gone"))], NotLoadedError),
    ],
)
def test_an_answer_to_a_map_request_that_goes_wrong_has_its_cause(scripted, steps, error):
    """And no descriptor that came with it stays open."""
    directory = scripted(engine=[WELCOME, *steps])
    before = len(os.listdir("/proc/self/fd"))
    with open_session(directory) as session, pytest.raises(error):
        session.map(FINGERPRINT, "zero_copy")
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == before, "no descriptor is left")


@pytest.mark.parametrize(
    ("count", "first", "words"),
    [(3, 0, "3 segments for 2 sizes"), (1, 1, "segments from 1, out of order"), (65, 0, "more descriptors")],
)
def test_segments_that_do_not_fit_the_grant_are_refused_and_closed(tmp_path, count, first, words):
    """Too many, out of order, or more than a frame may carry."""
    tmp_path.chmod(0o700)
    sent = [os.memfd_create("x", os.MFD_CLOEXEC) for _ in range(count)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "cpu-0.sock"))
        os.chmod(tmp_path / "cpu-0.sock", 0o600)
        listener.listen(1)

        def serve():
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                connection.sendall(WELCOME)
                read_request(connection)
                connection.sendall(GRANT)
                socket.send_fds(connection, [encode(Segments(first), count)], sent)
                with contextlib.suppress(ConnectionResetError):
                    read_request(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        with open_session(tmp_path) as session:
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ProtocolError, match=words):
                session.map(FINGERPRINT, "zero_copy")
            assert len(os.listdir("/proc/self/fd")) == before
        thread.join()
    for each in sent:
        os.close(each)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (["close"], LostError),
        (["twice", "close"], LostError),
        (["twice", encode(Refusal("already_held", "map them"))], AlreadyHeldError),
        (["twice", encode(Refusal("still_loading", "wait"))], StillLoadingError),
        (["twice", encode(Refusal("memory", "unsealed"))], RefusedError),
        ([encode(Refusal("protocol", "no")), "close"], ProtocolError),
        (["twice", encode(Segments(0))], ProtocolError),
        (["twice", 1, encode(Done(), 1)], ProtocolError),
        (["twice"], TimeLimitError),
    ],
)
def test_an_answer_to_a_publication_that_goes_wrong_has_its_cause(scripted, steps, error):
    """Also a refusal that comes before everything is sent; the descriptors stay the caller's, and no other is left."""
    directory = scripted(publish=[WELCOME, *steps])
    before = len(os.listdir("/proc/self/fd"))
    with weights() as (message, descriptors):
        with pytest.raises(error):
            client.publish(directory, message, descriptors, connect_timeout_s=5, state_timeout_s=0.3)
        assert os.pread(descriptors[0], 1, 0) == b"\7"
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == before, "no descriptor is left")


def test_a_keeper_that_dies_in_the_middle_of_an_answer_is_lost(tmp_path):
    """SIGKILL between greeting and request."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        with open_session(one.socket_dir) as session:
            one.kill()
            with pytest.raises(LostError):
                session.receipts()


def test_a_keeper_that_hangs_costs_the_time_limit(tmp_path):
    """SIGSTOP: the connection is accepted by the kernel, and nothing comes."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        one.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeLimitError, match=r"no whole answer within 0\.\d+ s"):
            client.status(one.socket_dir, 0.3)
        with pytest.raises(TimeLimitError):
            open_session(one.socket_dir, connect_timeout_s=0.3)
        one.process.send_signal(signal.SIGCONT)
        assert client.status(one.socket_dir).state == "ready"


def test_a_full_queue_of_connections_is_waited_for_within_the_limit(tmp_path):
    """A keeper that does not accept is not taken for one that refuses."""
    tmp_path.chmod(0o700)
    path = str(tmp_path / "control.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            waiting.connect_ex(path)
        with pytest.raises(TimeLimitError, match=rf"{path}: no connection within 0\.3 s"):
            client.status(tmp_path, 0.3)


def test_a_loading_keeper_is_waited_for_and_said(tmp_path):
    """The engine waits, tells what for, and gets the weights; nothing else is loaded meanwhile."""
    with keeper(tmp_path, stop_at="progress") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        lines = []

        def say(line):
            lines.append(line)
            one.plan(fill=5)
            os.kill(int(one.stopped.read_text()), signal.SIGKILL)

        # The killed load fails; the next one, which the changed plan brings, is what is waited for.
        with pytest.raises(KeeperFailedError, match="ended by signal 9"):
            open_session(one.socket_dir, wait=say, state_timeout_s=60)
        assert len(lines) == 1
        assert lines[0].startswith("the keeper is loading: reading, 50 % (524.3 kB of 1.0 MB) (")
        one.wait_for_state("ready")
        open_session(one.socket_dir).close()


def test_a_load_that_ends_while_waiting_is_answered(tmp_path):
    """From the first try to the session without another call."""
    one = KeeperProcess(tmp_path, stop_at="hello")
    one.start()
    try:
        wait_for(one.stopped.exists, "the loader at its stage")
        resume = threading.Timer(0.5, os.kill, (int(one.stopped.read_text()), signal.SIGUSR1))
        resume.start()
        lines = []
        with open_session(one.socket_dir, wait=lines.append, state_timeout_s=60) as session:
            assert len(session.receipts()) == 1
        assert len(lines) == 1
    finally:
        one.kill()


def test_waiting_for_a_load_has_an_end(tmp_path):
    """With the stage and the progress it had then."""
    with keeper(tmp_path, stop_at="progress") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        with pytest.raises(StillLoadingError) as caught:
            open_session(one.socket_dir, state_timeout_s=0.3)
        assert str(caught.value) == (
            "the keeper is still loading after 0.3 s: reading, 50 % (524.3 kB of 1.0 MB); "
            "raise state_timeout_s or look into its log"
        )


def test_a_keeper_that_is_not_there_is_waited_for_only_on_request(tmp_path):
    """Without a fallback there is nothing better to do; with one the cause is told at once."""
    one = KeeperProcess(tmp_path, fill=1)
    with pytest.raises(NoSocketError):
        open_session(one.socket_dir, state_timeout_s=60)
    with pytest.raises(NoSocketError):
        open_session(one.socket_dir, state_timeout_s=0.3, wait_for_keeper=True)
    lines = []

    def say(line):
        lines.append(line)
        if one.process is None:
            one.start()

    try:
        with open_session(one.socket_dir, state_timeout_s=60, wait_for_keeper=True, wait=say) as session:
            assert len(session.receipts()) == 1
        assert lines[0].startswith("no keeper answers yet (")
        one.kill()
        one.process = None
        lines.clear()
        with open_session(one.socket_dir, state_timeout_s=60, wait_for_keeper=True, wait=say) as session:
            assert len(session.receipts()) == 1
        assert lines[0].startswith("no keeper answers yet (")
    finally:
        one.kill()


def test_another_device_is_a_mismatch_that_names_both(tmp_path):
    """G04: two cards that are both index 0 inside their containers."""
    with keeper(tmp_path, device="GPU-aaaa") as one:
        one.wait_for_state("ready")
        both = r"^device: the keeper has GPU-aaaa, the engine has GPU-bbbb; GPU-bbbb: start the engine on"
        with pytest.raises(MismatchError, match=both):
            client.open_session(one.socket_dir, "GPU-bbbb")


def test_a_given_socket_path_counts_in_place_of_the_directory(tmp_path):
    """Its directory has the control socket."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        path = f"{one.socket_dir}/cpu-0.sock"
        client.open_session("/nonexistent", "ignored", socket_path=path).close()
        client.release(one.socket_dir)
        with pytest.raises(NotLoadedError):
            client.open_session("/nonexistent", "ignored", socket_path=path)
        with pytest.raises(SocketPathError):
            client.open_session("/nonexistent", "ignored", socket_path="/" + "x" * 107)


def test_a_ready_keeper_whose_socket_refuses_is_not_waited_for_long(scripted):
    """Ready, but full: the cause is told after the time to connect, not after the time to load."""
    directory = scripted(engine=[encode(Refusal("refused", "full"))])
    status = Status("ready", "0.1.0", 1, 0.0, "", 0, held=held("cpu-0"))
    scripted(control=[WELCOME, encode(status)])
    with pytest.raises(RefusedError, match=r"^full$"):
        open_session(directory, connect_timeout_s=0.5, state_timeout_s=600)


def held(device):
    return Held(1, "m", "f", 1, {device: 1}, 1, "host", 1.0, 1.0)


def test_a_status_that_is_none_is_a_protocol_error(scripted):
    """Whatever answers on the control socket has to speak the protocol."""
    for answer in (encode(Done()), encode(Receipts(()))):
        directory = scripted(control=[WELCOME, answer])
        with pytest.raises(ProtocolError, match="which is out of place"):
            client.status(directory)
        os.unlink(f"{directory}/control.sock")


def test_every_cause_of_an_engine_is_an_error_that_allows_a_fallback(tmp_path):
    """Whoever catches CacheUnusableError has caught them all; a wrong setting is none of them."""
    causes = (NoSocketError, RefusedError, WrongOwnerError, StillLoadingError, KeeperFailedError, NotLoadedError)
    causes += (MismatchError, LostError, TimeLimitError, ProtocolError)
    assert all(issubclass(cause, CacheUnusableError) for cause in causes)
    assert len({cause.code for cause in causes}) == len(causes)
    assert not issubclass(ConfigError, CacheUnusableError)
    with pytest.raises(WeightkeeperError):
        client.report(tmp_path, Report("mapped"))


def test_sessions_leave_no_descriptor_behind(tmp_path):
    """Opened, refused and closed sessions alike."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with open_session(one.socket_dir) as session:
                for descriptor in session.map(FINGERPRINT, "zero_copy").descriptors:
                    os.close(descriptor)
            with open_session(one.socket_dir) as session, pytest.raises(MismatchError):
                session.map({}, "copy")
            with pytest.raises(MismatchError):
                client.open_session(one.socket_dir, "cpu-1")
        assert len(os.listdir("/proc/self/fd")) == before
