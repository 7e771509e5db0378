"""Goes through the scenarios, several times in shuffled order, and keeps every sample as soon as it is there."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from weightkeeper.errors import ConfigError, NoAnswerError, ServerStartError
from weightkeeper.recovery import machine, result, throughput
from weightkeeper.recovery.bench import Bench, Settings
from weightkeeper.recovery.check import Verdict
from weightkeeper.recovery.control import caught
from weightkeeper.recovery.result import FORMAT, Run, Sample, Skipped, Subject
from weightkeeper.recovery.sampling import AGENT_SECONDS, sample
from weightkeeper.recovery.scenarios import BASELINE, Scenario
from weightkeeper.recovery.state import Job

FAILURES = 2
"""In a row, after which a scenario is given up."""


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
    """

    rounds: int
    seed: int
    seconds: float
    load_s: float
    loaded: frozenset[str] | None
    clients: int
    file: Path
    command: tuple[str, ...]


class Runner:
    """One run.

    Args:
        bench: for its processes; the caller closes it.
        scenarios: that were asked for, the baseline among them.
        others: that were not.
        say: takes lines for people.
    """

    def __init__(
        self, bench: Bench, plan: Plan, scenarios: Sequence[Scenario], others: Sequence[Scenario],
        say: Callable[[str], None],
    ):  # fmt: skip
        self._bench = bench
        self._plan = plan
        self._say = say
        self._began = time.monotonic()
        self._took: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._reference: Job | None = None
        missing = {one.name: one.missing(bench) for one in scenarios}
        self._scenarios = [one for one in scenarios if not missing[one.name]]
        skipped = [Skipped(one.name, one.title, missing[one.name]) for one in scenarios if missing[one.name]]
        skipped += [Skipped(one.name, one.title, "was not asked for") for one in others]
        self.run = self._first(tuple(skipped))

    def go(self) -> Run:
        """Measure everything; `run` has what there is, at any moment, and so has the file.

        Raises:
            ServerStartError: the first engine did not come up, so that there is nothing to compare with.
            ConfigError: the same job has other answers on the same engine.
        """
        self._keep(ended="running")
        try:
            self._refer()
            self._load()
            for one, number in self._rounds():
                self._take(one, number)
        except KeyboardInterrupt:
            self._keep(ended="interrupted", message="Ctrl-C")
            raise
        except SystemExit as error:
            self._keep(ended="interrupted", message=f"by a signal, exit code {error.code}")
            raise
        except BaseException as error:
            self._keep(ended="failed", message=str(error))
            raise
        if self.run.ended == "running":
            self._keep(ended="whole")
        return self.run

    def _refer(self) -> None:
        """The uncounted first start: it fills caches, and the job done on it is what all others are compared with."""
        bench = self._bench
        self._say("first start, uncounted: it fills the caches and gives the reference")
        baseline = next((one for one in self._scenarios if one.name == BASELINE), None)
        if baseline is None:
            raise ConfigError(f"the baseline cannot be measured here: {self.run.skipped[0].reason}")
        for _ in range(2 if bench.compiles else 1):  # what others are compared with has compiled nothing itself
            if bench.engine is not None:
                baseline.prepare(bench)
            baseline.interrupt(bench)
            took = bench.wait_for_health() - bench.engine.started
        jobs = []
        longest = max(one.times_steps for one in self._scenarios)
        for name, times in (("reference", longest), ("reference-again", 1)):
            agent = bench.new_agent(name, times_steps=times)
            agent.start()
            agent.wait(AGENT_SECONDS)
            jobs.append(agent.job())
            verdict = agent.check(jobs[0])
        if not verdict.passed:
            raise ConfigError(
                f"the same job done twice on the same engine differs: {'; '.join(verdict.faults)}; answers cannot be "
                "compared here (see vLLM's VLLM_BATCH_INVARIANT)"
            )
        self._reference = jobs[0]
        self._keep(reference=told(verdict))
        self._say(f"healthy after {took:.1f} s; a step of the agent takes {verdict.usual:.2f} s")
        self._keep(control=caught(bench, jobs[0]))
        self._say(f"the deliberately wrong agent was {'caught' if self.run.control.caught else 'NOT CAUGHT'}")

    def _load(self) -> None:
        """Throughput from a start on, once for each scenario that starts an engine; these starts are not counted."""
        loaded = self._plan.loaded
        for one in self._scenarios if self._plan.load_s else ():
            if not one.is_start or (loaded is not None and one.name not in loaded):
                continue
            if self._is_over(one, 2 * self._plan.load_s):
                self._say(f"throughput: {one.name}: there is no time for it")
                continue
            self._say(f"throughput: {one.name}")
            begun = time.monotonic()
            try:
                one.prepare(self._bench)
                one.interrupt(self._bench)
                healthy = self._bench.wait_for_health()
                self._took[one.name] = time.monotonic() - begun + AGENT_SECONDS / 10
                measured = throughput.measure(
                    self._bench.port,
                    self._bench.model_name,
                    self._plan.clients,
                    self._plan.load_s,
                    self._plan.load_s,
                    healthy,
                )
            except (ServerStartError, NoAnswerError) as error:
                self._say(f"throughput: {one.name}: {error}")
                measured = None
            with contextlib.suppress(ServerStartError):  # the next sample says what is wrong
                one.ended(self._bench)
                if measured is None:
                    self._bench.kill_engine()
            self._describe(one, measured)

    def _rounds(self) -> Iterator[tuple[Scenario, int]]:
        """Every scenario once a round, in shuffled order; those of a group one after the other."""
        order = random.Random(self._plan.seed)  # noqa: S311  an order, not a secret
        for number in range(1, self._plan.rounds + 1):
            for one in shuffled(self._scenarios, order):
                if self._failures.get(one.name, 0) >= FAILURES:
                    continue
                if self._is_over(one):
                    self._say(f"time is over before round {number}, {one.name}")
                    self._keep(ended="out of time")
                    return
                yield one, number

    def _is_over(self, one: Scenario, more: float = 0.0) -> bool:
        """Whether the next sample would probably not end in time."""
        expected = self._took.get(one.name, max(self._took.values(), default=0.0))
        return time.monotonic() - self._began + expected + more > self._plan.seconds

    def _take(self, one: Scenario, number: int) -> None:
        begun = time.monotonic()
        taken = sample(one, self._bench, self._reference, number, len(self.run.samples) + 1)
        self._took[one.name] = time.monotonic() - begun
        self._failures[one.name] = self._failures.get(one.name, 0) + 1 if taken.outcome == "failed" else 0
        self._describe(one)
        self._keep(samples=(*self.run.samples, taken))
        self._say(f"{self._place()} round {number}, {line(one, taken)}")
        if self._failures[one.name] == FAILURES and number < self._plan.rounds:
            reason = f"given up after {FAILURES} failures in a row: {taken.message.splitlines()[0]}"
            self._keep(skipped=(*self.run.skipped, Skipped(one.name, one.title, reason)))

    def _place(self) -> str:
        total = self._plan.rounds * len(self._scenarios)
        left = sum(self._took.get(one.name, 0.0) for one in self._scenarios) * self._plan.rounds
        left -= sum(self._took.get(one.scenario, 0.0) for one in self.run.samples)
        return f"[{len(self.run.samples)}/{total}, about {max(0, math.ceil(left / 60))} min left]"

    def _describe(self, one: Scenario, measured: result.Throughput | None = None) -> None:
        known = {each.name: each for each in self.run.scenarios}
        before = known.get(one.name)
        known[one.name] = result.Scenario(
            one.name, one.title, one.description, one.is_start, self._bench.held.get(one.holder),
            measured or (before.throughput if before else None),
        )  # fmt: skip
        self._keep(scenarios=tuple(known.values()))

    def _keep(self, **changes) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        self.run = msgspec.structs.replace(self.run, seconds=seconds, **changes)
        result.write(self._plan.file, self.run)

    def _first(self, skipped: tuple[Skipped, ...]) -> Run:
        settings, checkpoint = self._bench.settings, self._bench.checkpoint
        self._say("reading the model's files, for the speed of disk and page cache")
        return Run(
            format=FORMAT,
            id=secrets.token_hex(6),
            command=self._plan.command,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            seconds=0.0,
            ended="running",
            rounds=self._plan.rounds,
            seed=self._plan.seed,
            baseline=BASELINE,
            machine=machine.facts([file.path for file in checkpoint.weight_files]),
            subject=Subject(
                settings.model.resolve().name,
                checkpoint.nbytes,
                plain(settings),
                settings.steps,
                settings.tokens,
                settings.place,
            ),
            skipped=skipped,
        )


