"""Engines that hand their weights to a keeper: what is offered when, who is refused with which code. Real processes."""

import ctypes
import os
import re
import resource
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from keepers import KeeperProcess, connected, keeper, links_of, settled_descriptors, wait_for
from publishing_engine import engine, publish, send_segments, weights

from weightkeeper import client
from weightkeeper.errors import (
    AlreadyHeldError,
    LostError,
    NoSocketError,
    NotLoadedError,
    ProtocolError,
    RefusedError,
    StillLoadingError,
    WrongOwnerError,
)
from weightkeeper.memory.host import HostMemory
from weightkeeper.protocol import Done, Refusal, ReleaseRequest, Segments

MEGABYTE = 1 << 20
FINGERPRINT = {"dtype": "bfloat16"}
OTHER = {"dtype": "float16"}
NOTHING_OFFERED = ["control.sock", "keeper.lock", "publish.sock"]


@pytest.fixture
def one(tmp_path):
    """A keeper that was started with nothing but its socket directory."""
    with keeper(tmp_path, with_config=False) as one:
        one.wait_for_state("empty")
        yield one
        assert "Traceback" not in one.text()


def mapped(one, device="cpu-0", fields=FINGERPRINT, name="second"):
    """All bytes of a device's weights, read through a mapping of another engine's."""
    with client.open_session(one.socket_dir, device, name=name) as session:
        granted = session.map(fields, "zero_copy")
        region = HostMemory().map(granted.descriptors, granted.grant.sizes)
        found = ctypes.string_at(region.address, region.nbytes)
        region.close()
        for descriptor in granted.descriptors:
            os.close(descriptor)
    return found


def memory_of(one):
    """How many segments of weights the keeper has a hold on."""
    return sum("memfd:weightkeeper" in link for link in links_of(one.process.pid))


def refusal_on(channel):
    """What a keeper says to an engine that waits."""
    return channel.receive(30).message


def published_by_hand(channel, rank=0, **plan):
    """Publish on a channel whose end the test wants to see."""
    with weights(rank, **plan) as (message, descriptors):
        channel.send(message)
        send_segments(channel, descriptors)
        assert channel.receive().message == Done()


def test_the_first_engine_publishes_and_the_second_maps_the_same_bytes(one):
    """State, lease, sockets and log lines; the publisher computes on, the other has every byte."""
    with engine(one.socket_dir, name="vllm-a", segments=3, nbytes=4096, fingerprint=FINGERPRINT) as first:
        assert first.said() == "published"
        state = one.status()
        assert (state.state, state.loads, state.failure, state.config) == ("ready", 0, "", "")
        assert (state.held.model, state.held.nbytes, state.held.tensors) == ("/models/tiny", 3 * 4096, 1)
        assert (state.held.devices, state.held.kind, state.held.generation) == ({"cpu-0": 3 * 4096}, "host", 1)
        (lease,) = state.leases
        assert (lease.name, lease.device, lease.mode, lease.generation) == ("vllm-a", "cpu-0", "zero_copy", 1)
        assert (lease.pid, lease.uid) == (first.process.pid, os.geteuid())
        assert one.names() == ["control.sock", "cpu-0.sock", "keeper.lock", "publish.sock"]
        assert mapped(one) == b"\0" * 4096 + b"\1" * 4096 + b"\2" * 4096
        first.end()
        wait_for(lambda: one.status().leases == (), "the end of the publisher's lease")
    assert one.stop() == 0
    assert one.names() == ["keeper.lock"]
    assert [re.sub(r"\d+\.\d s", "N s", line) for line in one.lines()] == [
        f"weightkeeper 0.1.0 answers on {one.socket_dir}/control.sock",
        "published: /models/tiny, 12.3 kB on cpu-0 by vllm-a (generation 1)",
        "lease begins: vllm-a on cpu-0 (zero_copy, generation 1)",
        "lease begins: second on cpu-0 (zero_copy, generation 1)",
        "lease ends: second on cpu-0 (zero_copy, generation 1) after N s",
        "lease ends: vllm-a on cpu-0 (zero_copy, generation 1) after N s",
        "SIGTERM: ending",
    ]


