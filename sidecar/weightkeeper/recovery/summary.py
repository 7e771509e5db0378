"""Numbers made of samples: least, median and most, ratios to the baseline pair by pair; parts of a result joined."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from weightkeeper.errors import ConfigError
from weightkeeper.recovery.result import Ended, Run, Sample, Scenario, Skipped

IPC_CACHE = "ipc_cache"
"""Name of the scenario with vLLM's own cache, to which ratios are as well as to the baseline."""

Measure = Callable[[Sample], float | None]

MEASURES: dict[str, Measure] = {
    "gone": lambda sample: sample.gone_s,
    "health": lambda sample: sample.health_s,
    "first completion": lambda sample: sample.first_s,
    "first right completion": lambda sample: sample.right_s,
    "interruption": lambda sample: sample.interruption_s,
}
"""Name for people → seconds of a sample."""


class Summary(msgspec.Struct, frozen=True):
    """Of some numbers, at least one."""

    count: int
    least: float
    median: float
    most: float


def summary(values: Iterable[float | None]) -> Summary | None:
    """None where nothing was measured."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Summary(len(found), min(found), statistics.median(found), max(found))


def ratio(samples: Sequence["Placed"], scenario: str, baseline: str, measure: Measure) -> Summary | None:
    """Baseline through scenario, in each round in which both came out right: how many times faster it is."""
    values = {
        name: {(one.part, one.sample.round): measure(one.sample) for one in right(samples, name)}
        for name in (scenario, baseline)
    }
    pairs = values[scenario].keys() & values[baseline].keys()
    found = [(values[baseline][key], values[scenario][key]) for key in pairs]
    return summary(base / value for base, value in found if base is not None and value)


def right(samples: Iterable["Placed"], scenario: str) -> list["Placed"]:
    """Those of a scenario that count."""
    return [one for one in samples if one.sample.scenario == scenario and one.sample.outcome == "right"]


class Placed(msgspec.Struct, frozen=True):
    """A sample and the part of a result that it is from."""

    part: str
    sample: Sample


class Result(msgspec.Struct, frozen=True):
    """One run, or several parts of one.

    Attributes:
        runs: in the order given.
        scenarios: of all parts, the baseline first.
        skipped: what no part has measured.
    """

    runs: tuple[Run, ...]
    scenarios: tuple[Scenario, ...]
    skipped: tuple[Skipped, ...]
    samples: tuple[Placed, ...]

    @property
    def baseline(self) -> str:
        return self.runs[0].baseline

    @property
    def is_passed(self) -> bool:
        """Every sample is right, and the wrong agent was caught wherever it was let run."""
        controls = [run.control for run in self.runs if run.control]
        return bool(self.samples) and all(
            [*(one.sample.outcome == "right" for one in self.samples), *(control.caught for control in controls)]
        )

    def of(self, scenario: str) -> list[Placed]:
        return [one for one in self.samples if one.sample.scenario == scenario]

    def held(self, scenario: str, measure: Measure) -> Summary | None:
        """Of the samples that came out right."""
        return summary(measure(one.sample) for one in right(self.samples, scenario))


def join(runs: Sequence[Run]) -> Result:
    """Parts as one result. Each part with two scenarios or more carries a baseline of its own.

    Raises:
        ConfigError: there is none, one was given twice, or they are not of one machine, model and setting.
    """
    if not runs:
        raise ConfigError("no run was given")
    first = runs[0]
    for run in runs[1:]:
        if (fault := difference(first, run)) is not None:
            raise ConfigError(
                f"the runs {first.id} and {run.id} are not parts of one result: {fault}; "
                "`weightkeeper recovery compare` shows two results side by side"
            )
    if len({run.id for run in runs}) < len(runs):
        known = [run.id for run in runs]
        twice = next(one for one in known if known.count(one) > 1)
        raise ConfigError(f"the same run was given twice: {twice}; give each part once")
    scenarios: dict[str, Scenario] = {}
    for run in runs:
        for each in run.scenarios:
            known = scenarios.setdefault(each.name, each)
            scenarios[each.name] = msgspec.structs.replace(
                known, throughput=known.throughput or each.throughput, held=known.held or each.held
            )
    ordered = sorted(scenarios.values(), key=lambda each: each.name != first.baseline)
    skipped = {each.name: each for run in runs for each in run.skipped if each.name not in scenarios}
    samples = [Placed(run.id, sample) for run in runs for sample in run.samples]
    return Result(tuple(runs), tuple(ordered), tuple(skipped.values()), tuple(samples))


def difference(one: Run, other: Run) -> str | None:
    """The first thing in which two runs differ that parts of one result must have in common."""
    if one.baseline != other.baseline:
        return f"the baseline is {one.baseline} and {other.baseline}"
    for what in ("machine", "subject"):
        left, right = getattr(one, what), getattr(other, what)
        for name in left.__struct_fields__:
            if name.endswith("_bytes_s") or name in ("memory_bytes", "kernel"):
                continue  # measured anew by each part, or of the very machine and not of its kind
            values = [[gpu.name for gpu in one.gpus] if name == "gpus" else getattr(one, name) for one in (left, right)]
            if values[0] != values[1]:
                return f"{what} {name.replace('_', ' ')} is {values[0]} and {values[1]}"
    return None


ENDINGS: dict[Ended, str] = {
    "running": "it was killed, or goes on",
    "interrupted": "it was interrupted",
    "out of time": "its time was over",
    "failed": "it failed",
}


def unfinished(result: Result) -> list[str]:
    """Of each part that has not all of its samples: how many it has, and why no more."""
    return [
        f"part {run.id} has {len(run.samples)} samples of {run.rounds} rounds that were asked for: {ENDINGS[run.ended]}"
        + (f" ({run.message})" if run.message else "")
        for run in result.runs
        if run.ended in ENDINGS
    ]
