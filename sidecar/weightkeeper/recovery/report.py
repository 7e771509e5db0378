"""One page of a result that needs nothing from outside: text, tables and plots."""

import os
from importlib import resources
from pathlib import Path

import jinja2

from weightkeeper.quantities import bytes_text, seconds_text
from weightkeeper.recovery import machine, plots, rows
from weightkeeper.recovery.summary import MEASURES, Result, ratio, unfinished

TEMPLATE = "page.html.j2"

PLOTS = ("samples", "phases", "timeline", "memory", "throughput")


def page(result: Result) -> str:
    """The whole page as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": bytes_text, "seconds": seconds_text}
    template = environment.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text())
    return template.render(
        result=result,
        run=result.runs[0],
        headline=headline(result),
        machine=machine.said(result.runs[0].machine),
        plots={name: getattr(plots, name)(result) for name in (PLOTS if result.samples else ("throughput",))},
        tables=rows.tables(result),
        holders_note=rows.holders_note(result),
        faults=[one.sample for one in result.samples if one.sample.outcome != "right"],
        unfinished=unfinished(result),
        where=next((one.sample.memory.where for one in result.samples if one.sample.memory), ""),
    )


def write(path: Path, text: str) -> None:
    """Replace a page, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def headline(result: Result) -> str:
    """The shortest way back after a lost engine against the baseline's, in a sentence.

    It is the interruption as the agent saw it, or, without an agent, the time to the first right completion.
    """
    has_agent = result.runs[0].subject.has_agent
    measure = MEASURES["interruption" if has_agent else "first right completion"]
    base = result.held(result.baseline, measure)
    medians = {
        each.name: (found.median, each.title, found.count)
        for each in result.scenarios
        if each.is_start and each.name != result.baseline and (found := result.held(each.name, measure))
    }
    if base is None or not medians:
        return "Not enough samples came out right to compare anything."
    name = min(medians, key=medians.__getitem__)
    faster = ratio(result.samples, name, result.baseline, measure)
    times = f", {faster.median:.1f} times {'shorter' if has_agent else 'faster'}" if faster else ""
    what = "An agent whose engine was lost went on" if has_agent else "A lost engine answered rightly again"
    count = medians[name][2]
    counts = f"{count}" if count == base.count else f"{count} and {base.count}"
    of = f"{counts} interruption(s)" + ("" if has_agent else "; no agent worked meanwhile")
    return (
        f"{what} after {medians[name][0]:.2f} s ({medians[name][1]}) instead of {base.median:.2f} s "
        f"({result.baseline}){times}; medians of {of}."
    )
