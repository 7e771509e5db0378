"""A keeper ends and engines go on: what the next one takes from them, and what it loads. Real processes."""

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
from adopting_engine import engine, mapping
from keepers import KeeperProcess, connected, descriptors_of, inodes_of, links_of, settled_descriptors, wait_for
from publishing_engine import publish, weights

from weightkeeper import client, note
from weightkeeper.commands.status import rows
from weightkeeper.errors import (
    AlreadyHeldError,
    ProtocolError,
    RefusedError,
    ReleaseRefusedError,
    StillLoadingError,
)
from weightkeeper.fingerprint import compose
from weightkeeper.memory.host import HostMemory
from weightkeeper.memory.sameness import is_same
from weightkeeper.protocol import WAITING, Segments

MEGABYTE = 1 << 20
LONG = ("--adopt-seconds", "3600")
"""So long that a test in which the keeper waits for its end does not end."""


def write_checkpoint(directory: Path, value: int = 1) -> None:
    """A model of one tensor."""
    directory.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value]) * 64)
    (directory / "config.json").write_text('{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}')


class Stand:
    """Keepers, one after the other in one directory, and the checkpoint that they load."""

    def __init__(self, directory: Path, *options: str):
        self.directory = directory
        self.model = directory / "model"
        write_checkpoint(self.model)
        self.keeper = KeeperProcess(directory, *options)
        self.plan()

    def plan(self, **plan) -> None:
        self.keeper.plan(checkpoint=str(self.model), **plan)

    def option(self, **options) -> None:
        """Set more options in the config file."""
        values = json.loads(self.keeper.config.read_text()) | options
        self.keeper.config.write_text(json.dumps(values))

    def loaded(self) -> None:
        """Start a keeper, which loads."""
        self.keeper.start()
        self.keeper.wait_for_state("ready")

    def engine(self, rank: int = 0, name: str = "vllm-a", **plan):
        return engine(self.directory, self.keeper.socket_dir, rank, name, **plan)

    def end(self, how: int = signal.SIGKILL) -> None:
        self.keeper.process.send_signal(how)
        self.keeper.process.wait(30)
        self.keeper.log.unlink()

    def replace(self, how: int = signal.SIGKILL, **start) -> None:
        """End the keeper and start the next one."""
        self.end(how)
        self.keeper.start(**start)

    def adopted(self, names: str = "vllm-a", count: int = 1):
        """The status once weights were adopted and so many engines have their lease; nothing was loaded for it."""
        wait_for(lambda: (now := self.keeper.status()) and len(now.leases) == count and now.held, self.keeper.text())
        state = self.keeper.status()
        assert (state.state, state.loads, state.held.adopted_from) == ("ready", 0, names), self.keeper.text()
        assert "load started" not in self.keeper.text()
        assert children(self.keeper.process.pid) == []
        return state

    def inodes(self) -> set[int]:
        """Of the memory that the keeper holds."""
        return set(inodes_of(self.keeper.process.pid))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def stand(tmp_path):
    """A keeper that would wait for engines for ever."""
    made = Stand(tmp_path, *LONG)
    yield made
    if made.keeper.process is not None and made.keeper.process.poll() is None:
        made.keeper.kill()
    assert "Traceback" not in made.keeper.text()


def said(stand: Stand) -> list[str]:
    return [re.sub(r"\d+\.\d s", "N s", line) for line in stand.keeper.lines()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "replaced in good order"])
def test_the_next_keeper_has_the_same_memory_from_the_engine(stand, how):
    """The same inode, no loader, the engine's lease, and the next engine maps it; every line that is said."""
    stand.loaded()
    with stand.engine() as first:
        assert stand.inodes() == {first.inode}
        stand.replace(how)
        state = stand.adopted()
        assert stand.inodes() == {first.inode}
        (lease,) = state.leases
        assert (lease.name, lease.device, lease.mode, lease.pid) == ("vllm-a", "cpu-0", "zero_copy", first.process.pid)
        assert (state.failure, state.loading, state.releasing) == ("", None, ())
        with stand.engine(name="vllm-b") as second:
            assert second.inode == first.inode
            assert len(stand.keeper.status().leases) == 2
        wait_for(lambda: len(stand.keeper.status().leases) == 1, "the end of the second engine's lease")
        shown = [text for name, text in rows(stand.keeper.status(), time.time()) if name == "weights"]
        assert re.fullmatch(r"1\.0 MB of host memory, 1 tensors, generation \d, adopted from vllm-a, .* ago", shown[0])
        assert first.lines() == [
            f"weightkeeper: the lease ended, code=lost; the weights are offered to the next keeper in "
            f"{stand.keeper.socket_dir}",
            "weightkeeper: a keeper took over 1.0 MB on cpu-0",
        ]
    took_over = [line for line in said(stand) if "took over" in line]
    assert len(took_over) == (how == signal.SIGKILL)
    assert [line for line in said(stand) if line not in took_over][:4] == [
        f"weightkeeper 0.1.0 answers on {stand.keeper.socket_dir}/control.sock",
        "waiting 3600 s for engines that hold the weights: vllm-a",
        "adopted: /models/tiny, 1.0 MB on cpu-0 from vllm-a (generation 1)",
        "lease begins: vllm-a on cpu-0 (zero_copy, generation 1)",
    ]


