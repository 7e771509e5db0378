"""One sample: an agent at work, an interruption, and how everything comes back."""

import time
from collections.abc import Sequence

import msgspec

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery.agent_process import AgentProcess
from weightkeeper.recovery.bench import AGENT_SECONDS, Bench
from weightkeeper.recovery.check import Verdict
from weightkeeper.recovery.levels import Levels
from weightkeeper.recovery.result import Memory, Moment, Sample
from weightkeeper.recovery.scenarios import Scenario
from weightkeeper.recovery.state import Event, Job

DONE_BEFORE = 3
"""The interruption comes when one in so many steps is done."""

DETAIL_CHARACTERS = 160
FAILURES_SHOWN = 30
LOOK_SECONDS = {"device": 0.02, "host": 0.5}


def sample(scenario: Scenario, bench: Bench, reference: Job, number: int, order: int) -> Sample:
    """Take one; a failure is a sample, too, and its processes are ended."""
    taking = _Taking(scenario, bench, reference)
    blank = Sample(scenario.name, number, order, "failed")
    try:
        scenario.prepare(bench)
        bench.new_agent(f"{order:03}-{scenario.name}", times_steps=scenario.times_steps)
        found = taking.take(blank)
    except ServerStartError as error:
        found = taking.told(msgspec.structs.replace(blank, message=str(error)))
    finally:
        taking.end()
        bench.end_agent()
    try:
        scenario.ended(bench)
        if found.outcome != "right":
            bench.kill_engine()  # the next sample's agent must not begin on it
    except ServerStartError as error:
        found = msgspec.structs.replace(
            found, outcome="failed", message=f"{found.message}\nafterwards: {error}".strip()
        )
    return found


class _Taking:
    def __init__(self, scenario: Scenario, bench: Bench, reference: Job):
        self._scenario = scenario
        self._bench = bench
        self._reference = reference
        self._answers = {step.number: step.answer for step in reference.steps}
        self._levels: Levels | None = None
        self._since: float | None = None

    def take(self, blank: Sample) -> Sample:
        bench, agent = self._bench, self._bench.agent
        agent.start()
        before = max(1, bench.settings.steps // DONE_BEFORE)
        agent.wait_for(lambda: self._answered(agent) >= before, f"done {before} steps", AGENT_SECONDS)
        where = "device" if bench.gpus else "host"
        self._levels = Levels(bench.used_bytes, LOOK_SECONDS[where])
        since = self._since = time.monotonic()
        gone = self._scenario.interrupt(bench)
        healthy = bench.wait_for_health()
        first, right = self._back(agent, gone)
        agent.wait(AGENT_SECONDS)
        verdict = agent.check(self._reference)
        now = bench.used_bytes()
        self.end()
        engine = bench.engine
        outcome = "right" if verdict.passed else "wrong"
        if self._scenario.holder and engine.fell_back(since):
            outcome = "from disk"
        keeper = bench.keeper_bytes()
        return self.told(
            msgspec.structs.replace(
                blank,
                outcome=outcome,
                message="; ".join(verdict.faults),
                gone_s=rounded(gone - since),
                health_s=rounded(healthy - since),
                first_s=rounded(first - since),
                right_s=None if right is None else rounded(right - since),
                phases=self._phases(since, gone, healthy, right or first),
                details=engine.details(since),
                memory=Memory(where, keeper, max(0, now - keeper), self._levels.peak, self._levels.since(since)),
            )
        )

    def told(self, found: Sample) -> Sample:
        """With what the agent did so far."""
        agent, since = self._bench.agent, self._since
        job = agent.job() if agent is not None else None
        if job is None or since is None:
            return found
        timeline = tuple(
            Moment(rounded(event.at - since), event.kind, event.step, event.pid, event.detail[:DETAIL_CHARACTERS])
            for event in shown(job.events)
        )
        return msgspec.structs.replace(found, timeline=timeline, agent=moved(agent.check(self._reference), since))

    def end(self) -> None:
        if self._levels is not None:
            self._levels.end()

    def _answered(self, agent: AgentProcess) -> int:
        job = agent.job()
        return sum(event.kind == "answered" for event in job.events) if job else 0

    def _back(self, agent: AgentProcess, gone: float) -> tuple[float, float | None]:
        """When the agent had its first answer behind the interruption, and its first right one."""

        def found() -> list[tuple[float, int]]:
            job = agent.job()
            return [(event.at, event.step) for event in job.events if event.kind == "answered" and event.at > gone]

        seconds = self._bench.settings.limit_s + AGENT_SECONDS
        agent.wait_for(lambda: bool(found()) or agent.job().finished, "had an answer of the new engine", seconds)
        if not found():
            raise ServerStartError("the agent had done its job before the old engine was gone; give it more --steps")
        agent.wait_for(lambda: agent.job().finished, "finished its job", AGENT_SECONDS)
        given = {step.number: step.answer for step in agent.job().steps}
        answers = found()
        right = (at for at, step in answers if given[step] == self._answers[step])
        return answers[0][0], next(right, None)

    def _phases(self, since: float, gone: float, healthy: float, answered: float) -> dict[str, float]:
        """From the interruption to the right answer."""
        parts = {"old engine gone": gone - since}
        begun = gone
        if self._scenario.is_start:
            healthy = min(healthy, answered)  # on a busy machine our look may come later than the agent's answer
            parts |= self._bench.engine.phases(gone, healthy)
            begun = healthy
        parts["answered"] = max(0.0, answered - begun)
        return {name: rounded(seconds) for name, seconds in parts.items()}


def shown(events: Sequence[Event]) -> list[Event]:
    """Those for the timeline: of requests that failed, FAILURES_SHOWN at most, here and there; no questions."""
    failed = [event for event in events if event.kind == "failed"]
    every = -(-len(failed) // FAILURES_SHOWN) or 1
    kept = {id(event) for event in failed[::every]}
    return [event for event in events if event.kind != "asked" and (event.kind != "failed" or id(event) in kept)]


def moved(verdict: Verdict, since: float) -> Verdict:
    """With its longest pause counted from the interruption."""
    if verdict.longest is None:
        return verdict
    pause = msgspec.structs.replace(
        verdict.longest, start=rounded(verdict.longest.start - since), seconds=rounded(verdict.longest.seconds)
    )
    return msgspec.structs.replace(verdict, longest=pause, usual=rounded(verdict.usual))


def rounded(seconds: float) -> float:
    return round(seconds, 4)
