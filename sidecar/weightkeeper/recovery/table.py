"""Results as text."""

from collections import Counter
from collections.abc import Iterator

from weightkeeper.quantities import bytes_text
from weightkeeper.recovery import machine, rows, summary
from weightkeeper.recovery.result import Sample
from weightkeeper.recovery.summary import Result

WITHOUT_AGENT = "No agent worked: these are restarts alone, and nothing is said of work that comes back intact."


def lines(result: Result) -> Iterator[str]:
    """Everything that a person wants to know first, as Markdown."""
    first = result.runs[0]
    subject = first.subject
    yield f"{machine.said(first.machine)}; {subject.model}, {bytes_text(subject.model_bytes)}"
    for each in rows.tables(result):
        yield ""
        yield from markdown(each)
    if note := rows.holders_note(result):
        yield ""
        yield note
    yield from _faults(result)
    if parts := summary.unfinished(result):
        yield ""
        yield "Not whole:"
        yield from (f"- {one}" for one in parts)
    if result.skipped:
        yield ""
        yield "Not measured:"
        for reason in dict.fromkeys(each.reason for each in result.skipped):
            yield f"- {', '.join(each.name for each in result.skipped if each.reason == reason)}: {reason}"
    if not subject.has_agent:
        yield ""
        yield WITHOUT_AGENT
    for run in result.runs:
        if run.control is not None:
            yield ""
            caught = "was caught" if run.control.caught else "was NOT CAUGHT, so the check proves nothing"
            yield f"The deliberately wrong agent {caught}: {'; '.join(run.control.verdict.faults) or 'no fault'}."


def markdown(table: list[list[str]]) -> Iterator[str]:
    """Rows as a table with aligned columns; the first one is its head."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for number, row in enumerate(table):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def _faults(result: Result) -> Iterator[str]:
    """How many samples of each scenario did not come out right, and why the first of them did not."""
    bad: dict[str, list[Sample]] = {}
    for one in result.samples:
        if one.sample.outcome != "right":
            bad.setdefault(one.sample.scenario, []).append(one.sample)
    if bad:
        yield ""
        yield "Not right:"
    for name, samples in bad.items():
        counts = Counter(one.outcome for one in samples)
        said = next((one for one in samples if one.message), samples[0])
        words = said.message.splitlines()[0] if said.message else "no message"
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        yield f"- {name}: {told}; round {said.round}: {words}"
