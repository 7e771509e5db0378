"""What hostile, broken and dying publishers can do to a keeper that holds weights: nothing that others notice."""

import array
import contextlib
import os
import resource
import signal
import socket
import threading

import msgspec
import pytest
from keepers import as_user, connected, descriptors_of, keeper, settled_descriptors, wait_for
from publishing_engine import engine, publish, send_segments, weights

from weightkeeper import client
from weightkeeper.errors import LostError, RefusedError
from weightkeeper.frames import HEADER, encode
from weightkeeper.offering import Source, offer_of
from weightkeeper.protocol import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    VERSION,
    Done,
    Hello,
    MapRequest,
    Progress,
    Segments,
    StatusRequest,
)

HELD = {"dtype": "held"}
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's identity, which only root can")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One keeper that holds published weights and has to survive all of it."""
    with keeper(tmp_path_factory.mktemp("one"), with_config=False) as one:
        one.wait_for_state("empty")
        publish(one.socket_dir, name="first", fingerprint=HELD).close()
        started = one.status().started_at
        yield one
        assert "broke on a fault of our own" not in one.text()
        assert "Traceback" not in one.text()
        assert one.status().started_at == started
        assert one.stop() == 0


@pytest.fixture(autouse=True)
def nothing_is_left(one):
    """After each attack: what was held is served, and descriptors and memory are as before."""
    wait_for(lambda: one.status().leases == (), "no lease")
    before = settled_descriptors(one.process.pid, one.socket_dir)
    yield
    assert served(one)
    wait_for(lambda: one.status().leases == (), "the end of the honest engine's lease")
    wait_for(lambda: settled_descriptors(one.process.pid, one.socket_dir) == before, "descriptors as before")
    state = one.status()
    assert (state.held.generation, state.held.devices, state.releasing) == (1, {"cpu-0": 1 << 20}, ())
    assert state.own_bytes < 60_000_000


def served(one):
    with client.open_session(one.socket_dir, "cpu-0") as session:
        (descriptor,) = session.map(HELD, "zero_copy").descriptors
        try:
            return os.pread(descriptor, 4, 0) == b"\7\7\7\7"
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def raw(one):
    """A connected socket without any manners."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(f"{one.socket_dir}/publish.sock")
        yield connection


def last_answer(connection):
    """The last message before the keeper closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    found = b""
    while data:
        nbytes, _ = HEADER.unpack(data[: HEADER.size])
        found = data[HEADER.size : HEADER.size + nbytes]
        data = data[HEADER.size + nbytes :]
    return found


HELLO = encode(Hello(VERSION, "engine", "attacker"))

FIRST_MESSAGES = {
    "4 GiB before the greeting": (b"\xff\xff\xff\xff\0\0", "a frame of 4294967295 bytes; 1 to 262144 are allowed"),
    "a large greeting": (HEADER.pack(MAX_REQUEST_BYTES + 1, 0), "a frame of 262145 bytes; 1 to 262144 are allowed"),
    "a greeting with descriptors": (HEADER.pack(2, 1) + b"{}", "a frame announces 1 descriptors and 0 came with it"),
    "another role": (encode(Hello(VERSION, "control")), "this socket is for the role engine, not control"),
    "another version": (encode(Hello(2, "engine")), f"this side speaks version {VERSION} and the client 2"),
    "a byte too long": (
        HELLO + HEADER.pack(MAX_ANSWER_BYTES + 1, 0),
        f"a frame of {MAX_ANSWER_BYTES + 1} bytes; 1 to {MAX_ANSWER_BYTES} are allowed",
    ),
    "a pickle": (HELLO + HEADER.pack(5, 0) + b"\x80\x04\x95\x00.", "a message cannot be read"),
    "deep JSON": (
        HELLO + HEADER.pack(200_031, 0) + b'{"type":"publish","device":"' + b"[" * 200_003,
        "a message cannot be read",
    ),
    "a status request": (HELLO + encode(StatusRequest()), "a message cannot be read: Invalid value 'statusrequest'"),
    "a map request": (HELLO + encode(MapRequest(HELD, "copy")), "a message cannot be read: Invalid value 'maprequest'"),
    "progress": (HELLO + encode(Progress("x")), "a message cannot be read: Invalid value 'progress'"),
    "segments first": (HELLO + encode(Segments(0)), "expected a Publish without descriptors, got Segments"),
}


