"""One way to lose an engine and to get it back.

A scenario is prepared, then the interruption comes, then what it needs to be whole again. Between the first two, an
agent begins to work on whatever engine is there; which one that is does not matter, because it is lost.
"""

from weightkeeper.recovery.bench import Bench


class Scenario:
    """One way.

    Attributes:
        name: stable, for the command line and results.
        title: for people, short.
        description: what is lost, and how it comes back.
        holder: name of what holds its weights; empty where nothing does.
        is_start: a new engine starts, so that its throughput from then on is of interest.
        times_steps: so much longer is the agent's job, where it takes a while until the engine is lost.
        group: those of one group come one after the other in a round, because they share what is dear to prepare.
    """

    name: str
    title: str
    description: str
    holder = ""
    is_start = True
    times_steps = 1
    group = ""

    def missing(self, bench: Bench) -> str:
        """Why it cannot be run here; empty where it can."""
        return ""

    def prepare(self, bench: Bench) -> None:
        """Make everything ready and leave a healthy engine.

        Raises:
            ServerStartError: something did not come up.
        """
        bench.ensure()

    def interrupt(self, bench: Bench) -> float:
        """Lose the engine, and have another one begin to start.

        Returns:
            When nothing of the old one answered any more, in seconds of `time.monotonic`.

        Raises:
            ServerStartError: what was to be lost is not.
        """
        raise NotImplementedError

    def ended(self, bench: Bench) -> None:
        """The sample is over: undo what the next one must not find."""
