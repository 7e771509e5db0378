"""The plots of a report, each as one inline SVG. Matplotlib is imported here and nowhere else."""

import io
import re
import statistics
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightkeeper.recovery.result import Memory, Sample
from weightkeeper.recovery.summary import Result, right

SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "svg.hashsalt": "weightkeeper",  # the same result gives the same page
    "font.family": ["sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e7",
    "axes.edgecolor": "#a1a1aa",
    "axes.labelcolor": "#3f3f46",
    "xtick.color": "#3f3f46",
    "ytick.color": "#18181b",
    "text.color": "#18181b",
}
COLOURS = (
    "#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#06b6d4", "#84cc16", "#ec4899", "#78716c", "#f97316",
    "#14b8a6", "#6366f1", "#a16207", "#be185d", "#4d7c0f", "#0369a1", "#9333ea", "#dc2626", "#64748b", "#15803d",
)  # fmt: skip
MARKS = {
    "answered": ("o", "#2563eb", "step finished"), "failed": ("x", "#dc2626", "request failed"),
    "cut": ("v", "#f59e0b", "answer cut short"), "resumed": ("D", "#8b5cf6", "agent started again"),
}  # fmt: skip
WIDTH = 9.6
ROW_INCHES = 0.46
LEGEND_INCHES = 0.55
"""From the axis to the legend: room for its numbers and its label."""


def samples(result: Result) -> str:
    """Seconds from the interruption to the first right answer: every sample as a dot, the median as a line."""
    names = measured(result)
    figure, axes = _figure(len(names))
    for row, name in enumerate(names):
        values = [one.sample.right_s for one in right(result.samples, name) if one.sample.right_s is not None]
        axes.plot(values, [row + 0.16 * _spread(i) for i in range(len(values))], "o", color=COLOURS[0], alpha=0.65,
                  markersize=6, markeredgewidth=0)  # fmt: skip
        if values:
            median = statistics.median(values)
            axes.plot([median, median], [row - 0.32, row + 0.32], color="#18181b", linewidth=2)
            axes.annotate(f"{median:.2f} s", (max(values), row), xytext=(8, 0), textcoords="offset points", va="center")
        bad = [one.sample for one in result.of(name) if one.sample.outcome != "right"]
        axes.plot([sample.right_s or sample.health_s or 0.0 for sample in bad], [row] * len(bad), "x", color="#dc2626",
                  markersize=8)  # fmt: skip
    _rows(axes, names, "seconds from the interruption to the first right answer")
    axes.margins(x=0.12)
    return svg(figure, "samples")


def phases(result: Result) -> str:
    """Where these seconds go: median of each phase, one behind the other."""
    names = [name for name in measured(result) if right(result.samples, name)]
    figure, axes = _figure(len(names))
    colours: dict[str, str] = {}
    for row, name in enumerate(names):
        found = [one.sample.phases for one in right(result.samples, name)]
        start = 0.0
        for phase in dict.fromkeys(phase for each in found for phase in each):
            seconds = statistics.median(each.get(phase, 0.0) for each in found)
            colour = colours.setdefault(phase, COLOURS[len(colours) % len(COLOURS)])
            axes.barh(row, seconds, left=start, color=colour, height=0.62, edgecolor="white", linewidth=0.6)
            start += seconds
    _rows(axes, names, "seconds, median of each phase")
    _legend(axes, [("s", colour, phase) for phase, colour in colours.items()])
    return svg(figure, "phases")


def memory(result: Result) -> str:
    """Memory of keeper and engine together, over time, in the sample nearest to each scenario's median."""
    names = [name for name in measured(result) if (one := typical(result, name)) and one.memory and one.memory.levels]
    figure, axes = _plain(3.4)
    for number, name in enumerate(names):
        kept: Memory = typical(result, name).memory
        axes.step([level.at for level in kept.levels], [level.nbytes / 1e9 for level in kept.levels], where="post",
                  color=COLOURS[number % len(COLOURS)], linewidth=1.6, label=name)  # fmt: skip
    axes.axvline(0, color="#dc2626", linewidth=1, linestyle="--")
    axes.set_xlabel("seconds from the interruption")
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
    _legend(axes, [("s", COLOURS[number % len(COLOURS)], name) for number, name in enumerate(names)])
    return svg(figure, "memory")