@pytest.mark.parametrize("name", FIRST_MESSAGES)
def test_a_bad_first_message_is_refused_with_its_fault(one, name):
    """Code, words, and the end of the connection; the large limits hold only after the greeting."""
    data, words = FIRST_MESSAGES[name]
    with raw(one) as connection:
        connection.sendall(data)
        answer = last_answer(connection)
        assert answer.startswith(b'{"type":"refusal","code":"protocol","message":')
        assert words.encode() in answer


@pytest.mark.parametrize("count", [1, 64, 200])
@pytest.mark.parametrize("when", ["greeting", "publish", "middle of a publish"])
def test_descriptors_where_none_belong_are_closed_and_refused(one, when, count):
    """With the greeting, with the Publish, and in the middle of a frame."""
    with weights(fingerprint={}) as (message, _), raw(one) as connection:
        sent = [os.dup(connection.fileno()) for _ in range(count)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))]
        if when == "greeting":
            connection.sendmsg([HEADER.pack(len(HELLO) - HEADER.size, count) + HELLO[HEADER.size :]], ancillary)
        else:
            connection.sendall(HELLO)
            frame = encode(message, count if when == "publish" else 0)
            cut = 10 if when == "middle of a publish" else 0
            if cut:
                connection.sendall(frame[:cut])
            connection.sendmsg([frame[cut:]], ancillary)
        assert b'"code":"protocol"' in last_answer(connection)
        for descriptor in sent:
            os.close(descriptor)


def out_of_order(channel, message, descriptors):
    channel.send(Segments(1), descriptors[1:2])


def none_at_all(channel, message, descriptors):
    channel.send(Segments(0))


def too_many(channel, message, descriptors):
    channel.send(Segments(0), descriptors * 2)


def more_than_a_frame_may_carry(channel, message, descriptors):
    channel.send(Segments(0), descriptors * 17)


def the_same_twice(channel, message, descriptors):
    channel.send(Segments(0), descriptors[:2])
    channel.send(Segments(0), descriptors[:2])


def another_publish(channel, message, descriptors):
    channel.send(Segments(0), descriptors[:2])
    channel.send(message)


def descriptors_beside_another_publish(channel, message, descriptors):
    channel.send(message, descriptors)


def a_pipe_among_them(channel, message, descriptors):
    reading, writing = os.pipe()
    try:
        channel.send(Segments(0), [*descriptors[:3], reading])
    finally:
        os.close(reading)
        os.close(writing)


def sockets_of_the_keepers_own(channel, message, descriptors):
    pair = socket.socketpair()
    channel.send(Segments(0), [each.fileno() for each in pair])
    for each in pair:
        each.close()


SEGMENTS = {
    out_of_order: ("protocol", "1 segment(s) from number 1 on cpu-7; 0 of 4 are here"),
    none_at_all: ("protocol", "0 segment(s) from number 0 on cpu-7; 0 of 4 are here"),
    too_many: ("protocol", "8 segment(s) from number 0 on cpu-7; 0 of 4 are here"),
    more_than_a_frame_may_carry: ("protocol", "more descriptors arrived beside a frame than the 64 allowed"),
    the_same_twice: ("protocol", "2 segment(s) from number 0 on cpu-7; 2 of 4 are here"),
    another_publish: ("protocol", "expected the segments of cpu-7, got Publish"),
    descriptors_beside_another_publish: ("protocol", "expected the segments of cpu-7, got Publish"),
    a_pipe_among_them: ("memory", "expected sealed shared memory"),
    sockets_of_the_keepers_own: ("memory", "expected sealed shared memory"),
}


@pytest.mark.parametrize("attack", SEGMENTS, ids=lambda attack: attack.__name__)
def test_segments_that_do_not_fit_are_closed_and_refused(one, attack):
    """Whatever came before them goes, too."""
    code, words = SEGMENTS[attack]
    with (
        weights(segments=4, nbytes=4096, device="cpu-7") as (message, descriptors),
        connected(f"{one.socket_dir}/publish.sock", "engine", "attacker") as channel,
    ):
        channel.send(message)
        attack(channel, message, descriptors)
        answer = channel.receive().message
        assert (answer.code, words in answer.message) == (code, True)
        with pytest.raises(LostError):
            channel.receive()


