"""Frames: what passes, what is refused before it costs anything, and what happens to descriptors on the way."""

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import threading

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightkeeper.channel import AsyncChannel
from weightkeeper.errors import LostError, ProtocolError, TimeLimitError
from weightkeeper.frames import HEADER, Channel, Decoder, Limits, encode
from weightkeeper.layout import Layout, Tensor
from weightkeeper.protocol import (
    MAX_DESCRIPTORS,
    Done,
    FromKeeper,
    Grant,
    Hello,
    Mismatch,
    Receipts,
    Refusal,
    Report,
    Segments,
    StatusRequest,
    ToKeeper,
    Welcome,
)

NO_DESCRIPTORS = Limits(ToKeeper, 1000, 0)


def rights(*descriptors):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]


def pipes(count):
    """`count` open descriptors."""
    found = []
    for _ in range(-(-count // 2)):
        found += os.pipe()
    for extra in found[count:]:
        os.close(extra)
    return found[:count]


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def pair(limits=None, seconds=10.0):
    """A raw socket, and a channel at its other end."""
    raw, other = socket.socketpair()
    raw.settimeout(seconds)
    channel = Channel(other, limits or Limits(ToKeeper | FromKeeper))
    try:
        yield raw, channel
    finally:
        raw.close()
        channel.close()


def send(raw, message, descriptors=()):
    """One frame in one packet."""
    raw.sendmsg(
        [encode(message, len(descriptors))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    )


def frame(body: bytes, descriptors=0, length=None):
    return struct.pack("!IH", len(body) if length is None else length, descriptors) + body


def test_a_frame_is_its_length_a_count_and_json():
    """The bytes on the wire are those of the protocol's first paragraph."""
    body = b'{"type":"hello","version":1,"role":"engine","name":"a"}'
    assert len(body) == 55
    assert encode(Hello(1, "engine", "a"), 3) == b"\x00\x00\x00\x37\x00\x03" + body


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "engine", "é\n\0"),
        StatusRequest(),
        Done(""),
        Refusal("mismatch", "x"),
        Segments(5),
        Receipts(()),
        Mismatch(()),
        Report("fallback", phases={"map": 0.5}),
        Grant(1, {"a": "b"}, "host", (4096,), Layout((Tensor("w", "parameter", "int8", (1,), (1,), 0),), {}, {}, 1)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message):
    """Every message is the same after a trip over a socket."""
    with pair() as (raw, channel):
        raw.sendall(encode(message))
        assert channel.receive().message == message
        channel.send(message)
        assert raw.recv(65536) == encode(message)


def test_descriptors_arrive_beside_their_frame_and_end_at_exec():
    """The most that one frame may carry arrive in order, each close-on-exec."""
    sent = pipes(MAX_DESCRIPTORS)
    with pair() as (raw, channel):
        for descriptor in sent:
            os.set_inheritable(descriptor, True)
        send(raw, Segments(0), sent)
        found = channel.receive()
        assert found.message == Segments(0)
        assert [os.fstat(each).st_ino for each in found.descriptors] == [os.fstat(each).st_ino for each in sent]
        assert all(fcntl.fcntl(each, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for each in found.descriptors)
        for each in sent + found.descriptors:
            os.close(each)


def test_two_frames_in_one_packet_are_two_frames():
    """A reader takes no byte of the next frame."""
    with pair() as (raw, channel):
        raw.sendall(encode(Segments(1)) + encode(Segments(2)))
        assert [channel.receive().message.first, channel.receive().message.first] == [1, 2]


def test_a_frame_of_sixteen_megabytes_passes():
    """Neither side needs the whole frame to fit into the socket's buffer."""
    message = Done("x" * (16 << 20))
    with pair() as (raw, channel):
        sender = threading.Thread(target=raw.sendall, args=(encode(message),))
        sender.start()
        assert channel.receive().message == message
        sender.join()


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(
        st.builds(Report, event=st.just("fallback"), message=st.text(max_size=60)), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(1, 40), min_size=1),
)
def test_frames_do_not_depend_on_how_bytes_are_cut(messages, cuts):
    """However a stream is cut into reads, the same messages come out."""
    stream = b"".join(encode(message) for message in messages)
    decoder, found, position, turn = Decoder(Limits(ToKeeper)), [], 0, 0
    while position < len(stream):
        size = min(decoder.wanted, cuts[turn % len(cuts)], len(stream) - position)
        done = decoder.feed(stream[position : position + size], [], 0)
        position, turn = position + size, turn + 1
        if done:
            found.append(done.message)
    assert found == messages
    assert decoder.is_idle


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), count=st.integers(0, 3), flags=st.sampled_from([0, socket.MSG_CTRUNC]))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(data, count, flags):
    """Nothing but our own errors comes out, and no descriptor is left behind."""
    decoder, descriptors = Decoder(Limits(ToKeeper, 150, 2)), pipes(count)
    given_out, first = [], True
    with contextlib.suppress(ProtocolError, LostError):
        while data:
            size = decoder.wanted
            found = decoder.feed(data[:size], rights(*descriptors) if first else [], flags if first else 0)
            data, first = data[size:], False
            given_out += found.descriptors if found else []
        decoder.feed(b"", [], 0)
    decoder.abandon()
    for each in given_out:
        os.close(each)
    assert not any(is_open(each) for each in descriptors)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )
)
def test_arbitrary_json_is_a_message_or_a_protocol_error(value):
    """A body that is JSON of another shape is refused."""
    if isinstance(value, dict):
        value = {"type": "report", **value}
    with contextlib.suppress(ProtocolError):
        decoder = Decoder(Limits(ToKeeper))
        decoder.feed(frame(json.dumps(value).encode())[: HEADER.size], [], 0)
        decoder.feed(json.dumps(value).encode(), [], 0)