def test_more_segments_than_a_frame_carries_arrive_in_order(one):
    """As from a loader."""
    with publish(one.socket_dir, segments=150, nbytes=4096):
        assert mapped(one)[::4096] == bytes(range(150))


def test_receipts_and_layout_are_those_of_the_publisher(one):
    """What a second engine gets is what the first one said."""
    with weights(tensors=2) as (message, descriptors):
        with client.publish(one.socket_dir, message, descriptors):
            pass
        assert [os.fstat(each).st_size for each in descriptors] == [MEGABYTE]  # still the caller's
    with client.open_session(one.socket_dir, "cpu-0") as session:
        assert session.receipts() == message.receipts
        granted = session.map(FINGERPRINT, "zero_copy")
        os.close(granted.descriptors[0])
        assert (granted.grant.layout, granted.grant.sizes) == (message.layout, message.sizes)


def test_a_killed_publishers_weights_stay_held(one):
    """Its lease ends, the next engine maps what it left."""
    with engine(one.socket_dir, fill=5) as first:
        assert first.said() == "published"
        first.kill()
    wait_for(lambda: one.status().leases == (), "the end of the killed engine's lease")
    assert (one.status().state, memory_of(one)) == ("ready", 1)
    assert mapped(one) == b"\5" * MEGABYTE


def test_ranks_come_from_processes_of_their_own_and_are_offered_together(one):
    """Two engines' processes at the same time, whichever is first; one lease and one socket a rank."""
    plan = {"ranks": 2, "nbytes": 4096}
    with (
        engine(one.socket_dir, 1, "b", fill=2, **plan) as second,
        engine(one.socket_dir, 0, "a", fill=1, **plan) as first,
    ):
        assert (first.said(), second.said()) == ("published", "published")
        state = one.wait_for_state("ready")
        assert state.held.devices == {"cpu-0": 4096, "cpu-1": 4096}
        assert sorted((lease.name, lease.device) for lease in state.leases) == [("a", "cpu-0"), ("b", "cpu-1")]
        assert (mapped(one, "cpu-0"), mapped(one, "cpu-1")) == (b"\1" * 4096, b"\2" * 4096)
    assert "published: /models/tiny, 8.2 kB on cpu-0, cpu-1 by a, b (generation 1)" in one.lines()


def test_nothing_is_offered_before_the_last_rank(one):
    """Neither socket nor lease nor state while a rank is missing; an engine that asks is told there is nothing."""
    with publish(one.socket_dir, 2, "c", ranks=3), publish(one.socket_dir, 0, "a", ranks=3):
        state = one.status()
        assert (state.state, state.held, state.leases, one.names()) == ("empty", None, (), NOTHING_OFFERED)
        with pytest.raises(NotLoadedError):
            client.open_session(one.socket_dir, "cpu-0")
        assert "rank 2 of 3: /models/tiny, 1.0 MB on cpu-2 by c; the others have 600 s" in one.lines()
        with publish(one.socket_dir, 1, "b", ranks=3):
            assert sorted(lease.device for lease in one.status().leases) == ["cpu-0", "cpu-1", "cpu-2"]
            assert "published: /models/tiny, 3.1 MB on cpu-0, cpu-1, cpu-2 by a, b, c (generation 1)" in one.lines()


def test_a_rank_that_dies_before_the_others_takes_its_part_with_it(one):
    """Killed while it waits: no descriptor stays, the rank that comes then waits, and a new engine completes it."""
    with engine(one.socket_dir, 0, "a", ranks=2, fill=1) as dying:
        assert dying.said() == "published"
        assert memory_of(one) == 1
        dying.kill()
    wait_for(lambda: memory_of(one) == 0, "the end of the killed rank's part")
    with publish(one.socket_dir, 1, "b", ranks=2, fill=2):
        assert (one.status().state, one.names(), memory_of(one)) == ("empty", NOTHING_OFFERED, 1)
        with publish(one.socket_dir, 0, "a", ranks=2, fill=3):
            assert one.status().held.devices == {"cpu-0": MEGABYTE, "cpu-1": MEGABYTE}
            assert (mapped(one, "cpu-0")[:1], mapped(one, "cpu-1")[:1]) == (b"\3", b"\2")


