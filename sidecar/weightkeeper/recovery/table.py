"""Results as text."""

from collections.abc import Iterator

from weightkeeper.quantities import bytes_text
from weightkeeper.recovery import machine
from weightkeeper.recovery.summary import MEASURES, Result, Summary, ratio, summary

NOTHING = "–"


def lines(result: Result) -> Iterator[str]:
    """Everything that a person wants to know first, as Markdown."""
    first = result.runs[0]
    subject = first.subject
    yield f"{machine.said(first.machine)}; {subject.model}, {bytes_text(subject.model_bytes)}"
    yield ""
    yield from markdown(main_rows(result))
    yield ""
    yield from markdown(agent_rows(result))
    if result.skipped:
        yield ""
        yield "Not measured:"
        yield from (f"- {each.name}: {each.reason}" for each in result.skipped)
    for run in result.runs:
        if run.control is not None:
            yield ""
            caught = "was caught" if run.control.caught else "was NOT CAUGHT, so the check proves nothing"
            yield f"The deliberately wrong agent {caught}: {'; '.join(run.control.verdict.faults) or 'no fault'}."


def main_rows(result: Result) -> list[list[str]]:
    """Head and one row for each scenario: seconds, least / median / most, and how many times faster."""
    rows = [["scenario", "right", *(f"{name}, s" for name in MEASURES), f"times faster than {result.baseline}"]]
    for each in result.scenarios:
        samples = result.of(each.name)
        good = sum(one.sample.outcome == "right" for one in samples)
        numbers = [spread(result.held(each.name, measure)) for measure in MEASURES.values()]
        right = MEASURES["first right completion"]
        faster = ratio(result.samples, each.name, result.baseline, right) if each.is_start else None
        rows.append([each.name, f"{good} of {len(samples)}", *numbers, spread(faster, "×")])
    return rows


def agent_rows(result: Result) -> list[list[str]]:
    """Head and one row for each scenario: what the agent saw, memory, throughput."""
    rows = [["scenario", "requests failed", "answers cut", "effects lost or twice", "keeper", "engine", "peak",
             "tokens/s first minute", "steady"]]  # fmt: skip
    for each in result.scenarios:
        samples = [one.sample for one in result.of(each.name)]
        verdicts = [sample.agent for sample in samples if sample.agent]
        memories = [sample.memory for sample in samples if sample.memory]
        load = each.throughput
        rows.append([
            each.name,
            str(sum(verdict.failed for verdict in verdicts)),
            str(sum(verdict.cut for verdict in verdicts)),
            str(sum(len(verdict.repeated) + len(verdict.missing) for verdict in verdicts)),
            *(size(summary(getattr(memory, name) for memory in memories))
              for name in ("keeper_bytes", "engine_bytes", "peak_bytes")),
            f"{load.first_minute:.0f}" if load else NOTHING,
            f"{load.steady:.0f}" if load else NOTHING,
        ])  # fmt: skip
    return rows


def markdown(rows: list[list[str]]) -> Iterator[str]:
    """Rows as a table with aligned columns; the first one is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def spread(found: Summary | None, unit: str = "") -> str:
    """`1.20 / 1.35 / 1.50`: least, median, most."""
    if found is None:
        return NOTHING
    return " / ".join(f"{value:.2f}{unit}" for value in (found.least, found.median, found.most))


def size(found: Summary | None) -> str:
    return NOTHING if found is None else bytes_text(round(found.median))