def test_a_fresh_directory_waits_for_nothing(stand):
    """Nor does one whose engines have all ended."""
    stand.loaded()
    assert "waiting" not in stand.keeper.text()
    with stand.engine():
        assert stand.keeper.names().count(note.NAME) == 1
    wait_for(lambda: note.NAME not in stand.keeper.names(), "the end of the note")
    stand.replace()
    assert stand.keeper.wait_for_state("ready").loads == 1
    assert "waiting" not in stand.keeper.text()


def test_engines_that_are_gone_too_are_waited_for_and_then_it_loads(tmp_path):
    """A status and a line say so meanwhile; engines that start wait as for any load."""
    stand = Stand(tmp_path, "--adopt-seconds", "2")
    try:
        stand.loaded()
        with stand.engine() as first:
            stand.end()
            first.kill()
        stand.keeper.start()
        state = stand.keeper.wait_for_state("loading")
        assert (state.loading.stage, state.held, state.loads) == (WAITING, None, 0)
        with pytest.raises(StillLoadingError, match="waiting for engines that hold the weights"):
            client.open_session(stand.keeper.socket_dir, "cpu-0", state_timeout_s=0.1)
        with pytest.raises(StillLoadingError):
            publish(stand.keeper.socket_dir)
        state = stand.keeper.wait_for_state("ready")
        assert (state.loads, state.held.adopted_from) == (1, "")
        assert [line for line in said(stand) if "engines that hold" in line or "no engine" in line] == [
            "waiting 2 s for engines that hold the weights: vllm-a",
            "no engine offered the weights in time",
        ]
        assert note.NAME not in stand.keeper.names()
    finally:
        stand.keeper.kill()


@contextlib.contextmanager
def stopped(*engines):
    """Engines that say nothing for as long as this lasts."""
    for each in engines:
        each.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in engines:
            each.process.send_signal(signal.SIGCONT)


def test_a_load_by_hand_ends_the_waiting(stand):
    """And what the engine offers then is another copy of what is held: it is told so, once, and left alone."""
    stand.loaded()
    with stand.engine() as first:
        with stopped(first):
            stand.replace()
            stand.keeper.wait_for_text("waiting 3600 s")
            assert client.load(stand.keeper.socket_dir) == "loading"
            assert stand.keeper.wait_for_state("ready").loads == 1
        wait_for(lambda: "code=already_held" in first.log.read_text(), "the refusal")
        assert first.lines()[1:] == [
            "weightkeeper: a keeper does not take over the weights, code=already_held: these weights are already held "
            "on cpu-0 by another engine's copy (generation 1); for as long as this engine lives, its own copy is there "
            "beside it"
        ]
        assert (stand.keeper.status().leases, stand.inodes() & {first.inode}) == ((), set())
        stand.replace()
        assert stand.keeper.wait_for_state("ready").loads == 1  # nobody has mapped what that keeper held


def test_a_release_ends_the_waiting(stand):
    """Whoever wants the memory back does not get it held again by an offer."""
    stand.loaded()
    with stand.engine() as first:
        with stopped(first):
            stand.replace()
            stand.keeper.wait_for_text("waiting 3600 s")
            client.release(stand.keeper.socket_dir)
            assert stand.keeper.wait_for_state("released").loading is None
        wait_for(lambda: "was told to release its weights" in first.log.read_text(), "the refusal")
        assert (stand.keeper.status().state, stand.inodes()) == ("released", set())
        assert client.load(stand.keeper.socket_dir) == "loading"
        assert stand.keeper.wait_for_state("ready").loads == 1


def test_load_and_release_are_as_before_with_adopted_weights(stand):
    """The load replaces them, the old generation goes with its engine, and a release is refused while it is mapped."""
    stand.loaded()
    with stand.engine() as first:
        stand.replace()
        stand.adopted()
        with pytest.raises(ReleaseRefusedError, match="1 engine\\(s\\) map the weights: vllm-a"):
            client.release(stand.keeper.socket_dir)
        stand.plan(fill=9)
        client.load(stand.keeper.socket_dir)
        wait_for(lambda: stand.keeper.status().loads == 1, "the load")
        state = stand.keeper.status()
        assert (state.held.adopted_from, len(state.releasing), len(state.leases)) == ("", 1, 1)
        assert first.inode not in stand.inodes()
    wait_for(lambda: stand.keeper.status().releasing == (), "the end of the old generation")
    assert client.release(stand.keeper.socket_dir).endswith("1.0 MB")