REFUSED = {
    "4 GiB": (frame(b"", length=0xFFFFFFFF), "a frame of 4294967295 bytes; 1 to 1000 are allowed"),
    "one over": (frame(b"", length=1001), "a frame of 1001 bytes; 1 to 1000 are allowed"),
    "no body": (frame(b""), "a frame of 0 bytes; 1 to 1000 are allowed"),
    "descriptors announced": (frame(b"{}", 2), "a frame announces 2 descriptors and 0 came with it"),
    "no JSON": (frame(b"\x80\x04K\x01."), "a message cannot be read: "),
    "no UTF-8": (frame(b'{"type":"done","message":"\xff"}'), "a message cannot be read: "),
    "no type": (frame(b"{}"), "a message cannot be read: Object missing required field `type`"),
    "unknown type": (frame(b'{"type":"shutdown"}'), "a message cannot be read: Invalid value 'shutdown'"),
    "no object": (frame(b"[]"), "a message cannot be read: Expected `object`, got `array`"),
    "wrong field": (
        frame(b'{"type":"hello","version":"1","role":"engine"}'),
        "a message cannot be read: Expected `int`",
    ),
    "other role": (
        frame(b'{"type":"hello","version":1,"role":"root"}'),
        "a message cannot be read: Invalid enum value",
    ),
    "deep": (frame(b'{"type":"statusrequest","x":' + b"[" * 900 + b"]" * 60 + b"}"), "a message cannot be read: "),
    "trailing": (frame(b'{"type":"statusrequest"}{}'), "a message cannot be read: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_frame_is_refused_with_its_fault(name):
    """Each fault has its own words."""
    data, message = REFUSED[name]
    with pair(NO_DESCRIPTORS) as (raw, channel):
        raw.sendall(data)
        with pytest.raises(ProtocolError) as caught:
            channel.receive()
        assert str(caught.value).startswith(message)


def test_json_of_any_depth_is_refused_not_crashed_on():
    """A hundred thousand brackets neither overflow the stack nor pass."""
    body = b'{"type":"statusrequest","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pair(Limits(ToKeeper, 1 << 20, 0)) as (raw, channel):
        sender = threading.Thread(target=raw.sendall, args=(frame(body),))
        sender.start()
        with pytest.raises(ProtocolError, match="a message cannot be read: "):
            channel.receive()
        sender.join()


def test_a_length_over_the_limit_is_refused_before_its_body_is_read():
    """The header alone is enough, and nothing of that size is allocated."""
    decoder = Decoder(Limits(ToKeeper, 1000, 0))
    with pytest.raises(ProtocolError, match="a frame of 1001 bytes"):
        decoder.feed(struct.pack("!IH", 1001, 0), [], 0)


@pytest.mark.parametrize(
    ("limit", "count", "announced", "message"),
    [
        (0, 1, 0, "more descriptors arrived beside a frame than the 0 allowed"),
        (0, 1, 1, "more descriptors arrived beside a frame than the 0 allowed"),
        (2, 3, 3, "more descriptors arrived beside a frame than the 2 allowed"),
        (2, 2, 1, "a frame announces 1 descriptors and 2 came with it"),
        (2, 1, 2, "a frame announces 2 descriptors and 1 came with it"),
        (2, 200, 200, "more descriptors arrived beside a frame than the 2 allowed"),
    ],
)
def test_surplus_and_missing_descriptors_are_refused_and_closed(limit, count, announced, message):
    """Descriptors where none belong, too many, too few, or cut off: none of them stays open."""
    sent = pipes(count)
    with pair(Limits(ToKeeper, 1000, limit)) as (raw, channel):
        before = len(os.listdir("/proc/self/fd"))
        body = b'{"type":"statusrequest"}'
        raw.sendmsg([frame(body, announced)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))])
        with pytest.raises(ProtocolError, match=message):
            channel.receive()
        assert len(os.listdir("/proc/self/fd")) == before
    for each in sent:
        os.close(each)


def test_descriptors_in_the_middle_of_a_frame_are_refused_and_closed():
    """They belong beside the header and nowhere else."""
    sent = pipes(2)
    with pair(Limits(ToKeeper, 1000, 2)) as (raw, channel):
        before = len(os.listdir("/proc/self/fd"))
        whole = frame(b'{"type":"statusrequest"}')
        raw.sendall(whole[:10])
        raw.sendmsg([whole[10:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))])
        with pytest.raises(ProtocolError, match="descriptors arrived in the middle of a frame"):
            channel.receive()
        assert len(os.listdir("/proc/self/fd")) == before
    for each in sent:
        os.close(each)


