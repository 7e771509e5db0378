"""New weights for an engine: a real keeper is asked to load them, and the sidecar's container is never touched."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand import Stand, until

pytestmark = pytest.mark.docker

OURS = "model: /model\nload-format: weightkeeper\nmax-model-len: 2048\ndtype: bfloat16\n"
HALF = OURS.replace("bfloat16", "half")
LOAD = "load, then reload engine: engine.yaml dtype bfloat16 → half"
FAILING = 'plan: {"failed": ["load_failed", "the file is broken"]}\n'
HUGE = 1 << 42
"""Bytes of a checkpoint that fits beside nothing; its file is sparse."""


def checkpoint(directory: Path, nbytes: int) -> None:
    """One tensor of zeros that takes no disk."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    (directory / "config.json").write_text('{"architectures": ["None"]}')


def ready(directory: Path, policy: str) -> Stand:
    one = Stand(directory, policy=policy)
    one.engine_yaml.write_text(OURS)
    checkpoint(directory / "model", 1 << 20)
    one.keep()
    one.up()
    until(lambda: one.keeper()["state"] == "ready", "the keeper has loaded")
    one.supervise()
    return one


@pytest.fixture(scope="module", params=["refuse"])
def policy_stand(request, tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Stand]:
    one = ready(tmp_path_factory.mktemp("weights") / "project", request.param)
    try:
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture
def stand(policy_stand: Stand) -> Iterator[Stand]:
    policy_stand.reset()
    before = policy_stand.start_of("sidecar")
    yield policy_stand
    assert policy_stand.start_of("sidecar") == before


def test_other_weights_are_loaded_first_and_the_old_engine_serves_until_then(stand):
    """One load, then one reload; on record with what changed."""
    loads, start = stand.keeper()["loads"], stand.start_of()
    stand.engine_yaml.write_text(HALF)
    until(lambda: len(stand.done()) == 2, lambda: stand.log.read_text())
    assert stand.done() == [("load", "done"), ("reload", "healthy")]
    assert LOAD in stand.messages()
    assert stand.keeper()["loads"] == loads + 1
    assert stand.start_of() == start
    assert stand.options()["dtype"] == "half"
    assert {one["to"]["dtype"] for one in stand.history()} == {"half"}


def test_a_load_that_fails_leaves_the_old_engine_and_the_old_weights(stand):
    """Said with its cause, and tried again only when the file changes."""
    held, generation = stand.keeper()["held"], stand.engine()["generation"]
    stand.engine_yaml.write_text(HALF + FAILING)
    stand.expect("engine goes on as it is: the new weights cannot be loaded: ")
    assert "the file is broken" in stand.messages()[-1]
    assert (stand.keeper()["held"], stand.engine()["generation"]) == (held, generation)
    (stand.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    assert stand.done() == [("load", "refused")]
    stand.engine_yaml.write_text(HALF)
    until(lambda: len(stand.done()) == 3, lambda: stand.log.read_text())
    assert stand.done()[1:] == [("load", "done"), ("reload", "healthy")]


def test_what_the_engine_would_refuse_has_no_weights_loaded_for_it(stand):
    """An option that nobody knows may shape weights; the launcher is asked before the keeper."""
    loads, generation = stand.keeper()["loads"], stand.engine()["generation"]
    stand.engine_yaml.write_text(HALF.replace("2048", "-1"))
    stand.expect("engine goes on as it is: max-model-len -1 is not positive")
    assert stand.done() == [("check", "refused")]
    assert (stand.keeper()["loads"], stand.engine()["generation"]) == (loads, generation)


def test_weights_that_were_loaded_in_vain_are_replaced_by_those_in_use(stand):
    """The engine would map other weights than it needs when it starts again."""
    stand.engine_yaml.write_text(HALF + "crash: true\n")
    until(lambda: len(stand.done()) == 3, lambda: stand.log.read_text())
    assert stand.done() == [("load", "done"), ("reload", "exited"), ("rollback", "healthy")]
    loads = stand.keeper()["loads"]
    stand.engine_yaml.write_text(OURS)
    until(lambda: len(stand.done()) == 4, lambda: stand.log.read_text())
    assert stand.done()[3] == ("load", "done")
    assert stand.keeper()["loads"] == loads + 1


def test_weights_that_do_not_fit_are_refused_before_anything_is_read(stand):
    """By the sizes in the headers, with both numbers; `swap` is not the policy here."""
    held, generation = stand.keeper()["held"], stand.engine()["generation"]
    checkpoint(stand.directory / "model", HUGE)
    stand.engine_yaml.write_text(HALF)
    stand.expect("engine goes on as it is: the new weights need 4.4 TB beside the old ones, ")
    assert stand.messages()[-1].endswith("label weightkeeper.weights: swap lets the engine be stopped meanwhile")
    assert (stand.keeper()["held"], stand.engine()["generation"]) == (held, generation)
    assert stand.done() == [("load", "refused")]


def test_what_was_refused_and_is_reloaded_by_hand_counts_as_applied(stand):
    """The way back is planned from what the engine runs with by now."""
    checkpoint(stand.directory / "model", HUGE)
    stand.engine_yaml.write_text(HALF)
    stand.expect("engine goes on as it is: the new weights need 4.4 TB beside the old ones, ")
    assert stand.weightkeeper("restart", "engine").returncode == 0
    assert stand.options()["dtype"] == "half"
    stand.engine_yaml.write_text(OURS)
    stand.expect("load, then reload engine: engine.yaml dtype half → bfloat16")


def test_an_engine_is_not_stopped_for_weights_of_a_configuration_that_it_would_refuse(tmp_path, image):
    """A typing error is no reason for a swap."""
    one = ready(tmp_path / "project", "swap")
    try:
        before, held = one.start_of(), one.keeper()["held"]
        checkpoint(one.directory / "model", HUGE)
        one.engine_yaml.write_text(HALF.replace("2048", "-1"))
        one.expect("engine goes on as it is: max-model-len -1 is not positive")
        assert (one.start_of(), one.keeper()["held"]) == (before, held)
    finally:
        one.close()
        one.down()
        shutil.rmtree(one.directory, ignore_errors=True)


def test_weights_that_do_not_fit_are_swapped_where_the_user_said_so(tmp_path, image):
    """The engine is stopped, the old weights released, the new ones loaded, the engine started; not the sidecar."""
    one = ready(tmp_path / "project", "swap")
    try:
        before, sidecar = one.start_of(), one.start_of("sidecar")
        checkpoint(one.directory / "model", HUGE)
        one.engine_yaml.write_text(HALF)
        until(lambda: len(one.done()) == 2, lambda: one.log.read_text())
        assert one.done() == [("load", "done"), ("start", "healthy")]
        after = one.start_of()
        assert after[0] == before[0] and after[1] > before[1]
        assert one.start_of("sidecar") == sidecar
        assert one.keeper()["held"]["generation"] == 2
        assert one.keeper()["loads"] == 2
        assert one.options()["dtype"] == "half"
    finally:
        one.close()
        one.down()
        shutil.rmtree(one.directory, ignore_errors=True)