def whole(message, descriptors):
    """All that a publisher of four segments sends, each step with its descriptors."""
    return [(HELLO, []), (encode(message), []), *((encode(Segments(n), 1), [descriptors[n]]) for n in range(4))]


def play(connection, steps, cut):
    """The first `cut` steps and half of the next one; then nothing more."""
    for position, (data, descriptors) in enumerate(steps[: cut + 1]):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        connection.sendmsg([data if position < cut else data[: len(data) // 2]], ancillary)


@pytest.mark.parametrize("cut", range(6))
def test_a_publisher_that_ends_at_any_step_leaves_nothing(one, cut):
    """Between frames and in the middle of each."""
    with weights(segments=4, nbytes=4096, device="cpu-7") as (message, descriptors):
        steps = whole(message, descriptors)
        for _ in range(5):
            with raw(one) as connection:
                play(connection, steps, cut)
    assert one.status().state == "ready"


def test_silent_publishers_are_refused_within_the_limit_and_others_are_served_meanwhile(one):
    """At every step; honest engines and honest publishers notice nothing."""
    with weights(segments=4, nbytes=4096, device="cpu-7") as (message, descriptors), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw(one)) for _ in range(6)]
        for cut, connection in enumerate(connections):
            play(connection, whole(message, descriptors), cut)
        over, answers = threading.Event(), []

        def honest():
            while not over.is_set():
                with publish(one.socket_dir, 1, ranks=2, nbytes=4096):
                    answers.append((client.status(one.socket_dir).state, served(one)))

        others = threading.Thread(target=honest)
        others.start()
        refusals = [last_answer(connection) for connection in connections]
        over.set()
        others.join()
    assert all(b'"code":"timeout"' in refusal for refusal in refusals)
    assert len(answers) > 10
    assert set(answers) == {("ready", True)}


def test_a_killed_publisher_leaves_nothing(one):
    """A process that is gone in the middle of its work, again and again, at another moment each time."""
    for number in range(5):
        with engine(one.socket_dir, 0, "victim", ranks=2, segments=100, nbytes=4096, fingerprint={}) as victim:
            if number % 2:
                assert victim.said() == "published"
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait(30)


def test_a_crowd_of_half_publishers_keeps_nobody_out(one):
    """Their number and their descriptors are bounded; engines and people do not share their places."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    before = settled_descriptors(one.process.pid, one.socket_dir)
    with contextlib.ExitStack() as crowd:
        for _ in range(200):
            connection = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(f"{one.socket_dir}/publish.sock")
        assert served(one)
        assert descriptors_of(one.process.pid) <= before + 65

        def taken():
            with contextlib.suppress(RefusedError):
                publish(one.socket_dir, ranks=2).close()
                return True

        assert wait_for(taken, "an honest publisher in the crowd")


def test_parts_that_wait_for_ever_cannot_take_all_descriptors(one):
    """Thousands of segments of models that are never complete: the next one is refused, what is held is served."""
    with weights(segments=1, nbytes=4096, ranks=2) as (message, descriptors), contextlib.ExitStack() as crowd:
        large = msgspec.structs.replace(message, sizes=message.sizes * 1400, device="cpu-7")
        for number in range(3):
            channel = crowd.enter_context(connected(f"{one.socket_dir}/publish.sock", "engine", f"hog-{number}"))
            channel.send(large)
            with contextlib.suppress(LostError):  # the refusal may come before the end of the segments
                send_segments(channel, descriptors * 1400)
            answer = channel.receive().message
            if number < 2:
                assert answer == Done()
        assert answer.code == "refused"
        assert "1400 segments on cpu-7 besides 2800 of other engines that are not complete yet" in answer.message
        assert served(one)


OFFERS = {
    "other weights": ({"fingerprint": {"dtype": "x"}}, {}, "refused", "the keeper holds other weights by now"),
    "other weights, mapped in a far future": (
        {"fingerprint": {"dtype": "x"}}, {"mapped_at": 1e12}, "refused", "the keeper holds other weights by now",
    ),
    "its own memory as what is held": ({}, {}, "already_held", "are already held on cpu-0 by another engine's copy"),
    "less memory than is held": ({"nbytes": 4096}, {}, "already_held", "are already held on cpu-0 by another engine's"),
    "two segments for one": ({"segments": 2}, {}, "already_held", "are already held on cpu-0 by another engine's copy"),
    "mapped before time": ({}, {"mapped_at": -1.0}, "protocol", "was mapped at -1.0, which cannot be"),
    "mapped never": ({}, {"mapped_at": 1e300}, "protocol", "was mapped at 1e+300, which cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERS)
def test_what_an_engine_says_that_it_mapped_replaces_nothing_and_passes_for_nothing(one, name):
    """An offer has all its segments looked at before it is believed, and none of them stays."""
    plan, changes, code, words = OFFERS[name]
    with (
        weights(**({"fingerprint": HELD, "changes": {"mapped_at": 1.0} | changes} | plan)) as (message, descriptors),
        connected(f"{one.socket_dir}/publish.sock", "engine", "attacker") as channel,
    ):
        channel.send(message)
        with contextlib.suppress(LostError):
            send_segments(channel, descriptors)
        answer = channel.receive().message
        assert (answer.code, words in answer.message) == (code, True), answer


def test_held_memory_can_be_offered_over_and_over_and_is_held_once(one):
    """Each time it is a lease, with a pipe among its segments it is none; the keeper's descriptors stay as many."""
    with client.open_session(one.socket_dir, "cpu-0") as session:
        granted = session.map(HELD, "zero_copy")
    message = weights_message(granted)
    for _ in range(20):
        with client.publish(one.socket_dir, message, granted.descriptors, name="again"):
            assert [lease.name for lease in one.status().leases if lease.name] == ["again"]
        wait_for(lambda: one.status().leases == (), "the end of the lease")
    pipe = os.pipe()
    with pytest.raises(RefusedError, match="expected sealed shared memory"):
        client.publish(one.socket_dir, message, pipe[:1])
    for each in (*pipe, *granted.descriptors):
        os.close(each)


def weights_message(granted):
    """What an engine would say of it."""
    return offer_of(granted, Source("", "cpu-0", 0, 1, "/models/tiny", (), "", 1.0)).message


def test_names_cannot_forge_log_lines_or_grow_without_bound(one):
    """Of the engine and of its model."""
    forged = "x\n2026-01-01 INFO weightkeeper.keeper: ready\x1b[31m" + "y" * 100_000
    with publish(one.socket_dir, name=forged, ranks=2, model=forged):
        one.wait_for_text("rank 0 of 2: x?2026-01-01 INFO weightkeeper.keeper: ready?[31myyy")
    assert "\nINFO weightkeeper.keeper: ready" not in one.text()
    assert "\x1b" not in one.text()
    assert all(len(line) < 2000 for line in one.text().splitlines())


def test_a_message_as_large_as_a_frame_costs_its_memory_only_for_a_moment(one):
    """Sixty MiB of text that is no layout: refused with its fault, and the keeper is as small as before."""
    body = b'{"type":"publish","model":"' + b"x" * (60 << 20)
    with raw(one) as connection:
        connection.sendall(HELLO + HEADER.pack(len(body), 0) + body)
        assert b"a message cannot be read" in last_answer(connection)


@AS_ROOT
def test_another_user_cannot_publish(one):
    """By the modes first, and by the keeper where those were loosened."""
    paths, parent = [f"{one.socket_dir}/publish.sock", one.socket_dir], one.directory
    while parent.name.startswith(("one", "pytest")):
        paths.append(str(parent))
        parent = parent.parent
    modes = [(path, os.stat(path).st_mode & 0o7777) for path in paths]

    def attempt():
        publish(one.socket_dir, ranks=2)

    def without_manners():
        with raw(one) as connection:
            return last_answer(connection)

    assert as_user(1000, attempt).startswith("WrongOwnerError: ")
    try:
        for path, _ in modes:
            os.chmod(path, 0o777)
        answer = as_user(1000, without_manners)
    finally:
        for path, mode in modes:
            os.chmod(path, mode)
    assert '"code":"wrong_owner"' in answer
