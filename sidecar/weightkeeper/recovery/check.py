"""Whether an interrupted job came back intact: equal to an uninterrupted one step by step, each side effect once."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from weightkeeper.recovery.ledger import Effect
from weightkeeper.recovery.questions import effect
from weightkeeper.recovery.state import Event, Job


class Pause(msgspec.Struct, frozen=True):
    """Time without a finished step.

    Attributes:
        start: of the pause, in seconds of `time.monotonic`; in a result, counted from the interruption.
        seconds: its length.
        step: the one whose answer ended it.
    """

    start: float
    seconds: float
    step: int


class Verdict(msgspec.Struct, frozen=True):
    """What the check found.

    Attributes:
        passed: nothing is wrong.
        faults: everything that is, in words.
        steps: finished, of `length`.
        different: steps whose answer is not that of the uninterrupted job.
        effects: had in all.
        repeated: steps whose side effect was had more than once.
        missing: steps whose side effect was never had.
        tries: requests that the agent sent.
        cut: answers that were cut short.
        failed: requests without an answer.
        errors: text of such a failure → how often.
        longest: the longest pause between two finished steps: the interruption as the agent saw it.
        usual: the median of those pauses, in seconds.
    """

    passed: bool
    faults: tuple[str, ...]
    steps: int
    length: int
    different: tuple[int, ...]
    effects: int
    repeated: tuple[int, ...]
    missing: tuple[int, ...]
    tries: int
    cut: int
    failed: int
    errors: dict[str, int]
    longest: Pause | None
    usual: float


def check(job: Job | None, effects: Iterable[Effect], reference: Job) -> Verdict:
    """Compare a job with the uninterrupted one.

    Args:
        job: as it is in the agent's state; None where it was not begun.
        effects: all that the ledger has of it.
        reference: the same job, or a longer one of the same name, done without an interruption.
    """
    length = job.length if job else reference.length
    expected = {step.number: step.answer for step in reference.steps if step.number < length}
    given = {step.number: step.answer for step in job.steps if step.answer is not None} if job else {}
    effects = list(effects)
    counts = Counter(effect.step for effect in effects)
    events = job.events if job else ()
    kinds = Counter(event.kind for event in events)
    different = tuple(number for number, answer in sorted(given.items()) if answer != expected.get(number))
    repeated = tuple(number for number, count in sorted(counts.items()) if count > 1)
    missing = tuple(number for number in range(length) if number not in counts)
    wrong = tuple(e.step for e in effects if (a := expected.get(e.step)) is None or e.body != effect(e.step, a))
    pauses = pauses_of(events)
    faults = [
        (job is None or not job.finished, "the job is not finished"),
        (len(given) < length, f"{len(given)} of {length} steps have an answer"),
        (different, f"the answers of steps {numbers(different)} are not those of the uninterrupted job"),
        (repeated, f"the side effects of steps {numbers(repeated)} were had more than once"),
        (missing, f"the side effects of steps {numbers(missing)} were never had"),
        (wrong, f"the side effects of steps {numbers(sorted(set(wrong)))} are not those of the uninterrupted job"),
    ]
    found = tuple(text for is_so, text in faults if is_so)
    return Verdict(
        passed=not found,
        faults=found,
        steps=len(given),
        length=length,
        different=different,
        effects=len(effects),
        repeated=repeated,
        missing=missing,
        tries=kinds["asked"],
        cut=kinds["cut"],
        failed=kinds["failed"],
        errors=dict(Counter(event.detail for event in events if event.kind == "failed").most_common(20)),
        longest=max(pauses, key=lambda pause: pause.seconds, default=None),
        usual=sorted(pause.seconds for pause in pauses)[len(pauses) // 2] if pauses else 0.0,
    )


def pauses_of(events: Sequence[Event]) -> list[Pause]:
    """Time from one answer to the next; the first counts from the job's beginning."""
    found = []
    last = next((event.at for event in events if event.kind == "started"), None)
    for event in events:
        if event.kind == "answered":
            if last is not None:
                found.append(Pause(last, event.at - last, event.step))
            last = event.at
    return found


def numbers(steps: Sequence[int]) -> str:
    """Steps for people, who count from 1."""
    shown = ", ".join(str(step + 1) for step in steps[:10])
    return f"{shown} and {len(steps) - 10} more" if len(steps) > 10 else shown
