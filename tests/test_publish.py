"""The first engine publishes: a keeper with nothing but its socket directory, and real engines."""

import re

import models
import pytest
from engines import Engine, Keeper, mapped, run

pytestmark = pytest.mark.vllm


@pytest.fixture
def empty():
    """A keeper that was started without a model."""
    running = Keeper(None)
    running.until_answers()
    yield running
    running.close()


def publishing(running: Keeper, **options) -> dict:
    return {"load_format": "weightkeeper", "extra": running.extra(publish=True, **options)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_first_engine_publishes_and_the_second_maps(tmp_path, empty, tied):
    """Both answer as from disk, on one copy of the weights, held by a keeper that never saw a model file."""
    model = models.write(tmp_path / "m", tied=tied)
    disk, _ = run(model, repack=False)
    with Engine(model, hold=True, **publishing(empty)) as first:
        one = first.answer()
        assert (one["tokens"], one["logprobs"]) == (disk["tokens"], disk["logprobs"])
        assert one["parameter_bytes"]["shared"] == one["parameter_bytes"]["all"]
        status = empty.status()
        assert status.state == "ready"
        assert one["mapped"]["Size"] == status.held.nbytes
        assert [lease.device for lease in status.leases] == ["cpu-0"]
        two, log = mapped(model, empty)
        assert two["tokens"] == disk["tokens"]
        assert "weightkeeper: zero_copy, mapped" in log
        first.kill()
        first.end()
        assert re.search(r"weightkeeper: published, mapped \d+ bytes", first.log())
    assert empty.status().state == "ready"
    assert empty.status().leases == ()
    three, _ = mapped(model, empty)
    assert three["tokens"] == disk["tokens"]


def test_an_engine_with_other_weights_replaces_what_is_held(tmp_path, empty):
    """The answer to an image or model change: the new one is offered, the old one goes with its last lease."""
    model = models.write(tmp_path / "m", seed=1)
    other = models.write(tmp_path / "other", seed=2)
    expected, _ = run(other, repack=False)
    with Engine(model, hold=True, **publishing(empty)) as first:
        first.answer()
        old = empty.status().held
        answer, log = run(other, **publishing(empty))
        assert answer["tokens"] == expected["tokens"]
        assert "loading from disk for the keeper, code=mismatch: content of" in log
        status = empty.status()
        assert status.held.fingerprint != old.fingerprint
        assert [held.generation for held in status.releasing] == [old.generation]
    assert empty.until(lambda status: not status.leases).releasing == ()


def test_without_the_option_nothing_is_published(tmp_path, empty):
    """The default is to take, not to give."""
    model = models.write(tmp_path / "m")
    _, log = run(model, load_format="weightkeeper", extra=empty.extra())
    assert "fallback to disk, code=not_loaded" in log
    assert empty.status().held is None
