"""The agent at work while its engine is lost: when it was answered again, and whether its job is intact."""

from collections.abc import Sequence

import msgspec

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery.agent_process import AgentProcess
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.check import Verdict
from weightkeeper.recovery.result import Moment, Sample, rounded
from weightkeeper.recovery.state import Event, Job
from weightkeeper.recovery.witness import Judgement, Witness

DONE_BEFORE = 3
"""The interruption comes when one in so many steps is done."""

DETAIL_CHARACTERS = 160
FAILURES_SHOWN = 30


class JobWitness(Witness):
    """A new agent for each sample, whose finished job is compared with an uninterrupted one.

    Args:
        bench: whose agent it is.
        reference: the uninterrupted job.
    """

    def __init__(self, bench: Bench, reference: Job):
        self._bench = bench
        self._reference = reference
        self._answers = {step.number: step.answer for step in reference.steps}
        self._job_seconds = bench.job_seconds()

    def begin(self, name: str, times_steps: int) -> None:
        agent = self._bench.new_agent(name, times_steps=times_steps)
        agent.start()
        self._job_seconds = self._bench.job_seconds(times_steps)
        before = max(1, self._bench.settings.steps // DONE_BEFORE)
        agent.wait_for(lambda: _answered(agent) >= before, f"done {before} steps", self._job_seconds)

    def back(self, gone: float) -> tuple[float, float | None]:
        agent = self._bench.agent

        def found() -> list[tuple[float, int]]:
            job = agent.job()
            return [(event.at, event.step) for event in job.events if event.kind == "answered" and event.at > gone]

        seconds = self._bench.settings.limit_s + self._job_seconds
        agent.wait_for(lambda: bool(found()) or agent.job().finished, "had an answer of the new engine", seconds)
        if not found():
            raise ServerStartError("the agent had done its job before the old engine was gone; give it more --steps")
        agent.wait_for(lambda: agent.job().finished, "finished its job", self._job_seconds)
        agent.wait(self._job_seconds)
        given = {step.number: step.answer for step in agent.job().steps}
        answers = found()
        right = (at for at, step in answers if given[step] == self._answers[step])
        return answers[0][0], next(right, None)

    def judge(self) -> Judgement:
        verdict = self._bench.agent.check(self._reference)
        return verdict.passed, "; ".join(verdict.faults)

    def told(self, found: Sample, since: float) -> Sample:
        agent = self._bench.agent
        job = agent.job() if agent is not None else None
        if job is None:
            return found
        timeline = tuple(
            Moment(rounded(event.at - since), event.kind, event.step, event.pid, event.detail[:DETAIL_CHARACTERS])
            for event in shown(job.events)
        )
        return msgspec.structs.replace(found, timeline=timeline, agent=moved(agent.check(self._reference), since))

    def end(self) -> None:
        self._bench.end_agent()


def _answered(agent: AgentProcess) -> int:
    job = agent.job()
    return sum(event.kind == "answered" for event in job.events) if job else 0


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
