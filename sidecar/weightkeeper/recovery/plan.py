"""How a run goes: how often, in which order, for how long, and where to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightkeeper.recovery.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes.

    Attributes:
        rounds: samples of each scenario.
        seed: of the order.
        seconds: for everything; the next sample is not begun where it would probably not end in time.
        load_s: seconds of throughput after a start, twice: as the first minute, and steady; 0 for none.
        loaded: names of the scenarios after which throughput is measured; None for all that start an engine.
        clients: that ask at the same time for throughput.
        file: for the result; written after each sample.
        command: that made it, for the result.
        together: holders and the uncounted first engine start at the same time.
    """

    rounds: int
    seed: int
    seconds: float
    load_s: float
    loaded: frozenset[str] | None
    clients: int
    file: Path
    command: tuple[str, ...]
    together: bool = False


def shuffled(scenarios: Sequence[Scenario], order: random.Random) -> list[Scenario]:
    """All of them, those of one group one after the other."""
    groups: dict[str, list[Scenario]] = {}
    for one in scenarios:
        groups.setdefault(one.group or one.name, []).append(one)
    names = order.sample(list(groups), len(groups))
    return [one for name in names for one in order.sample(groups[name], len(groups[name]))]