def timeline(result: Result) -> str:
    """The agent's work in the sample nearest to each scenario's median, its longest pause shaded; empty without one."""
    if not result.runs[0].subject.has_agent:
        return ""
    names = [name for name in measured(result) if (one := typical(result, name)) and one.timeline]
    figure, axes = _figure(len(names))
    for row, name in enumerate(names):
        one = typical(result, name)
        pause = one.agent.longest if one.agent else None
        if pause is not None:
            axes.barh(row, pause.seconds, left=pause.start, height=0.62, color="#fecaca")
            axes.annotate(f"{pause.seconds:.2f} s", (pause.start + pause.seconds / 2, row + 0.44), ha="center",
                          va="center", fontsize=8, color="#b91c1c")  # fmt: skip
        for kind, (marker, colour, _) in MARKS.items():
            moments = [moment.at for moment in one.timeline if moment.kind == kind]
            axes.plot(moments, [row] * len(moments), marker, color=colour, markersize=4.5, markeredgewidth=1.2)
    axes.axvline(0, color="#dc2626", linewidth=1, linestyle="--")
    _rows(axes, names, "seconds from the interruption")
    _legend(axes, [*MARKS.values(), ("s", "#fecaca", "longest pause: the interruption")])
    return svg(figure, "timeline")


def throughput(result: Result) -> str:
    """Tokens in each second under load, from the first 200 of /health on; empty where none was measured."""
    loads = [(each.name, each.throughput) for each in result.scenarios if each.throughput]
    if not loads:
        return ""
    figure, axes = _plain(3.0)
    for number, (_, load) in enumerate(loads):
        axes.plot(range(len(load.curve)), load.curve, color=COLOURS[number % len(COLOURS)], linewidth=1.3)
    axes.axvline(loads[0][1].minute_s, color="#a1a1aa", linewidth=1, linestyle="--")
    axes.set_xlabel("seconds from the first 200 of /health; the dashed line is where steady state begins")
    axes.set_ylabel("tokens in a second")
    axes.set_ylim(bottom=0)
    _legend(axes, [("s", COLOURS[number % len(COLOURS)], name) for number, (name, _) in enumerate(loads)])
    return svg(figure, "throughput")


def measured(result: Result) -> list[str]:
    """Names of the scenarios with samples: the baseline, and then the slowest first."""

    def seconds(name: str) -> float:
        found = [one.sample.right_s for one in right(result.samples, name) if one.sample.right_s is not None]
        return statistics.median(found) if found else 0.0

    names = [each.name for each in result.scenarios if result.of(each.name)]
    return sorted(names, key=lambda name: (name != result.baseline, -seconds(name)))


def typical(result: Result, name: str) -> Sample | None:
    """The sample nearest to a scenario's median."""
    found = sorted((one.sample for one in right(result.samples, name)), key=lambda one: one.right_s or 0.0)
    return found[(len(found) - 1) // 2] if found else None


def svg(figure: Figure, name: str) -> str:
    """A figure as an element of a page; its ids get the name before them, because a page has several figures."""
    buffer = io.StringIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"|<metadata>.*?</metadata>', "", text, count=2, flags=re.S)
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def _figure(rows: int) -> tuple[Figure, Axes]:
    return _plain(0.9 + ROW_INCHES * max(1, rows))


def _plain(height: float) -> tuple[Figure, Axes]:
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height))
        return figure, figure.subplots()


def _rows(axes: Axes, names: Sequence[str], label: str) -> None:
    """A row for each scenario, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def _legend(axes: Axes, entries: Sequence[tuple[str, str, str]]) -> None:
    """Below the plot, as many columns as there is room for."""
    handles = [axes.plot([], [], marker, color=colour, markersize=7)[0] for marker, colour, _ in entries]
    below = LEGEND_INCHES / (axes.get_position().height * axes.figure.get_figheight())
    axes.legend(handles, [label for _, _, label in entries], loc="upper left", bbox_to_anchor=(0, -below), ncols=4,
                frameon=False, fontsize=9, handletextpad=0.4, columnspacing=1.2, borderaxespad=0)  # fmt: skip


def _spread(number: int) -> float:
    """-1, 0 and 1 in turn, so that dots of equal value do not hide each other."""
    return (number + 1) % 3 - 1
