"""One sample: a healthy engine, an interruption, and how everything comes back."""

import time

import msgspec

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery.bench import Bench
from weightkeeper.recovery.levels import Levels
from weightkeeper.recovery.result import Memory, Sample, rounded
from weightkeeper.recovery.scenario import Scenario
from weightkeeper.recovery.witness import Witness

LOOK_SECONDS = {"device": 0.02, "host": 0.5}


def sample(scenario: Scenario, bench: Bench, witness: Witness, number: int, order: int) -> Sample:
    """Take one; a failure is a sample, too, and its processes are ended.

    Raises:
        ConfigError: there is no reference, because the same engine answers otherwise the second time.
    """
    taking = _Taking(scenario, bench, witness)
    blank = Sample(scenario.name, number, order, "failed")
    try:
        scenario.prepare(bench)
        witness.begin(f"{order:03}-{scenario.name}", scenario.times_steps)
        found = taking.take(blank)
    except ServerStartError as error:
        found = taking.told(msgspec.structs.replace(blank, message=str(error)))
    finally:
        taking.end()
        witness.end()
    try:
        scenario.ended(bench)
        if found.outcome != "right":
            bench.kill_engine()  # the next sample must not begin on it
    except ServerStartError as error:
        found = msgspec.structs.replace(
            found, outcome="failed", message=f"{found.message}\nafterwards: {error}".strip()
        )
    return found


class _Taking:
    def __init__(self, scenario: Scenario, bench: Bench, witness: Witness):
        self._scenario = scenario
        self._bench = bench
        self._witness = witness
        self._levels: Levels | None = None
        self._since: float | None = None

    def take(self, blank: Sample) -> Sample:
        bench = self._bench
        where = "device" if bench.gpus else "host"
        self._levels = Levels(bench.used_bytes, LOOK_SECONDS[where])
        since = self._since = time.monotonic()
        gone = self._scenario.interrupt(bench)
        healthy = max(gone, bench.wait_for_health())  # it may have been so all the time
        first, right = self._witness.back(gone)
        is_right, message = self._witness.judge()
        now = bench.used_bytes()
        self.end()
        engine, keeper = bench.engine, bench.keeper_bytes()
        outcome = "right" if is_right else "wrong"
        if self._scenario.holder and engine.fell_back(since):
            outcome = "from disk"
        return self.told(
            msgspec.structs.replace(
                blank,
                outcome=outcome,
                message=message,
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
        """With what the witness saw so far."""
        return found if self._since is None else self._witness.told(found, self._since)

    def end(self) -> None:
        if self._levels is not None:
            self._levels.end()

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
