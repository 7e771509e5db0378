"""What a run of the benchmark is, as data: the JSON that `run` writes and `report` reads.

`weightkeeper recovery schema` prints its JSON Schema. Seconds are counted from the interruption where nothing else is
said; bytes are bytes. What was not measured is null, never 0.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from weightkeeper.errors import ConfigError
from weightkeeper.recovery.answers import Answer
from weightkeeper.recovery.check import Verdict
from weightkeeper.recovery.subject import Machine, Subject

FORMAT = "weightkeeper-recovery-1"

MAX_BYTES = 64 * 1024 * 1024
"""A run of ten scenarios and five rounds is some 300 KB."""

Outcome = Literal["right", "wrong", "from disk", "failed"]
"""Of a sample: the agent's work is intact (without an agent: the completion is the reference's) and weights came from
where they should; an answer or an effect is not as in the uninterrupted job, or the completion another one; it went to
disk, which was not asked for; there was no answer in time."""

Ended = Literal["running", "whole", "interrupted", "out of time", "failed"]
"""Of a run: it goes on, or was killed; all of its samples are there; somebody ended it; the next sample had no room
within the time limit; the first start failed."""


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Memory in use at a moment: seconds from the interruption, and bytes."""

    at: float
    nbytes: int


class Memory(msgspec.Struct, frozen=True):
    """Memory during one sample.

    Attributes:
        where: `device`, as NVML counts it for everybody (without what was there before processes of a run), or `host`:
            the processes' proportional share (PSS) without shared memory, and the weights that a keeper holds.
        keeper_bytes: held by the keeper or the daemon when no engine runs.
        engine_bytes: of the engine at the sample's end, without what the keeper holds.
        peak_bytes: the most of both together.
        levels: of both together, over time.
    """

    where: Literal["device", "host"]
    keeper_bytes: int
    engine_bytes: int
    peak_bytes: int
    levels: tuple[Level, ...] = ()


class Moment(msgspec.Struct, frozen=True):
    """One event of the agent's work; `at` counts from the interruption and is below 0 before it."""

    at: float
    kind: str
    step: int
    agent: int
    detail: str = ""


class Sample(msgspec.Struct, frozen=True):
    """One interruption and what became of it.

    Attributes:
        scenario: name of the scenario.
        round: counts from 1. Samples of one round are compared with each other.
        order: place within the run, from 1.
        message: why it failed, or what is wrong.
        gone_s: until the old engine was gone, and its memory.
        health_s: to the first 200 of /health of the new one.
        first_s: to the first request of the agent that the new one completed; without an agent, to the completion.
        right_s: to the first whose tokens are those of the uninterrupted job, or of the reference.
        phases: name → seconds, of the way to the first right answer; they add up to `right_s`.
        details: name → seconds or milliseconds that logs tell; they lie within phases.
        agent: what the check said; `agent.longest` is the interruption as the agent saw it. Null where none worked.
        timeline: the agent's events but for its questions; of failed requests, some (`agent.failed` counts all).
    """

    scenario: str
    round: int
    order: int
    outcome: Outcome
    message: str = ""
    gone_s: float | None = None
    health_s: float | None = None
    first_s: float | None = None
    right_s: float | None = None
    phases: dict[str, float] = {}
    details: dict[str, float] = {}
    memory: Memory | None = None
    agent: Verdict | None = None
    timeline: tuple[Moment, ...] = ()

    @property
    def interruption_s(self) -> float | None:
        """The longest time in which the agent got nothing done."""
        return self.agent.longest.seconds if self.agent and self.agent.longest else None


class Throughput(msgspec.Struct, frozen=True):
    """Tokens a second from a new engine on, under load.

    Attributes:
        clients: that ask at the same time.
        first_minute: mean of the first `minute_s` seconds from the first 200 of /health on.
        steady: mean of the `steady_s` seconds behind it.
        minute_s: 60, or less where so few seconds were asked for.
        curve: tokens in each second.
    """

    clients: int
    first_minute: float
    steady: float
    minute_s: float
    steady_s: float
    curve: tuple[int, ...] = ()


class Held(msgspec.Struct, frozen=True):
    """What holds the weights while no engine runs.

    Attributes:
        ready_s: from its start until it held them.
        weight_bytes: as it says itself; null where it says nothing.
        device_bytes: more in use on the device than before its start. Where two came up at once, null for the one that
            tells its `weight_bytes`; the other has the rest of what was in use once no engine ran.
        peak_bytes: the most while it loaded; null where others came and went meanwhile.
        resident_bytes: of its processes, in host memory.
        cuda_libraries: that are mapped into them.
    """

    name: str
    ready_s: float
    processes: int
    resident_bytes: int
    cuda_libraries: tuple[str, ...]
    weight_bytes: int | None = None
    device_bytes: int | None = None
    peak_bytes: int | None = None


class Scenario(msgspec.Struct, frozen=True):
    """One way to lose an engine and to get it back.

    Attributes:
        is_start: an engine is lost and another one starts; without it, ratios to the baseline say nothing.
        held: what holds the weights meanwhile; null where nothing does, or what was there before the run.
    """

    name: str
    title: str
    description: str
    is_start: bool = True
    held: Held | None = None
    throughput: Throughput | None = None


class Skipped(msgspec.Struct, frozen=True):
    """A scenario that was not measured, and why."""

    name: str
    title: str
    reason: str


class Control(msgspec.Struct, frozen=True):
    """The deliberately wrong agent, killed and started again. `caught` is what has to be true."""

    caught: bool
    verdict: Verdict


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run, or one part of it.

    Attributes:
        id: of this part, drawn.
        command: that made it.
        started: ISO 8601 in UTC.
        seconds: it took so far.
        rounds: that were asked for.
        baseline: name of the scenario that ratios are to, in the same round of the same part.
        reference: what the check says of the uninterrupted job; its pauses are the usual ones. Null without an agent.
        expected: without an agent, the completion of the first counted start from the disk, which had nothing left to
            compile; all others are compared with it.
    """

    format: Literal["weightkeeper-recovery-1"]
    id: str
    command: tuple[str, ...]
    started: str
    seconds: float
    ended: Ended
    rounds: int
    seed: int
    baseline: str
    machine: Machine
    subject: Subject
    scenarios: tuple[Scenario, ...]
    skipped: tuple[Skipped, ...]
    samples: tuple[Sample, ...]
    reference: Verdict | None = None
    control: Control | None = None
    message: str = ""
    expected: Answer | None = None


def rounded(seconds: float) -> float:
    """As seconds are kept."""
    return round(seconds, 4)


def read(path: Path) -> Run:
    """The run in a file.

    Raises:
        ConfigError: it cannot be read, or is no run; the message says where.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: over {MAX_BYTES} bytes; is this the JSON of `weightkeeper recovery run`?")
        return msgspec.json.decode(raw, type=Run)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the JSON of `weightkeeper recovery run`") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; give the JSON of `weightkeeper recovery run`") from error


def write(path: Path, run: Run) -> None:
    """Replace a file by this run, whole or not at all."""
    raw = msgspec.json.format(msgspec.json.encode(run), indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def schema() -> dict[str, object]:
    """JSON Schema of a run, with the descriptions above."""
    return msgspec.json.schema(Run)