def plain(settings: Settings) -> dict[str, str | int | float | bool | None]:
    """Options as a result has them: what is no plain value, as JSON."""
    return {
        name: value if value is None or isinstance(value, (str, int, float)) else msgspec.json.encode(value).decode()
        for name, value in settings.options.items()
    }


def shuffled(scenarios: Sequence[Scenario], order: random.Random) -> list[Scenario]:
    """All of them, those of one group one after the other."""
    groups: dict[str, list[Scenario]] = {}
    for one in scenarios:
        groups.setdefault(one.group or one.name, []).append(one)
    names = order.sample(list(groups), len(groups))
    return [one for name in names for one in order.sample(groups[name], len(groups[name]))]


def told(verdict: Verdict) -> Verdict:
    """Of a job without an interruption: its pauses lie at no moment of interest."""
    if verdict.longest is None:
        return verdict
    return msgspec.structs.replace(verdict, longest=msgspec.structs.replace(verdict.longest, start=0.0))


def line(one: Scenario, taken: Sample) -> str:
    """A sample for people."""
    parts = [f"{one.name}: {taken.outcome}"]
    for name, value in (("healthy", taken.health_s), ("right", taken.right_s), ("agent paused", taken.interruption_s)):
        if value is not None:
            parts.append(f"{name} {'' if name == 'agent paused' else 'after '}{value:.2f} s")
    if taken.agent and taken.agent.failed + taken.agent.cut:
        parts.append(f"{taken.agent.failed} requests failed, {taken.agent.cut} cut short")
    return ", ".join(parts) + (f"\n{taken.message}" if taken.message else "")