def test_the_other_ranks_have_a_time_limit(tmp_path):
    """Then the parts that wait are refused and closed; all ranks can come again."""
    with keeper(tmp_path, "--ranks-seconds", "0.5", with_config=False) as one:
        one.wait_for_state("empty")
        with connected(f"{one.socket_dir}/publish.sock", "engine", "a") as channel:
            published_by_hand(channel, ranks=2)
            assert refusal_on(channel) == Refusal(
                "timeout", "rank 0 of 2 was published, and the others did not come in time"
            )
            with pytest.raises(LostError):
                channel.receive()
        wait_for(lambda: memory_of(one) == 0, "the end of the part")
        assert (one.status().state, one.names()) == ("empty", NOTHING_OFFERED)
        assert (
            "a is refused, code=timeout: rank 0 of 2 was published, and the others did not come in time" in one.lines()
        )
        with publish(one.socket_dir, ranks=2), publish(one.socket_dir, 1, ranks=2):
            assert len(one.status().leases) == 2
            with connected(f"{one.socket_dir}/publish.sock", "engine", "late") as late:
                published_by_hand(
                    late, ranks=3, fingerprint=OTHER
                )  # a limit that began later is over: those of the two are, too
                assert refusal_on(late).code == "timeout"
            assert len(one.status().leases) == 2


def test_ranks_of_different_models_are_not_put_together(one):
    """By path, by the content of the files, and by the number of ranks; each model gets its own ranks."""
    contents = [{"content of a": "1" * 64}, {"content of a": "2" * 64}]
    with ExitStack() as stack:

        def come(rank, **plan):
            return stack.enter_context(publish(one.socket_dir, rank, **{"ranks": 2, "fingerprint": contents[0]} | plan))

        come(0, fill=1)
        come(1, fill=2, model="/models/other")
        come(1, fill=3, fingerprint=contents[1])
        come(1, fill=4, ranks=3)
        assert one.status().state == "empty"
        come(1, fill=5)
        assert (mapped(one, "cpu-0", contents[0])[:1], mapped(one, "cpu-1", contents[0])[:1]) == (b"\1", b"\5")
        come(0, fill=6, fingerprint=contents[1])
        assert (mapped(one, "cpu-0", contents[1])[:1], mapped(one, "cpu-1", contents[1])[:1]) == (b"\6", b"\3")
    wait_for(lambda: memory_of(one) == 2, "the end of the parts that never were complete")


def test_a_rank_that_comes_twice_does_not_take_its_own_engines_place(one):
    """An engine that starts again while its old connection is still open waits for its own other ranks."""
    with publish(one.socket_dir, 0, ranks=2, fill=1), publish(one.socket_dir, 0, ranks=2, fill=2):
        assert (one.status().state, memory_of(one)) == ("empty", 2)
        with publish(one.socket_dir, 1, ranks=2, fill=3):
            assert one.status().held.devices == {"cpu-0": MEGABYTE, "cpu-1": MEGABYTE}


def test_other_weights_replace_what_is_held_as_a_load_would(one):
    """The old lease goes on with the old bytes, in `releasing` until it ends; the engine socket stays the same."""
    old = publish(one.socket_dir, name="old", fill=1)
    inode = os.stat(f"{one.socket_dir}/cpu-0.sock").st_ino
    with client.open_session(one.socket_dir, "cpu-0", name="reader") as reader:
        granted = reader.map(FINGERPRINT, "zero_copy")
        region = HostMemory().map(granted.descriptors, granted.grant.sizes)
        os.close(granted.descriptors[0])
        with publish(one.socket_dir, name="new", fill=2, fingerprint=OTHER):
            state = one.status()
            assert (state.state, state.held.generation, memory_of(one)) == ("ready", 2, 1)
            assert [held.generation for held in state.releasing] == [1]
            leases = sorted((lease.name, lease.generation) for lease in state.leases)
            assert leases == [("new", 2), ("old", 1), ("reader", 1)]
            assert mapped(one, fields=OTHER) == b"\2" * MEGABYTE
            assert ctypes.string_at(region.address, MEGABYTE) == b"\1" * MEGABYTE
            assert os.stat(f"{one.socket_dir}/cpu-0.sock").st_ino == inode
            old.close()
            wait_for(lambda: len(one.status().leases) == 2, "the end of the old publisher's lease")
            assert [held.generation for held in one.status().releasing] == [1]
    wait_for(lambda: one.status().releasing == (), "the end of the old generation")
    region.close()


