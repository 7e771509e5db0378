"""Two results side by side."""

from collections.abc import Iterator

import msgspec

from weightkeeper.quantities import bytes_text
from weightkeeper.recovery import machine, rows, table
from weightkeeper.recovery.summary import MEASURES, Result, Summary

SHOWN = ("health", "first right completion", "interruption")


def lines(one: Result, other: Result) -> Iterator[str]:
    """What differs between them, and their medians with B ÷ A, as Markdown."""
    for letter, result in (("A", one), ("B", other)):
        run = result.runs[0]
        model = f"{run.subject.model}, {bytes_text(run.subject.model_bytes)}"
        yield f"{letter}: {machine.said(run.machine)}; {model}, {run.started}"
    yield ""
    for text in differing(one, other):
        yield f"- {text}"
    yield ""
    found = [["scenario", *(f"{name}, s: A / B / B÷A" for name in SHOWN)]]
    names = dict.fromkeys(each.name for result in (one, other) for each in result.scenarios)
    for name in names:
        found.append(
            [name, *(_pair(*(result.held(name, MEASURES[what]) for result in (one, other))) for what in SHOWN)]
        )
    yield from table.markdown(found)


def differing(one: Result, other: Result) -> Iterator[str]:
    """Options, versions and facts that are not the same."""
    facts = [_facts(result) for result in (one, other)]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        a, b = (each.get(name, rows.NOTHING) for each in facts)
        if a != b:
            yield f"{name}: {a} / {b}"


def _facts(result: Result) -> dict[str, object]:
    """Name for people → value, of everything that was served, with what and on what."""
    found: dict[str, object] = {}
    run = result.runs[0]
    for what in (run.subject, run.machine):
        for name, value in msgspec.structs.asdict(what).items():
            if isinstance(value, dict):
                found |= value
            elif name == "gpus":
                found["GPUs"] = ", ".join(gpu.name for gpu in value) or "none"
            else:
                found[name.replace("_", " ")] = value
    return found


def _pair(a: Summary | None, b: Summary | None) -> str:
    texts = [rows.NOTHING if each is None else f"{each.median:.2f}" for each in (a, b)]
    return " / ".join([*texts, f"{b.median / a.median:.2f}" if a and b and a.median else rows.NOTHING])
