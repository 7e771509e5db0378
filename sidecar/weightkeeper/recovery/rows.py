"""Tables made of a result: rows of text, the first of which is the head."""

from collections.abc import Sequence

from weightkeeper.quantities import bytes_text, seconds_text
from weightkeeper.recovery.summary import IPC_CACHE, MEASURES, Result, Summary, ratio, right, summary

NOTHING = "–"
MIB = 1 << 20
RIGHT = MEASURES["first right completion"]


def tables(result: Result) -> list[list[list[str]]]:
    """All that have a row; each with its head first."""
    found = [main_rows(result), agent_rows(result), memory_rows(result), held_rows(result), phase_rows(result)]
    return [rows for rows in found if len(rows) > 1]


def main_rows(result: Result) -> list[list[str]]:
    """Seconds from the interruption, and how many times faster than vLLM's own ways, pair by pair."""
    has_agent = result.runs[0].subject.has_agent
    references = [name for name in (result.baseline, IPC_CACHE) if result.of(name)]
    pause = ["agent's pause, s: least / median / most"] if has_agent else []
    rows = [[
        "scenario", "right", "→ right completion, s: least / median / most", "→ /health (median)",
        "→ first completion (median)", *pause, *(f"times faster than {name}" for name in references),
    ]]  # fmt: skip
    for each in result.scenarios:
        samples = result.of(each.name)
        good = sum(one.sample.outcome == "right" for one in samples)
        faster = [ratio(result.samples, each.name, name, RIGHT) if each.is_start else None for name in references]
        rows.append([
            each.name,
            f"{good} of {len(samples)}",
            spread(result.held(each.name, RIGHT)),
            middle(result.held(each.name, MEASURES["health"])),
            middle(result.held(each.name, MEASURES["first completion"])),
            *([spread(result.held(each.name, MEASURES["interruption"]))] if has_agent else []),
            *(spread(one, "×") for one in faster),
        ])  # fmt: skip
    return rows


def agent_rows(result: Result) -> list[list[str]]:
    """What the agents saw; without one, nothing."""
    rows = [["scenario", "requests failed", "answers cut", "effects lost or twice"]]
    for each in result.scenarios:
        verdicts = [one.sample.agent for one in result.of(each.name) if one.sample.agent]
        if verdicts:
            rows.append([
                each.name,
                str(sum(verdict.failed for verdict in verdicts)),
                str(sum(verdict.cut for verdict in verdicts)),
                str(sum(len(verdict.repeated) + len(verdict.missing) for verdict in verdicts)),
            ])  # fmt: skip
    return rows


def memory_rows(result: Result) -> list[list[str]]:
    """Medians of memory, and throughput."""
    lengths = {f"{each.throughput.minute_s:.0f} s" for each in result.scenarios if each.throughput}
    first = f"tokens/s first {' or '.join(sorted(lengths)) or 'seconds'}"
    rows = [["scenario", "all holders", "engine", "peak", first, "steady"]]
    for each in result.scenarios:
        memories = [one.sample.memory for one in result.of(each.name) if one.sample.memory]
        load = each.throughput
        rows.append([
            each.name,
            *(size(summary(getattr(memory, name) for memory in memories))
              for name in ("keeper_bytes", "engine_bytes", "peak_bytes")),
            f"{load.first_minute:.0f}" if load else NOTHING,
            f"{load.steady:.0f}" if load else NOTHING,
        ])  # fmt: skip
    return rows


def holders_note(result: Result) -> str:
    """What `all holders` counts, where weights were held more than once; else nothing."""
    names = list(dict.fromkeys(each.held.name for each in result.scenarios if each.held))
    if len(names) < 2:
        return ""
    return (
        f"Memory of all holders is that of {' and '.join(names)} as far as they ran in that sample, side by side, "
        "whether or not its engine used what they hold."
    )


def held_rows(result: Result) -> list[list[str]]:
    """What holds weights while no engine runs, and what that costs."""
    rows = [["holds weights while no engine runs", "ready after", "weights", "on the device", "over the weights",
             "peak while loading", "processes", "own host memory", "CUDA and torch libraries"]]  # fmt: skip
    holders = {each.held.name: each.held for each in result.scenarios if each.held}
    weights = next((held.weight_bytes for held in holders.values() if held.weight_bytes), None)
    for held in holders.values():
        over = held.device_bytes is not None and weights
        rows.append([
            held.name,
            seconds_text(held.ready_s),
            exactly(held.weight_bytes),
            exactly(held.device_bytes),
            f"{(held.device_bytes / weights - 1) * 100:+.2f} %" if over else NOTHING,
            exactly(held.peak_bytes),
            str(held.processes),
            bytes_text(held.resident_bytes),
            str(len(held.cuda_libraries)),
        ])  # fmt: skip
    return rows


def phase_rows(result: Result) -> list[list[str]]:
    """Median seconds of every phase, in the order of a start, and of what logs tell of themselves."""
    samples = {each.name: [one.sample for one in right(result.samples, each.name)] for each in result.scenarios}
    shown = [name for name, found in samples.items() if found]
    rows = [["median s of", *shown]]
    for part in ("phases", "details"):
        found = [getattr(one, part) for name in shown for one in samples[name]]
        for phase in in_order(found):
            cells = [middle(summary(getattr(one, part).get(phase) for one in samples[name])) for name in shown]
            rows.append([phase if part == "phases" else f"log: {phase}", *cells])
    return rows


def in_order(found: Sequence[dict[str, float]]) -> list[str]:
    """All names, each behind those that come before it in some start."""
    order: list[str] = []
    for each in found:
        place = 0
        for name in each:
            if name in order:
                place = max(place, order.index(name) + 1)
            else:
                order.insert(place, name)
                place += 1
    return order


def spread(found: Summary | None, unit: str = "") -> str:
    """`1.20 / 1.35 / 1.50`: least, median, most."""
    if found is None:
        return NOTHING
    return " / ".join(f"{value:.2f}{unit}" for value in (found.least, found.median, found.most))


def middle(found: Summary | None) -> str:
    return NOTHING if found is None else f"{found.median:.2f}"


def exactly(nbytes: int | None) -> str:
    """In MiB, as the driver's own tools show memory."""
    return NOTHING if nbytes is None else f"{nbytes / MIB:,.1f} MiB"


def size(found: Summary | None) -> str:
    return NOTHING if found is None else bytes_text(round(found.median))
