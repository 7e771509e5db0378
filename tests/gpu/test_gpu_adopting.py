"""A keeper is killed under engines on a GPU: the next one holds the same memory, and no second copy. `make test-gpu`"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_engines import GIGABYTES, Keeper, Models, children, mapped, on, start, used
from gpu_machine import REHEARSING, WHY_NOT
from keepers import descriptors_of, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

MIB = 1 << 20
SLACK_BYTES = 64 * MIB


class Adopted:
    """A keeper that was killed under two engines and replaced.

    Attributes:
        before: bytes in use on the GPU with both engines up and the first keeper.
        after: with the second keeper, once both engines have their leases.
        answers: of the first engine, before and after.
        second: an engine that mapped what was adopted, its answer and its log.
    """

    def __init__(self, model: Path):
        self.keeper = Keeper(model)
        try:
            self.held = self.keeper.wait("ready").held
            wait_for(lambda: not children(self.keeper.pid), "the loader's end", 60)
            with start(model, hold=True, **on(self.keeper)) as one, start(model, hold=True, **on(self.keeper)) as other:
                self.answers = [one.answer()]
                other.answer()
                self.before, descriptors = used(), descriptors_of(one.pid)
                self._replace()
                self.after = used()
                self.answers.append(one.again())
                self.grown = descriptors_of(one.pid) - descriptors
                self.log = self.keeper.text()
                self.second = mapped(model, self.keeper)
        except BaseException:
            self.keeper.close()
            raise

    def _replace(self) -> None:
        self.keeper.process.kill()
        self.keeper.process.wait()
        self.keeper.process = self.keeper._start()
        self.keeper.until_answers()
        self.status = self.keeper.until(lambda status: status.held is not None and len(status.leases) == 2)


@pytest.fixture(scope="module")
def adopted(tmp_path_factory) -> Iterator[Adopted]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    model = Models(tmp_path_factory.mktemp("models"), {"base": ["--gigabytes", GIGABYTES]})["base"]
    made = Adopted(model)
    yield made
    made.keeper.close()


def test_the_next_keeper_holds_the_weights_without_a_load(adopted):
    """As many bytes as before, from the engines; both are leases, so both were known to have the same memory."""
    status = adopted.status
    assert (status.state, status.loads) == ("ready", 0)
    assert status.held.adopted_from
    assert (status.held.devices, status.held.fingerprint) == (adopted.held.devices, adopted.held.fingerprint)
    assert status.held.kind == ("host" if REHEARSING else "cuda-vmm")
    assert adopted.log.count("load started") == 1
    assert "code=already_held" not in adopted.log


def test_there_is_no_second_copy(adopted, tell: Callable[[str], None]):
    """Bytes in use on the GPU are those of before, and not those and the weights'."""
    assert adopted.after <= adopted.before + SLACK_BYTES
    assert adopted.held.nbytes > 2 * SLACK_BYTES or REHEARSING
    tell(f"{adopted.before / MIB:.0f} MiB in use before, {adopted.after / MIB:.0f} MiB after")


def test_answers_are_as_before(adopted):
    """Of the engine that went on, and of the one that mapped what it gave."""
    before, after = adopted.answers
    second: dict[str, Any] = adopted.second[0]
    assert (after["tokens"], after["logprobs"]) == (before["tokens"], before["logprobs"])
    assert (second["tokens"], second["logprobs"]) == (before["tokens"], before["logprobs"])
    assert second["parameter_bytes"]["shared"] == second["parameter_bytes"]["all"]


def test_the_engine_keeps_no_more_descriptors_than_before(adopted):
    """Those of the segments, kept for its life, and one connection."""
    assert adopted.grown == 0