def test_engines_that_map_the_same_memory_are_all_leases_again(stand):
    """One copy, nobody refused."""
    stand.loaded()
    with stand.engine(name="a") as first, stand.engine(name="b") as second, stand.engine(name="c") as third:
        assert first.inode == second.inode == third.inode
        stand.replace()
        wait_for(lambda: (now := stand.keeper.status()) and len(now.leases) == 3, "three leases")
        state = stand.keeper.status()
        assert sorted(lease.name for lease in state.leases) == ["a", "b", "c"]
        assert state.held.adopted_from in ("a", "b", "c")
        assert (state.loads, stand.inodes()) == (0, {first.inode})
        assert sum("memfd:weightkeeper" in link for link in links_of(stand.keeper.process.pid)) == 1
        assert "refused" not in stand.keeper.text()


def test_all_ranks_or_none(stand):
    """While a rank is missing nothing is held; then all are, with a lease each."""
    stand.plan(ranks=2)
    stand.loaded()
    with stand.engine(0, world_size=2) as first, stand.engine(1, world_size=2) as second:
        with stopped(second):
            stand.replace()
            stand.keeper.wait_for_text("rank 0 of 2: /models/tiny")
            state = stand.keeper.status()
            assert (state.state, state.loading.stage, state.held, state.leases) == ("loading", WAITING, None, ())
        state = stand.adopted(count=2)
        assert state.held.devices == {"cpu-0": MEGABYTE, "cpu-1": MEGABYTE}
        assert sorted(lease.device for lease in state.leases) == ["cpu-0", "cpu-1"]
        assert stand.inodes() == {first.inode, second.inode}


def test_two_engines_of_two_ranks_are_four_leases(stand):
    """Whichever four come in which order."""
    stand.plan(ranks=2)
    stand.loaded()
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            for rank in (0, 1):
                stack.enter_context(stand.engine(rank, name, world_size=2))
        stand.replace()
        wait_for(lambda: (now := stand.keeper.status()) and len(now.leases) == 4, "four leases")
        leases = sorted((lease.name, lease.device) for lease in stand.keeper.status().leases)
        assert leases == [("a", "cpu-0"), ("a", "cpu-1"), ("b", "cpu-0"), ("b", "cpu-1")]
        assert (stand.keeper.status().loads, len(stand.inodes())) == (0, 2)


def test_a_rank_that_is_gone_means_that_all_are_loaded(tmp_path):
    """The ranks that waited for it are told when the waiting is over, and are no longer held."""
    stand = Stand(tmp_path, "--adopt-seconds", "3")
    try:
        stand.plan(ranks=2)
        stand.loaded()
        with stand.engine(0, world_size=2) as first:
            with stand.engine(1, world_size=2) as second:
                stand.end()
                second.kill()
            stand.keeper.start()
            assert stand.keeper.wait_for_state("ready").loads == 1
            wait_for(lambda: first.inode not in stand.inodes(), "the end of the part")
            wait_for(lambda: "code=already_held" in first.log.read_text(), "the refusal")
    finally:
        stand.keeper.kill()


def test_a_changed_file_means_a_load_at_once(stand):
    """The cause is named on both sides; the engine's bytes are never offered."""
    stand.loaded()
    with stand.engine() as first:
        stand.end()
        write_checkpoint(stand.model, value=2)
        stand.keeper.start()
        assert stand.keeper.wait_for_state("ready").loads == 1
        cause = f"{stand.model}: other files than these weights were made of: model.safetensors"
        assert f"vllm-a is refused, code=checkpoint_changed: {cause}" in stand.keeper.lines()
        wait_for(lambda: "does not take over" in first.log.read_text(), "the refusal")
        assert first.lines()[-1].endswith(f"code=refused: {cause} (checkpoint_changed)")
        assert first.inode not in stand.inodes()


def test_a_file_that_was_only_touched_is_hashed_and_found_the_same(stand):
    """A receipt that is no longer true proves nothing either way."""
    stand.loaded()
    with stand.engine() as first:
        stand.end()
        os.utime(stand.model / "model.safetensors")
        stand.keeper.start()
        stand.adopted()
        assert stand.inodes() == {first.inode}
        assert "hashed model.safetensors: their receipts do not cover them" in stand.keeper.lines()


def test_an_option_that_shapes_weights_and_changed_means_a_load_at_once(stand):
    """What the engine offers then is not what is asked for; the option is named."""
    stand.loaded()
    with stand.engine() as first:
        stand.end()
        stand.option(dtype="float16")
        stand.keeper.start()
        assert stand.keeper.wait_for_state("ready").loads == 1
        cause = f"{stand.keeper.config}: dtype changed since these weights were made"
        assert f"engines are not waited for: {cause}" in stand.keeper.lines()
        assert first.inode not in stand.inodes()


