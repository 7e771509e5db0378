"""One page of a result that needs nothing from outside: text, tables and plots."""

import os
from importlib import resources
from pathlib import Path

import jinja2

from weightkeeper.quantities import bytes_text, seconds_text
from weightkeeper.recovery import machine, plots, table
from weightkeeper.recovery.summary import MEASURES, Result, ratio

TEMPLATE = "page.html.j2"


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
        plots={
            name: getattr(plots, name)(result) for name in ("samples", "phases", "timeline", "memory", "throughput")
        },
        tables=[table.main_rows(result), table.agent_rows(result)],
        held=[each.held for each in result.scenarios if each.held],
        faults=[one.sample for one in result.samples if one.sample.outcome != "right"],
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
    """The shortest interruption by a lost engine against the baseline's, in a sentence."""
    interruption = MEASURES["interruption"]
    base = result.held(result.baseline, interruption)
    medians = {
        each.name: (found.median, each.title)
        for each in result.scenarios
        if each.is_start and each.name != result.baseline and (found := result.held(each.name, interruption))
    }
    if base is None or not medians:
        return "Not enough samples came out right to compare anything."
    name = min(medians, key=medians.__getitem__)
    faster = ratio(result.samples, name, result.baseline, interruption)
    times = f", {faster.median:.1f} times shorter" if faster else ""
    return (
        f"An agent whose engine was lost went on after {medians[name][0]:.2f} s ({medians[name][1]}) instead of "
        f"{base.median:.2f} s ({result.baseline}){times}; medians of {base.count} interruption(s)."
    )
