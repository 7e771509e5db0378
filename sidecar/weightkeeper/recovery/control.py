"""The control of the check: the deliberately wrong agent is killed as any may be, and has to be found out."""

from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.job_witness import moved
from weightkeeper.recovery.result import Control
from weightkeeper.recovery.state import Job


def caught(bench: Bench, reference: Job) -> Control:
    """Let it work on the engine that is there, kill it in the middle, and start it again.

    Raises:
        ServerStartError: it does not get so far.
    """
    agent = bench.new_agent("wrong", wrong=True)
    agent.start()
    seconds = bench.job_seconds()
    agent.wait_for(lambda: len(agent.effects()) >= max(1, bench.settings.steps // 3), "done a third", seconds)
    agent.kill()
    agent.start()
    agent.wait(seconds)
    verdict = agent.check(reference)
    job = agent.job()
    bench.end_agent()
    return Control(caught=not verdict.passed, verdict=moved(verdict, job.events[0].at))