def test_weights_for_other_devices_move_the_sockets(one):
    """An engine on another GPU takes over; the socket of the old device goes."""
    with publish(one.socket_dir, device="GPU-a"), publish(one.socket_dir, device="GPU-b"):
        assert one.names() == ["GPU-b.sock", "control.sock", "keeper.lock", "publish.sock"]


def test_equal_weights_are_already_held(one):
    """The engine is told to map them; what is held stays as it is, and so does its lease."""
    with publish(one.socket_dir, name="a", fill=1):
        with pytest.raises(AlreadyHeldError) as caught:
            publish(one.socket_dir, name="b", fill=2)
        assert str(caught.value) == "the keeper holds these weights on cpu-0 already (generation 1); map them"
        assert caught.value.code == "already_held"
        assert [lease.name for lease in one.status().leases] == ["a"]
        assert mapped(one)[:1] == b"\1"


def test_of_two_equal_publications_at_the_same_time_one_is_taken(one):
    """Both were let in while nothing was held; the one that is complete first is it."""
    with (
        connected(f"{one.socket_dir}/publish.sock", "engine", "a") as channel,
        weights(segments=2) as (message, descriptors),
    ):
        channel.send(message)
        channel.send(Segments(0), descriptors[:1])
        wait_for(lambda: memory_of(one) == 1, "the first segment of a")
        with publish(one.socket_dir, name="b", fill=2):
            channel.send(Segments(1), descriptors[1:])
            assert refusal_on(channel).code == "already_held"
            wait_for(lambda: memory_of(one) == 1, "the end of a's part")
            assert [lease.name for lease in one.status().leases] == ["b"]
            assert mapped(one)[:1] == b"\2"


def test_a_loading_keeper_takes_nothing(tmp_path):
    """Its own load is on the way; the code says so, and the load goes on."""
    with keeper(tmp_path, stop_at="progress") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        with pytest.raises(
            StillLoadingError, match=r"^the keeper is loading by itself now, so it takes no weights from"
        ):
            publish(one.socket_dir)
        assert (one.status().state, memory_of(one)) == ("loading", 0)
        os.kill(int(one.stopped.read_text()), signal.SIGUSR1)
        one.wait_for_state("ready")


def test_a_load_that_ends_first_refuses_the_ranks_that_wait(tmp_path):
    """Asked for after the first rank: the second rank is refused while it runs, the first one when it is done."""
    with keeper(tmp_path, failed=["checkpoint", "cut"]) as one:
        one.wait_for_state("failed")
        with connected(f"{one.socket_dir}/publish.sock", "engine", "a") as waiting:
            published_by_hand(waiting, ranks=2, fingerprint=OTHER)
            one.plan(stop_at="progress")
            client.load(one.socket_dir)
            wait_for(one.stopped.exists, "the loader at its stage")
            with pytest.raises(StillLoadingError):
                publish(one.socket_dir, 1, ranks=2, fingerprint=OTHER)
            os.kill(int(one.stopped.read_text()), signal.SIGUSR1)
            assert refusal_on(waiting) == Refusal("refused", "the keeper has loaded a model by itself meanwhile")
        wait_for(lambda: memory_of(one) == 1, "the end of the part")
        assert one.status().held.devices == {"cpu-0": MEGABYTE}


def test_a_release_refuses_the_ranks_that_wait(one):
    """Whoever wants the memory back does not get it filled by what was already on its way."""
    with connected(f"{one.socket_dir}/publish.sock", "engine", "a") as waiting:
        published_by_hand(waiting, ranks=2)
        assert client.release(one.socket_dir) == "nothing was held"
        assert refusal_on(waiting) == Refusal("refused", "the keeper was told to release its weights meanwhile")
    wait_for(lambda: memory_of(one) == 0, "the end of the part")


