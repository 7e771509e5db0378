"""The keeper is killed under a real engine: the next one has the weights from it, and everybody answers as before."""

import os
import re

import models
import pytest
from engines import Engine, ForkedKeeper, Keeper, mapped, run
from keepers import inodes_of

pytestmark = pytest.mark.vllm


@pytest.fixture(params=["loaded", "published"])
def running(request, tmp_path):
    """A keeper that loads by itself, or one that was started with nothing; and the model."""
    model = models.write(tmp_path / "m")
    keeper = ForkedKeeper(model) if request.param == "loaded" else Keeper(None)
    try:
        keeper.wait("ready") if request.param == "loaded" else keeper.until_answers()
        yield keeper, model
    finally:
        keeper.close()


def test_a_killed_keepers_weights_are_the_next_ones(running):
    """The same memory without a load; the engine's tokens, those of the next engine, and a mismatch that is named."""
    keeper, model = running
    extra = keeper.extra(publish=True, fallback=True)
    with Engine(model, hold=True, load_format="weightkeeper", extra=extra) as first:
        before = first.answer()
        held = keeper.status().held
        memory = set(inodes_of(keeper.process.pid))
        assert len(memory) == 1
        assert set(inodes_of(first.pid)) == memory
        for _ in range(2):
            keeper.process.kill()
            keeper.process.wait()
            keeper.process = keeper._start()
            keeper.until_answers()
            status = keeper.until(lambda status: status.held is not None and len(status.leases) == 1)
            assert (status.state, status.loads, status.held.adopted_from) == ("ready", 0, os.uname().nodename)
            assert status.held.fingerprint == held.fingerprint
            assert set(inodes_of(keeper.process.pid)) == memory
            after = first.again()
            assert (after["tokens"], after["logprobs"]) == (before["tokens"], before["logprobs"])
        second, log = mapped(model, keeper)
        assert (second["tokens"], second["logprobs"]) == (before["tokens"], before["logprobs"])
        assert second["mapped"]["Size"] == held.nbytes
        assert "hashed" not in log
        _, log = run(model, load_format="weightkeeper", extra=keeper.extra(), options={"dtype": "float32"})
        assert "fallback to disk, code=mismatch: " in log
        assert "dtype: the keeper has torch.bfloat16, the engine has torch.float32" in log
        first.kill()
        first.end()
        assert len(re.findall(r"weightkeeper: the lease ended, code=lost", first.log())) == 2
        assert len(re.findall(r"weightkeeper: a keeper took over .* on cpu-0", first.log())) == 2
    assert keeper.text().count("load started") <= 1
    keeper.until(lambda status: not status.leases)