def test_other_options_may_change(stand):
    """A new context length is a new engine on the same weights."""
    stand.loaded()
    with stand.engine() as first:
        stand.end()
        stand.option(**{"max-model-len": 4096, "model-loader-extra-config": {"mode": "zero_copy"}})
        stand.keeper.start()
        stand.adopted()
        assert stand.inodes() == {first.inode}


def test_a_keeper_that_takes_nothing_from_engines_does_not_wait(tmp_path):
    """--no-publish; the engine looks on in silence."""
    stand = Stand(tmp_path, *LONG, "--no-publish")
    try:
        stand.loaded()
        with stand.engine() as first:
            stand.replace()
            assert stand.keeper.wait_for_state("ready").loads == 1
            assert len(first.lines()) == 1
    finally:
        stand.keeper.kill()


def test_copies_are_not_offered(stand):
    """An engine in copy mode holds nothing of the keeper's, and no note is left of it."""
    stand.loaded()
    with stand.engine(mode="copy") as first:
        wait_for(lambda: stand.keeper.status().leases == (), "the end of its lease")
        assert note.NAME not in stand.keeper.names()
        assert inodes_of(first.process.pid) == []
        stand.replace()
        assert stand.keeper.wait_for_state("ready").loads == 1


def test_published_weights_are_adopted_too(stand):
    """By a keeper with a config file, which held what an engine had loaded; the options are those of that time."""
    stand.plan(failed=["checkpoint", "cut"])
    stand.keeper.start()
    stand.keeper.wait_for_state("failed")
    plan = {"checkpoint": str(stand.model), "fill": 5}
    publish(stand.keeper.socket_dir, name="publisher", **plan).close()
    with stand.engine() as first:
        stand.replace()
        stand.adopted()
        assert stand.inodes() == {first.inode}


def test_a_late_offer_makes_up_for_a_load_that_failed(tmp_path):
    """For want of room beside the very memory that is offered, say."""
    stand = Stand(tmp_path, "--adopt-seconds", "1")
    try:
        stand.loaded()
        with stand.engine() as first:
            with stopped(first):
                stand.end()
                text = stand.keeper.config.read_text()
                loader = "false"
                stand.keeper.start(loader=loader)
                assert "exit code 1" in stand.keeper.wait_for_state("failed").failure
                assert stand.keeper.config.read_text() == text
            state = wait_for(lambda: (now := stand.keeper.status()).held and now, "the adoption")
            assert (state.state, state.failure, state.loads, state.held.adopted_from) == ("ready", "", 0, "vllm-a")
            assert stand.inodes() == {first.inode}
    finally:
        stand.keeper.kill()


def test_ten_keepers_one_after_the_other_leave_nothing_behind(stand):
    """Descriptors of the engine and of the keeper are as many as before, the memory is the same."""
    stand.loaded()
    with stand.engine() as first:
        counts = set()
        for number in range(10):
            stand.replace(signal.SIGTERM if number % 3 == 2 else signal.SIGKILL)
            stand.adopted()
            assert stand.inodes() == {first.inode}
            counts.add((settled_descriptors(stand.keeper.process.pid, stand.keeper.socket_dir), first.descriptors()))
        assert len(counts) == 1
        assert len(first.lines()) == 20


def test_an_engine_that_is_killed_while_the_keeper_changes_leaves_a_note_and_nothing_else(stand):
    """At another moment each time: whatever became of it, the next keeper has one copy and no lease."""
    stand.loaded()
    for moment in ("", "answers on", "waiting 3600 s", "adopted: ", "lease begins"):
        with stand.engine() as first:
            stand.replace()
            stand.keeper.wait_for_text(moment)
            first.kill()
        wait_for(lambda: (now := stand.keeper.status()) and not now.leases, "no lease")
        state = stand.keeper.status()
        if state.held is None:
            assert state.loading.stage == WAITING
            client.load(stand.keeper.socket_dir)
            stand.keeper.wait_for_state("ready")
        assert len(stand.inodes()) == 1
        assert stand.keeper.status().releasing == ()


def test_a_keeper_without_a_config_takes_offers_as_publications(tmp_path):
    """It waits for nothing and holds what comes."""
    stand = Stand(tmp_path)
    try:
        stand.keeper.start(with_config=False)
        stand.keeper.wait_for_state("empty")
        publish(stand.keeper.socket_dir, name="first", fill=3, checkpoint=str(stand.model)).close()
        with stand.engine() as first:
            assert note.NAME not in stand.keeper.names()
            stand.replace(with_config=False)
            stand.adopted()
            assert stand.inodes() == {first.inode}
            assert "adopted: /models/tiny, 1.0 MB on cpu-0 from vllm-a (generation 1)" in stand.keeper.lines()
    finally:
        stand.keeper.kill()