def test_a_publication_makes_up_for_a_failed_load(tmp_path):
    """State and failure say so, and what the failure waited for is no reason to load any more; a request is."""
    with keeper(tmp_path, failed=["checkpoint", "cut"]) as one:
        assert one.wait_for_state("failed").failure == "cut"
        with publish(one.socket_dir, fingerprint=OTHER):
            state = one.status()
            assert (state.state, state.failure, state.held.generation, state.loads) == ("ready", "", 2, 0)
            one.plan(fill=8)
            assert mapped(one, fields=OTHER)[:1] == b"\7"
            assert client.load(one.socket_dir) == "loading"
            wait_for(lambda: one.status().loads == 1, "the load")
            assert mapped(one)[:1] == b"\x08"
            assert one.text().count("load started:") == 2
            assert [held.generation for held in one.status().releasing] == [2]


def test_released_weights_can_be_published_again(one):
    """Release, publish, release: memory and state follow."""
    for generation in (1, 2):
        with publish(one.socket_dir):
            assert one.status().held.generation == generation
            assert client.release(one.socket_dir, force=True) == (
                f"generation {generation}, 1.0 MB; 1 engine(s) still map it"
            )
            assert (one.status().state, memory_of(one)) == ("released", 0)
        wait_for(lambda: one.status().releasing == (), "the end of the old generation")


def test_a_keeper_can_be_told_to_take_nothing(tmp_path):
    """Without the socket there is nothing to attack; the client says why it was refused."""
    with keeper(tmp_path, "--no-publish", with_config=False) as one:
        one.wait_for_state("empty")
        assert one.names() == ["control.sock", "keeper.lock"]
        with pytest.raises(RefusedError) as caught:
            publish(one.socket_dir)
        assert str(caught.value) == f"the keeper in {one.socket_dir} takes no weights from engines; see --no-publish"


def test_no_keeper_is_no_socket_and_a_dead_one_refuses(one, tmp_path):
    """The causes are those of every other dialogue."""
    with pytest.raises(NoSocketError):
        publish(str(tmp_path / "nowhere"))
    os.chmod(one.socket_dir, 0o777)
    with pytest.raises(WrongOwnerError):
        publish(one.socket_dir)
    os.chmod(one.socket_dir, 0o700)
    one.kill()
    with pytest.raises(RefusedError, match=r"nobody answers on .*publish\.sock"):
        publish(one.socket_dir)


REFUSED = {
    "unsealed": ({"unsealed": True}, RefusedError, "is shared memory that can still be written or resized (memory)"),
    "wrong size": ({"changes": {"sizes": [MEGABYTE + 4096]}}, RefusedError, "expected 1052672 (memory)"),
    "no device": ({"device": "../x"}, RefusedError, "is no device name"),
    "the publish socket's name": ({"device": "publish"}, RefusedError, "'publish' is no device name"),
    "impossible rank": ({"changes": {"rank": 1}}, ProtocolError, "rank 1 of 1 cannot be"),
    "outside the arena": ({"tensor": {"offset": 1}}, ProtocolError, "lies outside the arena's 1048576 bytes"),
    "alias to nowhere": ({"aliases": {"head": "nowhere"}}, ProtocolError, "does not fit the tensors"),
    "legacy handles": ({"changes": {"kind": "cuda-ipc"}}, RefusedError, "cannot be held by this version"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_with_its_fault(one, name):
    """All that is refused of a loader, by the same words; nothing of it stays."""
    plan, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        publish(one.socket_dir, **plan)
    assert words in str(caught.value)
    wait_for(lambda: memory_of(one) == 0, "no descriptor")
    assert (one.status().state, one.names()) == ("empty", NOTHING_OFFERED)


def test_descriptors_and_sizes_have_to_be_as_many(one):
    """Said before anything is sent."""
    with (
        weights() as (message, descriptors),
        pytest.raises(ProtocolError, match="2 descriptors for 1 segments of cpu-0"),
    ):
        client.publish(one.socket_dir, message, descriptors * 2)


def test_a_socket_that_cannot_be_made_refuses_all_ranks(one):
    """Something is in the way of one device: nothing is offered, what was held stays, all ranks are told."""
    with publish(one.socket_dir, device="GPU-a", name="before"):
        (Path(one.socket_dir) / "cpu-1.sock").mkdir()
        with connected(f"{one.socket_dir}/publish.sock", "engine", "a") as waiting:
            published_by_hand(waiting, ranks=2)
            with pytest.raises(RefusedError, match=r"cpu-1\.sock: cannot listen: Is a directory \(socket_path\)"):
                publish(one.socket_dir, 1, ranks=2)
            assert refusal_on(waiting).code == "socket_path"
        wait_for(lambda: memory_of(one) == 1, "the end of the parts")
        assert {"GPU-a.sock", "cpu-0.sock"} & set(one.names()) == {"GPU-a.sock"}
        assert [lease.name for lease in one.status().leases] == ["before"]


def test_more_than_a_keeper_can_hold_at_once_is_refused(tmp_path):
    """Parts that are not complete never take more than half of its descriptors; the next one is told so."""
    one = KeeperProcess(tmp_path)
    one.start(False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)))
    try:
        one.wait_for_state("empty")
        with publish(one.socket_dir, ranks=2, segments=40, nbytes=4096):
            with pytest.raises(RefusedError) as caught:
                publish(one.socket_dir, 1, ranks=2, segments=11, nbytes=4096)
            assert str(caught.value).startswith(
                "11 segments on cpu-1 besides 40 of other engines that are not complete yet; the limit is 50 "
            )
            with publish(one.socket_dir, 1, ranks=2, segments=10, nbytes=4096):
                assert one.status().state == "ready"
    finally:
        one.kill()


