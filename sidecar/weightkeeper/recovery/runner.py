"""Goes through the scenarios, several times in shuffled order, and keeps every sample as soon as it is there."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

import msgspec

from weightkeeper.errors import ConfigError, NoAnswerError, ServerStartError
from weightkeeper.recovery import first_starts, machine, result, throughput
from weightkeeper.recovery.bench import AGENT_SECONDS, Bench, Settings
from weightkeeper.recovery.control import caught
from weightkeeper.recovery.job_witness import JobWitness
from weightkeeper.recovery.plan import Plan, shuffled
from weightkeeper.recovery.result import FORMAT, Run, Sample, Skipped
from weightkeeper.recovery.sampling import sample
from weightkeeper.recovery.scenario import Scenario
from weightkeeper.recovery.scenarios import BASELINE
from weightkeeper.recovery.subject import Subject
from weightkeeper.recovery.witness import CompletionWitness, Witness

FAILURES = 2
"""In a row, after which a scenario is given up."""


class Runner:
    """One run.

    Args:
        bench: for its processes; the caller closes it.
        scenarios: that were asked for, the baseline among them.
        others: that were not.
        say: takes lines for people.

    Raises:
        ConfigError: `together`, and nothing would start beside the first engine.
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
        self._witness: Witness | None = None
        missing = {one.name: one.missing(bench) for one in scenarios}
        self._scenarios = [one for one in scenarios if not missing[one.name]]
        if plan.together and not first_starts.holders_of(self._scenarios):
            raise ConfigError(
                "--together: no sidecar or daemon holds weights for any of these scenarios, so that nothing would "
                "start beside the first engine; leave it out, or add one of --scenarios mapped, reload, ipc_cache"
            )
        skipped = [Skipped(one.name, one.title, missing[one.name]) for one in scenarios if missing[one.name]]
        if skipped and [one.name for one in self._scenarios] == [BASELINE]:
            told = "; ".join(f"{one.name}: {one.reason}" for one in skipped)
            raise ConfigError(f"--scenarios: none of them can be measured here: {told}")
        for one in skipped:
            say(f"left out: {one.name}: {one.reason}")
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
            self._begin()
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

    def _begin(self) -> None:
        """The uncounted first start, and who sees what comes back from then on."""
        bench, settings = self._bench, self._bench.settings
        beside = ", beside what holds weights" if self._plan.together else ""
        self._say(f"first start, uncounted: it fills the caches{beside}")
        baseline = next((one for one in self._scenarios if one.name == BASELINE), None)
        if baseline is None:
            raise ConfigError(f"the baseline cannot be measured here: {self.run.skipped[0].reason}")
        took = first_starts.make(bench, baseline, self._scenarios, self._plan.together)
        self._say(f"healthy after {took:.1f} s")
        if not settings.has_agent:
            self._witness = CompletionWitness(bench.port, bench.model_name, settings.tokens, settings.limit_s)
            return
        longest = max(one.times_steps for one in self._scenarios)
        self._say(f"the agent does its job of {settings.steps * longest} steps without an interruption, and once more")
        job, verdict = first_starts.reference(bench, longest)
        self._witness = JobWitness(bench, job)
        self._keep(reference=verdict)
        self._say(f"a step of the agent takes {verdict.usual:.2f} s")
        self._keep(control=caught(bench, job))
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
            ordered = shuffled(self._scenarios, order)
            if number == 1 and not self._bench.settings.has_agent:
                ordered.sort(key=lambda one: one.name != BASELINE)  # it gives the reference
            for one in ordered:
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
        """Take a sample and keep it.

        Raises:
            ServerStartError: it was to give the reference, and there is none.
        """
        begun = time.monotonic()
        taken = sample(one, self._bench, self._witness, number, len(self.run.samples) + 1)
        self._took[one.name] = time.monotonic() - begun
        self._failures[one.name] = self._failures.get(one.name, 0) + 1 if taken.outcome == "failed" else 0
        self._describe(one)
        self._keep(samples=(*self.run.samples, taken))
        self._say(f"{self._place()} round {number}, {line(one, taken)}")
        if isinstance(self._witness, CompletionWitness):
            self._keep(expected=self._witness.expected)
            if self._witness.expected is None:
                raise ServerStartError(f"the first start from the disk gave no reference: {taken.message}")
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
                settings.has_agent,
                self._bench.savings,
            ),
            scenarios=(),
            skipped=skipped,
            samples=(),
        )


def plain(settings: Settings) -> dict[str, str | int | float | bool | None]:
    """Options as a result has them: what is no plain value, as JSON."""
    return {
        name: value if value is None or isinstance(value, (str, int, float)) else msgspec.json.encode(value).decode()
        for name, value in settings.options.items()
    }


def line(one: Scenario, taken: Sample) -> str:
    """A sample for people."""
    parts = [f"{one.name}: {taken.outcome}"]
    for name, value in (("healthy", taken.health_s), ("right", taken.right_s), ("agent paused", taken.interruption_s)):
        if value is not None:
            parts.append(f"{name} {'' if name == 'agent paused' else 'after '}{value:.2f} s")
    if taken.agent and taken.agent.failed + taken.agent.cut:
        parts.append(f"{taken.agent.failed} requests failed, {taken.agent.cut} cut short")
    return ", ".join(parts) + (f"\n{taken.message}" if taken.message else "")