@pytest.mark.parametrize("first_back", ["old", "new"])
def test_of_two_generations_the_newer_one_is_held(tmp_path, first_back):
    """Whichever engine offers first; the other one's memory is not held."""
    stand = Stand(tmp_path)
    other = {"dtype": "float16", "rank": "0"}
    try:
        stand.keeper.start(with_config=False)
        stand.keeper.wait_for_state("empty")
        publish(stand.keeper.socket_dir, checkpoint=str(stand.model)).close()
        with stand.engine(name="old") as old:
            publish(stand.keeper.socket_dir, checkpoint=str(stand.model), fingerprint={"dtype": "float16"}).close()
            with stand.engine(name="new", conditions=other) as new:
                engines = {"old": old, "new": new}
                late = engines["old" if first_back == "new" else "new"]
                with stopped(late):
                    stand.replace(with_config=False)
                    wait_for(lambda: (now := stand.keeper.status()) and now.held, "the first offer")
                    assert stand.inodes() == {engines[first_back].inode}
                if first_back == "old":
                    wait_for(lambda: stand.inodes() == {new.inode}, "the newer one")
                else:
                    wait_for(lambda: "holds other weights by now" in old.log.read_text(), "the refusal")
                assert stand.keeper.status().held.adopted_from == "new"
                assert stand.inodes() == {new.inode}
    finally:
        stand.keeper.kill()


def test_an_engines_own_copy_is_not_passed_off_as_what_is_held(tmp_path):
    """Equal weights in other memory: the second is told, quietly, and offers them to the keeper after that."""
    stand = Stand(tmp_path)
    try:
        stand.keeper.start(with_config=False)
        stand.keeper.wait_for_state("empty")
        plan = {"checkpoint": str(stand.model)}
        publish(stand.keeper.socket_dir, **plan).close()
        with stand.engine(name="a") as first, stand.engine(name="own", own=True, **plan) as second:
            assert first.inode != second.inode
            with stopped(second):
                stand.replace(with_config=False)
                stand.adopted("a")
            wait_for(lambda: "code=already_held" in second.log.read_text(), "the refusal")
            assert (stand.inodes(), len(stand.keeper.status().leases)) == ({first.inode}, 1)
            assert sum("is refused" in line for line in stand.keeper.lines()) == 1
            stand.end()
            first.kill()
            stand.keeper.start(with_config=False)
            stand.adopted("own")
            assert stand.inodes() == {second.inode}
    finally:
        stand.keeper.kill()


@pytest.mark.parametrize("what", ["the model's directory", "the config file"])
def test_what_cannot_be_read_for_a_moment_is_waited_for(stand, what):
    """It says nothing about the weights: the engine asks again, and is adopted once it can be read."""
    stand.loaded()
    with stand.engine() as first:
        stand.end()
        text = stand.keeper.config.read_text()
        if what == "the config file":
            stand.keeper.config.write_text(text[:-1])
        else:
            stand.model.rename(stand.directory / "away")
        stand.keeper.start()
        stand.keeper.wait_for_text("vllm-a is refused, code=busy")
        assert stand.keeper.status().loading.stage == WAITING
        if what == "the config file":
            stand.keeper.config.write_text(text)
        else:
            (stand.directory / "away").rename(stand.model)
        stand.adopted()
        assert stand.inodes() == {first.inode}


@pytest.mark.parametrize("what", ["an option", "a file"])
def test_what_changes_between_two_ranks_is_seen(stand, what):
    """Rank 0 was compared before it; the generation is not adopted."""
    stand.plan(ranks=2)
    stand.loaded()
    with stand.engine(0, world_size=2), stand.engine(1, world_size=2) as second:
        with stopped(second):
            stand.replace()
            stand.keeper.wait_for_text("rank 0 of 2: /models/tiny")
            if what == "an option":
                stand.option(dtype="float16")
            else:
                write_checkpoint(stand.model, value=99)
        state = stand.keeper.wait_for_state("ready")
        assert (state.loads, state.held.adopted_from) == (1, "")


def test_ranks_of_two_engines_with_other_options_are_not_one_generation(tmp_path):
    """Equal files are not enough; each engine's ranks come together by themselves."""
    stand = Stand(tmp_path)
    keeper = stand.keeper
    try:
        keeper.start(with_config=False)
        keeper.wait_for_state("empty")
        with contextlib.ExitStack() as stack:
            engines = {}
            for name, dtype in (("a", "bfloat16"), ("b", "float16")):
                plan = {"checkpoint": str(stand.model), "ranks": 2, "fingerprint": {"dtype": dtype}}
                sessions = [publish(keeper.socket_dir, rank, **plan) for rank in (0, 1)]
                for rank in (0, 1):
                    conditions = {"dtype": dtype, "rank": str(rank)}
                    one = stand.engine(rank, name, world_size=2, conditions=conditions)
                    engines[name, rank] = stack.enter_context(one)
                for each in sessions:
                    each.close()
            with stopped(engines["a", 1], engines["b", 0]):
                stand.replace(with_config=False)
                keeper.wait_for_text("rank 0 of 2: /models/tiny")
                keeper.wait_for_text("rank 1 of 2: /models/tiny")
                assert keeper.status().held is None
            pair = {engines["b", 0].inode, engines["b", 1].inode}
            wait_for(lambda: stand.inodes() == pair, "the newer engine's ranks")
            assert keeper.status().held.adopted_from == "b"
    finally:
        keeper.kill()


