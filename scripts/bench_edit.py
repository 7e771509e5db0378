#!/usr/bin/env python3
"""How long it takes from the last write of a save to the supervisor's decision, and to the new server.

    python3 scripts/bench_edit.py [-n 20] [--silent] [--json OUT] [-- OPTIONS OF weightkeeper supervise]
    python3 scripts/bench_edit.py --project compose [--option max-model-len=1024,2048]

Without --project, on a compose project of its own, with a stand-in for vLLM behind our launcher. The saves are in
shuffled order: engine.yaml in place, by rename, and as a link that is swapped, which reload; compose.yaml, which
recreates. Each waits until the engine is healthy after the one before, and for a random moment. The decision is the
supervisor's line in its log (`reload engine: …`), and healthy is its line about that (`engine healthy …`), each at the
time that the log has. With --project, a running one: its engine.yaml goes back and forth between two values of an
option, and is as before at the end; its compose.yaml is left alone. --silent puts the own project on a mount that sends
no events; give `-- --poll` with it, or nothing for the periodic look.
"""

import argparse
import itertools
import json
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machine
from edited_projects import Line, Target, own_project, running_project
from saves import Editor

PROMISE_SECONDS = 1.5
"""From the last write to the action, where files send events."""

LIMIT_SECONDS = 600.0
"""For one save: a real engine on a busy machine starts in a minute."""

LOOK_SECONDS = 0.02
PAUSE_SECONDS = (0.3, 1.5)
"""Between an engine that is healthy and the next save, so that saves fall anywhere between two looks."""

DECISION = re.compile(r"(?:load, then )?(reload|restart|recreate) (\S+): ")
HEALTHY = re.compile(r"(\S+) (?:healthy|running) \d+\.\d s after ")


@dataclass(frozen=True)
class Sample:
    """One save; seconds since its last write.

    Attributes:
        action: what the supervisor decided.
    """

    kind: str
    action: str
    decided: float
    healthy: float


def measure(target: Target, kind: str, save: Callable[[], None]) -> Sample:
    """One save, followed until the engine is healthy."""
    before = len(target.spoken())
    save()
    saved = time.time()
    decided: tuple[float, str, str] | None = None
    seen: list[Line] = []
    while time.time() - saved < LIMIT_SECONDS:
        seen = target.spoken()[before:]
        for moment, message in seen:
            if decided is None and (found := DECISION.match(message)):
                decided = moment, *found.groups()
            elif decided and (found := HEALTHY.match(message)) and found[1] == decided[2]:
                return Sample(kind, decided[1], decided[0] - saved, moment - saved)
        if len(seen) > bool(decided):
            break  # something else was said
        time.sleep(LOOK_SECONDS)
    said = "\n".join(message for _, message in seen) or "nothing"
    raise SystemExit(f"bench_edit: after a save {kind}, the supervisor did not say that the engine is healthy:\n{said}")


def run(target: Target, count: int, seed: int) -> list[Sample]:
    """`count` saves, as many of each kind, shuffled; one of each kind before, uncounted."""
    editor = Editor(target)
    chance = random.Random(seed)  # noqa: S311  an order, not a secret
    kinds = [kind for kind, _ in zip(itertools.cycle(editor.kinds), range(count), strict=False)]
    chance.shuffle(kinds)
    try:
        for kind, save in editor.kinds.items():
            measure(target, kind, save)
        samples = []
        for kind in kinds:
            time.sleep(chance.uniform(*PAUSE_SECONDS))
            samples.append(measure(target, kind, editor.kinds[kind]))
        return samples
    finally:
        editor.restore()


def table(samples: list[Sample]) -> str:
    """Markdown: seconds, median and most of each kind and of all."""
    lines = ["| save | n | → decision: median | most | → healthy: median | most |", "|---" * 6 + "|"]
    names = [*dict.fromkeys(sorted(sample.kind for sample in samples)), "all"]
    for name in names:
        chosen = [sample for sample in samples if name in (sample.kind, "all")]
        decided, healthy = [one.decided for one in chosen], [one.healthy for one in chosen]
        action = " ".join(sorted({one.action for one in chosen}))
        cells = [statistics.median(decided), max(decided), statistics.median(healthy), max(healthy)]
        label = name if name == "all" else f"{name} ({action})"
        lines.append(f"| {label} | {len(chosen)} | " + " | ".join(f"{cell:.2f} s" for cell in cells) + " |")
    return "\n".join(lines)


def arguments_of(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=20, help="saves in all")
    parser.add_argument("--silent", action="store_true", help="on a mount that sends no events")
    parser.add_argument("--project", type=Path, help="directory of a running project with a supervisor")
    parser.add_argument(
        "--option", default="max-model-len=1024,2048", metavar="NAME=VALUE,OTHER",
        help="with --project: what is edited (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("supervise", nargs="*", help="options of `weightkeeper supervise`, behind --")
    arguments = parser.parse_args(command_line)
    if arguments.project and (arguments.silent or arguments.supervise):
        parser.error("--project measures a supervisor that runs already: neither --silent nor options for another")
    return arguments


def main() -> None:
    arguments = arguments_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.project:
        samples = run(running_project(arguments.project.absolute(), arguments.option), arguments.n, arguments.seed)
    else:
        with own_project(arguments.silent, arguments.supervise) as target:
            samples = run(target, arguments.n, arguments.seed)
    facts = machine.facts()
    place = arguments.project or ("stand-in, a mount without events" if arguments.silent else "stand-in")
    options = f", supervise {' '.join(arguments.supervise)}" if arguments.supervise else ""
    within = sum(sample.decided <= PROMISE_SECONDS for sample in samples)
    print(f"{place}{options}, n = {len(samples)}, seconds since the last write; {machine.said(facts)}\n")
    print(table(samples))
    print(f"\n{within} of {len(samples)} decisions within {PROMISE_SECONDS} s")
    if arguments.json:
        result = {
            "machine": facts, "place": str(place), "silent": arguments.silent, "supervise": arguments.supervise,
            "samples": [vars(sample) for sample in samples],
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