def test_the_end_of_a_stream_is_lost():
    """Between frames and inside one, each in its own words."""
    with pair() as (raw, channel):
        raw.close()
        with pytest.raises(LostError, match="the other side closed the connection instead of answering"):
            channel.receive()
    with pair() as (raw, channel):
        raw.sendall(encode(Welcome(1))[:9])
        raw.close()
        with pytest.raises(LostError, match="the other side closed the connection in the middle of a message"):
            channel.receive()
    with pair() as (raw, channel):
        raw.close()
        with pytest.raises(LostError, match="the connection broke off while sending Done: Broken pipe"):
            channel.send(Done())


def test_a_silent_peer_costs_the_time_limit_and_no_more():
    """No byte at all ends in a time limit."""
    with pair() as (_, channel), pytest.raises(TimeLimitError, match=r"no whole answer within 0\.1 s"):
        channel.receive(0.1)


class Drip(threading.Thread):
    """Sends a frame one byte at a time, one each 20 ms, until it is told to stop."""

    def __init__(self, connection, data):
        super().__init__()
        self.connection, self.data, self.over, self.sent = connection, data, threading.Event(), 0
        self.start()

    def run(self):
        for index in range(len(self.data)):
            if self.over.wait(0.02):
                return
            with contextlib.suppress(OSError):
                self.connection.send(self.data[index : index + 1])
                self.sent += 1


def test_a_peer_that_drips_is_cut_off_in_the_middle_of_its_frame():
    """The time limit is for the whole frame; every byte that comes in does not start it anew."""
    with pair() as (raw, channel):
        drip = Drip(raw, encode(Done("x" * 4000)))
        with pytest.raises(TimeLimitError):
            channel.receive(0.5)
        drip.over.set()
        drip.join()
        assert 0 < drip.sent < 4000


def test_a_peer_that_does_not_read_costs_the_time_limit():
    """Sending has a limit, too."""
    with pair() as (_, channel), pytest.raises(TimeLimitError, match=r"a Done message was not taken within 0\.2 s"):
        channel.send(Done("x" * (4 << 20)), seconds=0.2)


def test_what_no_frame_can_hold_is_refused_by_its_sender():
    """Over the limit, or text that JSON cannot carry."""
    with pytest.raises(ProtocolError, match="a Done message has 1025 bytes, the limit is 1000"):
        encode(Done("x" * 997), max_bytes=1000)
    with pytest.raises(ProtocolError, match="a Done message cannot be sent"):
        encode(Done("\ud800"))


def in_loop(work, limits=None):
    """Run `work(channel, raw socket)` in an event loop, with an AsyncChannel."""

    async def main():
        raw, other = socket.socketpair()
        other.setblocking(False)
        channel = AsyncChannel(other, limits or Limits(ToKeeper))
        try:
            with raw:
                return await work(channel, raw)
        finally:
            channel.close()

    return anyio.run(main)


def test_the_keepers_end_reads_the_same_frames():
    """Message, then message with descriptors, then None at the end of the stream."""
    sent = pipes(3)

    async def work(channel, raw):
        raw.sendall(encode(StatusRequest()))
        send(raw, Segments(1), sent)
        raw.shutdown(socket.SHUT_WR)
        return [await channel.receive(5), await channel.receive(5), await channel.receive(5)]

    first, second, end = in_loop(work)
    assert (first.message, first.descriptors, second.message, end) == (StatusRequest(), [], Segments(1), None)
    assert len(second.descriptors) == 3
    for each in sent + second.descriptors:
        os.close(each)


def test_the_keepers_end_waits_for_the_first_byte_and_then_for_the_frame():
    """Both limits hold: nothing at all, and a frame that drips."""

    async def silent(channel, raw):
        await channel.receive(0.05)

    with pytest.raises(TimeLimitError):
        in_loop(silent)

    async def dripping(channel, raw):
        drip = Drip(raw, encode(Hello(1, "engine", "x" * 2000)))
        try:
            await channel.receive(None, seconds=0.3)
        finally:
            drip.over.set()
            drip.join()

    with pytest.raises(TimeLimitError):
        in_loop(dripping)


def test_the_keepers_end_stops_sending_to_a_peer_that_does_not_read():
    """A large answer to nobody ends in a time limit."""

    async def work(channel, raw):
        await channel.send(Done("x" * (4 << 20)), seconds=0.2)

    with pytest.raises(TimeLimitError, match=r"a frame was not taken within 0\.2 s"):
        in_loop(work)


def test_the_keepers_end_closes_descriptors_where_none_belong():
    """What a client sends beside a request is closed at once."""
    sent = pipes(1)

    async def work(channel, raw):
        before = len(os.listdir("/proc/self/fd"))
        send(raw, StatusRequest(), sent)
        with pytest.raises(ProtocolError, match="more descriptors arrived beside a frame than the 0 allowed"):
            await channel.receive(5)
        return len(os.listdir("/proc/self/fd")) - before

    assert in_loop(work, NO_DESCRIPTORS) == 0
    os.close(sent[0])