def test_a_forked_child_does_not_end_the_lease(stand):
    """Its copy of the lease may be closed by its garbage collector or at its exit."""
    stand.loaded()
    lease, _ = mapping(stand.keeper.socket_dir, "here", 0, {})
    try:
        child = os.fork()
        if child == 0:
            lease.close()
            os._exit(0)
        os.waitpid(child, 0)
        probe = client.open_session(stand.keeper.socket_dir, "cpu-0")  # a round trip after the child's end
        probe.close()
        assert [each.name for each in stand.keeper.status().leases] == ["here"]
    finally:
        lease.close()


def test_false_receipts_stand_against_nobody_else(stand):
    """Who contradicts the fingerprint that the note vouches for is refused alone."""
    stand.loaded()
    with stand.engine() as first:
        with client.open_session(stand.keeper.socket_dir, "cpu-0") as session:
            receipts = session.receipts()
            granted = session.map({}, "verify")
        for each in granted.descriptors:
            os.close(each)
        with stopped(first):
            stand.replace()
            stand.keeper.wait_for_text("waiting 3600 s")
            false = tuple(msgspec.structs.replace(each, blake3="00" * 32) for each in receipts)
            changes = {"fingerprint": granted.grant.fingerprint, "receipts": false}
            with offered(stand, **changes) as (message, descriptors), pytest.raises(RefusedError, match="contradicts"):
                client.publish(stand.keeper.socket_dir, message, descriptors)
            assert stand.keeper.status().loading.stage == WAITING
        stand.adopted()
        assert stand.inodes() == {first.inode}


def test_a_note_that_could_not_be_written_is_written_later(stand):
    """By itself, once there is room; the failure is said."""
    stand.loaded()
    blocked = Path(stand.keeper.socket_dir) / f"{note.NAME}.new"
    blocked.mkdir()
    with stand.engine():
        stand.keeper.wait_for_text("not written, so a keeper after this one")
        blocked.rmdir()
        wait_for(lambda: note.read(stand.keeper.socket_dir), "the note")
        assert note.read(stand.keeper.socket_dir).engines == ("vllm-a",)


def test_a_forced_release_is_not_undone_by_the_next_keeper(tmp_path):
    """Also where it has no config file and takes whatever else is offered."""
    stand = Stand(tmp_path)
    try:
        stand.keeper.start(with_config=False)
        stand.keeper.wait_for_state("empty")
        publish(stand.keeper.socket_dir, checkpoint=str(stand.model)).close()
        with stand.engine() as first:
            client.release(stand.keeper.socket_dir, force=True)
            stand.replace(with_config=False)
            wait_for(lambda: "was told to release its weights" in first.log.read_text(), "the refusal")
            assert (stand.keeper.status().held, stand.inodes()) == (None, set())
    finally:
        stand.keeper.kill()


@pytest.mark.parametrize("is_path", [True, False], ids=["the engine has a path", "the engine has the name, too"])
def test_a_model_that_is_only_a_name_here(stand, is_path):
    """The files are compared where the engine has them; where that is no path either, it loads at once and says why."""
    stand.option(model="org/tiny")
    stand.loaded()
    with stand.engine(model=str(stand.model) if is_path else "org/tiny") as first:
        stand.replace()
        if is_path:
            stand.adopted()
            assert stand.inodes() == {first.inode}
        else:
            assert stand.keeper.wait_for_state("ready").loads == 1
            assert "the model org/tiny is no path that this keeper sees" in stand.keeper.text()


def test_options_that_changed_during_a_load_leave_no_note(stand):
    """Nobody knows which of the two the weights were made of, so nobody adopts them."""
    stand.plan(stop_at="start")
    stand.keeper.start()
    wait_for(stand.keeper.stopped.exists, "the loader")
    stand.option(dtype="float16")
    os.kill(int(stand.keeper.stopped.read_text()), signal.SIGUSR1)
    stand.keeper.wait_for_state("ready")
    with stand.engine():
        assert note.NAME not in stand.keeper.names()


# --- the engine's end


@pytest.mark.parametrize("is_alone", [False, True], ids=["with its keeper", "while there is none"])
def test_a_lease_that_is_closed_lets_everything_go(stand, is_alone):
    """Its thread, the descriptors and the connection; whoever closes it does not wait."""
    stand.loaded()
    before, threads = descriptors_of(), threading.active_count()
    lease, _ = mapping(stand.keeper.socket_dir, "here", 0, {})
    assert (descriptors_of() > before, threading.active_count()) == (True, threads + 1)
    if is_alone:
        stand.keeper.kill()
    lease.close()
    lease.close()
    wait_for(lambda: (descriptors_of(), threading.active_count()) == (before, threads), "the end of the lease")
    if not is_alone:
        wait_for(lambda: stand.keeper.status().leases == (), "the end in the keeper")


