"""The first engine publishes, on a GPU: to a keeper with nothing, which then holds the one copy. `make test-gpu`"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Keeper as PlainKeeper
from gpu_engines import FORK, GIGABYTES, Keeper, Models, mapped, on, run, start, used
from gpu_machine import GPU, REHEARSING, WHY_NOT, wait_until_free
from keepers import wait_for

from weightkeeper.recovery.gpu import settled_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
"""In which the driver gives memory."""

SHARE = min(0.9, (8 + 4 * float(GIGABYTES)) * 1e9 / GPU.total_bytes) if GPU else 0.5
"""Of the GPU: so little that weights which are counted twice would be more than a tenth of the KV cache."""

MAPPED_LINE = re.compile(r"weightkeeper: (\w+), mapped (\d+) bytes and copied (\d+) in [\d.]+ ms")
WAITED = f"weightkeeper: waiting{'' if REHEARSING else ' before memory is planned'}: the keeper is loading"
CAUSE = "weightkeeper: loading from disk for the keeper, code=not_loaded:"


def planned() -> dict[str, Any]:
    """Options with which vLLM plans the KV cache itself, where there is a GPU to plan it on."""
    return {} if REHEARSING else {"kv_cache_memory_bytes": None, "gpu_memory_utilization": SHARE}


def allowed(weights: int) -> float:
    """Bytes that may be in use for so many."""
    return weights * 1.001 + GRANULE_BYTES


class Published:
    """One start after the other, with nothing else on the GPU: from disk, publishing, and mapping what was published.

    Attributes:
        model: its checkpoint.
        disk, publisher, second: what they answered; `logs` has what the last two said.
        again: the publisher's answer once the second engine was there.
        status: the keeper's, when the publisher answered first.
        end: the keeper's, when both engines were gone.
        grown: bytes in use on the GPU then that were not before all of it.
    """

    def __init__(self, model: Path, keeper: PlainKeeper):
        self.model = model
        before = settled_bytes([GPU]) if GPU else 0
        keeper.until_answers()
        self.disk, log = run(model, options=planned(), repack=False)
        assert "weightkeeper:" not in log
        if GPU:
            wait_until_free(before)
        with start(model, hold=True, **on(keeper, publish=True), options=planned()) as publisher:
            self.publisher = publisher.answer()
            self.status = keeper.status()
            self.second, second_log = mapped(model, keeper, options=planned())
            self.again = publisher.again()
            publisher.end()
            self.logs = [publisher.log(), second_log]
        self.end = keeper.until(lambda status: not status.leases)
        with contextlib.suppress(AssertionError):  # the test that compares says more
            wait_for(lambda: used() - before <= allowed(self.end.held.nbytes), "the engines' memory to be free", 20)
        self.grown = used() - before


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[Published]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    FORK.begin()
    model = Models(tmp_path_factory.mktemp("models"), {"base": ["--gigabytes", GIGABYTES]})["base"]
    keeper = PlainKeeper(None)
    try:
        yield Published(model, keeper)
    finally:
        keeper.close()


def test_who_publishes_and_who_maps_answer_as_from_disk(published):
    """Tokens and logprobs bit for bit; the publisher's also after another engine has mapped its memory."""
    for answer in (published.publisher, published.second, published.again):
        assert answer["tokens"] == published.disk["tokens"]
        assert answer["logprobs"] == published.disk["logprobs"]


def test_every_parameter_of_both_lies_in_what_was_published(published, tell: Callable[[str], None]):
    """The publisher itself goes on computing on it, and the keeper never loaded."""
    publisher, second = published.logs
    assert CAUSE in publisher
    [(how, *counts)] = MAPPED_LINE.findall(publisher)
    assert (how, int(counts[0])) == ("published", published.disk["parameter_bytes"]["all"])
    assert MAPPED_LINE.findall(second) == [("zero_copy", *counts)]
    counted = published.second["parameter_bytes"]
    assert counted["shared"] == counted["all"] == published.disk["parameter_bytes"]["all"]
    status, end = published.status, published.end
    assert (status.state, status.loads, len(status.leases)) == ("ready", 0, 1)
    assert (end.state, end.loads, end.held, end.releasing) == ("ready", 0, status.held, ())
    assert end.held.kind == ("host" if REHEARSING else "cuda-vmm")
    tell(MAPPED_LINE.search(second)[0])


def test_the_bytes_are_there_once(gpu, published, tell: Callable[[str], None]):
    """With both engines gone: the parameters of a load from disk, the buffers of which engines make copies, and
    0.1 %, in whole granules of the driver."""
    weights = published.disk["parameter_bytes"]["all"] + int(MAPPED_LINE.search(published.logs[1])[3])
    held = published.end.held.nbytes
    tell(
        f"{published.grown / MIB:.1f} MiB in use with the keeper alone, for {weights / MIB:.1f} MiB of parameters and "
        f"buffers in {held / MIB:.1f} MiB of segments"
    )
    assert weights <= held <= allowed(weights)
    assert held <= published.grown <= allowed(held)


def test_the_kv_cache_is_as_large_as_a_disk_load_s(gpu, published, tell: Callable[[str], None]):
    """With the user's own utilization, within 2 %: who publishes counts its weights once, and who maps them too."""
    blocks = [answer["blocks"] for answer in (published.disk, published.publisher, published.second)]
    tell("{} blocks from disk, {} publishing, {} mapped".format(*blocks))
    for each in blocks[1:]:
        assert abs(each - blocks[0]) <= 0.02 * blocks[0]


def test_an_engine_that_waits_for_its_keeper_plans_as_from_disk(published, tmp_path, tell: Callable[[str], None]):
    """The load ends while it waits. What the loader had in use is free when it measures: nothing changes under it."""
    loader = f"{sys.executable} {Path(__file__).with_name('waiting_loader.py')}"
    waits = tmp_path / "the engine waits"
    keeper = Keeper(published.model, serve=("--loader", loader), environment={"WEIGHTKEEPER_TEST_UNTIL": str(waits)})
    with contextlib.closing(keeper), start(published.model, **on(keeper), options=planned()) as engine:
        engine.until(WAITED)
        waits.touch()
        answer = engine.answer()
        engine.end()
        log = engine.log()
        assert keeper.status().loads == 1
    assert [how for how, *_ in MAPPED_LINE.findall(log)] == ["zero_copy"]
    assert answer["tokens"] == published.disk["tokens"]
    tell(f"{answer['blocks']} blocks, {published.disk['blocks']} from disk")
    assert abs(answer["blocks"] - published.disk["blocks"]) <= 0.02 * published.disk["blocks"]