def test_a_publishers_connection_is_for_nothing_but_its_lease(one):
    """Any further message ends the lease with a refusal; the weights stay."""
    session = publish(one.socket_dir)
    with pytest.raises(ProtocolError, match="ReleaseRequest is out of place after a Publish"):
        session.release()
    session.close()
    wait_for(lambda: one.status().leases == (), "the end of the lease")
    assert one.status().state == "ready"
    with connected(f"{one.socket_dir}/publish.sock", "engine") as channel:
        channel.send(ReleaseRequest())
        assert channel.receive().message.code == "protocol"


def test_an_empty_keeper_needs_neither_torch_nor_vllm_and_stays_small(tmp_path):
    """Started where importing them fails, it holds 512 MB under 40 MB of its own, with nothing mapped."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'vllm', 'numpy', 'cuda', 'safetensors'):\n"
        "            raise ModuleNotFoundError(f'no {name} here')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from weightkeeper.cli import main\n"
        "main()\n"
    )
    one = KeeperProcess(tmp_path, program=(str(program),)).start(False)
    try:
        one.wait_for_state("empty")
        with publish(one.socket_dir, nbytes=512 * MEGABYTE, tensors=5000):
            state = one.status()
            assert (state.held.nbytes, state.held.tensors) == (512 * MEGABYTE, 5000)
            rollup = Path(f"/proc/{one.process.pid}/smaps_rollup").read_text()
            assert int(re.search(r"^Rss: +(\d+) kB", rollup, re.MULTILINE)[1]) * 1024 < 40_000_000
            assert "memfd:weightkeeper" not in Path(f"/proc/{one.process.pid}/maps").read_text()
        assert len(mapped(one)) == 512 * MEGABYTE
        assert one.stop() == 0
    finally:
        if one.process.poll() is None:
            one.kill()


def test_fifty_publications_one_after_the_other_leave_nothing_behind(one):
    """Descriptors and memory of the keeper are flat: replaced, refused, and of two ranks of which one never comes."""

    def cycle(number):
        fields = {"dtype": "bfloat16", "number": str(number)}
        with publish(one.socket_dir, segments=3, nbytes=4096, tensors=1000, fingerprint=fields):
            with pytest.raises(AlreadyHeldError):
                publish(one.socket_dir, segments=3, nbytes=4096, fingerprint=fields)
            with publish(one.socket_dir, ranks=2, segments=3, nbytes=4096, fingerprint=OTHER):
                assert len(mapped(one, fields=fields)) == 3 * 4096
        wait_for(lambda: one.status().leases == (), "the end of the leases")

    for number in range(5):
        cycle(number)
    memory, before = one.status().own_bytes, settled_descriptors(one.process.pid, one.socket_dir)
    for number in range(5, 55):
        cycle(number)
    assert settled_descriptors(one.process.pid, one.socket_dir) == before
    assert memory_of(one) == 3
    assert one.status().own_bytes < memory + 1_000_000
    assert (one.status().releasing, one.status().leases) == ((), ())