def test_what_an_engine_keeps_does_not_go_to_its_children(stand):
    """Close-on-exec: a program that the engine starts has none of it."""
    stand.loaded()
    lease, inode = mapping(stand.keeper.socket_dir, "here", 0, {})
    try:
        assert inode in inodes_of(os.getpid())
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
        try:
            assert inodes_of(child.pid) == []
        finally:
            child.kill()
            child.wait()
    finally:
        lease.close()


# --- GPU memory, as far as a keeper sees it: open files of a device


@contextlib.contextmanager
def of_device(count: int):
    """Descriptors of a character device, each an open file of its own, as those that a CUDA driver exports."""
    made = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            os.close(each)


def test_gpu_memory_is_known_by_its_open_files(tmp_path):
    """Copies of one descriptor are the same memory, other open files of the same device are not; a keeper says so."""
    stand = Stand(tmp_path)
    fields = compose({}, {"dtype": "bfloat16"})
    changes = {"kind": "cuda-vmm"}
    try:
        stand.keeper.start(with_config=False)
        stand.keeper.wait_for_state("empty")
        with weights(segments=3, fingerprint=fields, changes=changes) as (message, _), of_device(3) as first:
            offer = type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "mapped_at": 1.0})
            give = lambda descriptors: client.publish(stand.keeper.socket_dir, offer, descriptors)  # noqa: E731
            copies = [os.dup(each) for each in first]
            with give(first), give(copies), of_device(3) as others:
                assert len(stand.keeper.status().leases) == 2
                assert stand.keeper.status().held.kind == "cuda-vmm"
                with pytest.raises(AlreadyHeldError, match="already held on cpu-0 by another engine's copy"):
                    give(others)
                with pytest.raises(AlreadyHeldError):
                    give([copies[1], copies[0], copies[2]])
                assert len(stand.keeper.status().leases) == 2
            for each in copies:
                os.close(each)
    finally:
        stand.keeper.kill()


def test_sameness_of_memory():
    """Host memory by its inode, however it was opened; GPU memory by the open file; lists as wholes, in order."""
    arenas = [HostMemory().create(4096) for _ in range(2)]
    one, other = (arena.export()[0] for arena in arenas)
    (again,) = arenas[0].export()
    assert is_same("host", [one, other], [again, other])
    assert not is_same("host", [one, other], [other, one])
    assert not is_same("host", [one], [one, other])
    assert not is_same("cuda-vmm", [one], [again])
    with of_device(2) as (first, second):
        copy = os.dup(first)
        assert is_same("cuda-vmm", [first, second], [copy, second])
        assert not is_same("cuda-vmm", [first], [second])
        assert is_same("cuda-vmm", [copy], [first])  # the mark of before was taken away again
    for each in (one, other, again, copy):
        os.close(each)
    for arena in arenas:
        arena.close()


# --- what is hostile or broken


def offered(stand: Stand, **changes):
    """What the engine of the note would offer, changed."""
    return weights(0, checkpoint=str(stand.model), changes={"mapped_at": 1.0, **changes})


HOSTILE = {
    "weights of other conditions": ({}, {"fingerprint": {"dtype": "x"}}, RefusedError, "are not the weights that the"),
    "another device": ({"device": "cpu-3"}, {}, RefusedError, "are not the weights that the keeper before held on cpu"),
    "a number of ranks": ({"world_size": 2}, {}, RefusedError, "the keeper before held 1 rank"),
    "mapped before time": ({"mapped_at": -1.0}, {}, ProtocolError, "was mapped at -1.0, which cannot be"),
    "mapped at the end of time": ({"mapped_at": 1e300}, {}, ProtocolError, "which cannot be"),
    "a layout outside": ({"sizes": (4096,)}, {}, ProtocolError, "in segments of 4096 bytes together"),
    "just loaded, it says": ({"mapped_at": 0.0}, {}, StillLoadingError, "is loading by itself"),
}


def test_what_is_not_what_the_keeper_before_held_is_refused(stand):
    """As hostile publications are; the waiting goes on, and the honest engine is adopted afterwards."""
    stand.loaded()
    with stand.engine() as first:
        with stopped(first):
            stand.replace()
            stand.keeper.wait_for_text("waiting 3600 s")
            before = settled_descriptors(stand.keeper.process.pid, stand.keeper.socket_dir)
            for changes, plan, error, words in HOSTILE.values():
                with (
                    weights(0, **{"checkpoint": str(stand.model), "changes": {"mapped_at": 1.0} | changes} | plan) as (
                        message,
                        descriptors,
                    ),
                    pytest.raises(error, match=words),
                ):
                    client.publish(stand.keeper.socket_dir, message, descriptors, name="hostile")
            pipe = os.pipe()
            with offered(stand) as (message, _), pytest.raises(RefusedError, match="expected sealed shared"):
                client.publish(stand.keeper.socket_dir, message, [pipe[0]])
            for each in pipe:
                os.close(each)
            assert stand.keeper.status().loading.stage == WAITING
            wait_for(
                lambda: settled_descriptors(stand.keeper.process.pid, stand.keeper.socket_dir) == before,
                "descriptors as before",
            )
        stand.adopted()
        assert stand.inodes() == {first.inode}


