"""The uncounted starts of a run, which fill the caches, and the uninterrupted job that others are compared with."""

from collections.abc import Sequence

import msgspec

from weightkeeper.errors import ConfigError
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.check import Verdict
from weightkeeper.recovery.engine import PLAIN
from weightkeeper.recovery.holders import Daemon, Holder, Keeper
from weightkeeper.recovery.scenario import Scenario
from weightkeeper.recovery.state import Job

BESIDE = {"kv-cache-memory-bytes": 1 << 30}
"""Of an engine that starts beside others: vLLM's memory profiling does not bear that they come and go."""


def make(bench: Bench, baseline: Scenario, scenarios: Sequence[Scenario], together: bool) -> float:
    """Make them; the last engine is left, healthy.

    One that compiled may answer otherwise than those after it: kernels are tuned once more at its first run, which
    later starts do not see. So where it may have compiled, or had others beside it, it gives no reference. With an
    agent, whose reference is its job on the engine that is left, another start follows; without one, the first counted
    start does.

    Args:
        baseline: way of these starts.
        scenarios: whose holders start `together` with the first one.

    Returns:
        Seconds of the last one to the first 200 of /health.

    Raises:
        ServerStartError: something did not come up.
    """
    if together:
        _together(bench, holders_of(scenarios))
    else:
        _again(bench, baseline)
    took = bench.wait_for_health() - bench.engine.started
    if bench.settings.has_agent and (together or bench.compiles):
        _again(bench, baseline)
        took = bench.wait_for_health() - bench.engine.started
    return took


def holders_of(scenarios: Sequence[Scenario]) -> list[type[Holder]]:
    """What holds weights for any of them."""
    known = {kind.name: kind for kind in (Keeper, Daemon)}
    return [known[name] for name in dict.fromkeys(one.holder for one in scenarios) if name in known]


def reference(bench: Bench, longest: int) -> tuple[Job, Verdict]:
    """The job on the engine that is there, `longest` times as long as usual, and what the check says of it.

    Raises:
        ConfigError: done once more, it has other answers.
        ServerStartError: it was not done.
    """
    jobs = []
    for name, times in (("reference", longest), ("reference-again", 1)):
        agent = bench.new_agent(name, times_steps=times)
        agent.start()
        agent.wait(bench.job_seconds(times))
        jobs.append(agent.job())
        verdict = agent.check(jobs[0])
    if not verdict.passed:
        raise ConfigError(
            f"the same job done twice on the same engine differs: {'; '.join(verdict.faults)}; answers cannot be "
            "compared here (see vLLM's VLLM_BATCH_INVARIANT)"
        )
    return jobs[0], told(verdict)


def told(verdict: Verdict) -> Verdict:
    """Of a job without an interruption: its pauses lie at no moment of interest."""
    if verdict.longest is None:
        return verdict
    return msgspec.structs.replace(verdict, longest=msgspec.structs.replace(verdict.longest, start=0.0))


def _again(bench: Bench, baseline: Scenario) -> None:
    """Another engine, whether there is one or not."""
    if bench.engine is not None:
        baseline.prepare(bench)
    baseline.interrupt(bench)


def _together(bench: Bench, kinds: Sequence[type[Holder]]) -> None:
    """Start holders and an engine from the disk at once; returns when the holders have the weights."""
    bench.holding.begin(kinds)
    bench.start(bench.config("disk-together", more=BESIDE), PLAIN)
    bench.holding.wait()