def test_an_offer_that_is_broken_off_leaves_nothing(stand):
    """Its connection ends between Publish and the last segment; the honest engine is adopted afterwards."""
    stand.plan(segments=4, nbytes=4096)
    stand.loaded()
    with stand.engine() as first:
        with stopped(first):
            stand.replace()
            stand.keeper.wait_for_text("waiting 3600 s")
            before = settled_descriptors(stand.keeper.process.pid, stand.keeper.socket_dir)
            plan = {"segments": 4, "nbytes": 4096, "checkpoint": str(stand.model), "changes": {"mapped_at": 1.0}}
            for count in range(4):
                with (
                    weights(0, **plan) as (message, descriptors),
                    connected(f"{stand.keeper.socket_dir}/publish.sock", "engine", "broken") as channel,
                ):
                    channel.send(message)
                    if count:
                        channel.send(Segments(0), descriptors[:count])
            wait_for(
                lambda: settled_descriptors(stand.keeper.process.pid, stand.keeper.socket_dir) == before,
                "descriptors as before",
            )
            assert stand.inodes() == set()
        stand.adopted()
        assert first.inode in stand.inodes()


def test_an_offer_never_replaces_what_was_loaded(stand):
    """Neither by a keeper's loader nor by an engine."""
    stand.loaded()
    plan = {"checkpoint": str(stand.model), "fingerprint": {"dtype": "x"}, "changes": {"mapped_at": 1e9}}
    with (
        weights(0, **plan) as (message, descriptors),
        pytest.raises(RefusedError, match=r"^the keeper holds other weights by now \(generation 1\)$"),
    ):
        client.publish(stand.keeper.socket_dir, message, descriptors)
    assert stand.keeper.status().held.generation == 1


def test_nobody_can_offer_to_a_keeper_that_no_engine_outlived(stand):
    """Its load failed and it holds nothing: what is offered is what nobody held before."""
    stand.plan(failed=["checkpoint", "cut"])
    stand.keeper.start()
    stand.keeper.wait_for_state("failed")
    with (
        offered(stand) as (message, descriptors),
        pytest.raises(RefusedError, match=r"^no keeper before this one left"),
    ):
        client.publish(stand.keeper.socket_dir, message, descriptors)


NOTES = {
    "no JSON": (b"{", "Input data was truncated"),
    "something else": (b"[]", "Expected `object`, got `array`"),
    "deep": (b'{"parts":' + b"[" * 100_000, "Expected `object`, got `array`"),
    "large": (b'{"parts":{},"options":{},"engines":["' + b"x" * (2 << 20) + b'"]}', "Input data was truncated"),
}


@pytest.mark.parametrize("name", NOTES)
def test_a_note_that_cannot_be_read_is_none(stand, name):
    """It is said, nothing is waited for, and the model is loaded."""
    content, words = NOTES[name]
    place = Path(stand.keeper.socket_dir)
    place.mkdir(mode=0o700)
    (place / note.NAME).write_bytes(content)
    (place / note.NAME).chmod(0o600)
    stand.loaded()
    assert f"{place / note.NAME}: not read: {words}" in stand.keeper.text()
    assert "waiting" not in stand.keeper.text()


@pytest.mark.parametrize("kind", ["link", "writable by others", "fifo", "directory"])
def test_a_note_that_others_can_have_written_is_none(stand, kind):
    """By its type and mode; what it says is not looked at."""
    place = Path(stand.keeper.socket_dir)
    place.mkdir(mode=0o700)
    path, real = place / note.NAME, stand.directory / "real"
    real.write_text('{"parts":{},"options":{},"engines":["x"]}')
    if kind == "link":
        path.symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text(real.read_text())
        path.chmod(0o666)
    stand.loaded()
    assert f"{path}: not read: " in stand.keeper.text()
    assert "waiting" not in stand.keeper.text()


def test_the_note_has_no_values_of_options(stand):
    """Some are secrets; it is ours alone."""
    stand.option(**{"some-new-token": "s3cret", "api-key": "s3cret"})
    stand.loaded()
    with stand.engine():
        path = Path(stand.keeper.socket_dir) / note.NAME
        left = note.read(stand.keeper.socket_dir)
        assert "s3cret" not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        assert (sorted(left.options), left.engines) == (["model", "plan", "some-new-token"], ("vllm-a",))
        assert list(left.parts) == ["cpu-0"]
