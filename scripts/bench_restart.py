#!/usr/bin/env python3
"""Kill an engine → its first right completion, for several ways to get its weights.

    python3 scripts/bench_restart.py --model PATH [--starts 3] [--rows disk,ipc_cache,mapped] [--eager] [--json OUT]

`disk` is plain vLLM with a warm page cache; `ipc_cache` is vLLM's own weight cache; `mapped` is `weightkeeper serve`
and `--load-format weightkeeper`; `reload`, `crash` and `core` are the same weights under `weightkeeper engine`, which
gets SIGHUP, or whose server or engine core gets SIGKILL. Both holders and the launcher are started once and stay. One
uncounted start from disk comes first and fills the compile caches and the page cache. Then, in each of `--starts`
rounds, every row is started once, in shuffled order: spawn, /health, completion, SIGKILL to the whole tree, and the
next only when the GPU's memory is as it was; for the launcher's rows the signal, /health, completion. The first counted
start is from disk, and its greedy tokens are the reference: a start that compiled may answer otherwise than those after
it. A start with other tokens, or one that went to disk unasked, is recorded as such and is no right completion. All
engines get the same options.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import yaml
from launched_server import LaunchedServer
from server_run import ServerRun, StartError
from weight_holders import Daemon, Holder, Keeper

ROWS = ("disk", "ipc_cache", "mapped", "reload", "crash", "core")
LAUNCHED = ("reload", "crash", "core")
PLAIN = {"WEIGHTKEEPER_SAVINGS": "none"}
"""For vLLM's own rows: our plugin is installed beside them, and changes nothing then."""

LIMIT_SECONDS = 280.0
TOGETHER_CACHE_BYTES = 1 << 30


@dataclass
class Start:
    """One start and what became of it.

    Attributes:
        result: `right`, `wrong` (other tokens), `from disk` (which was not asked for) or `failed`.
        seconds: from spawning to the whole answer; None where there was none.
        health: from spawning to the first 200 of /health.
        gone: from SIGKILL until its last process has ended and the GPU's memory is as before its start.
        total: from SIGKILL to the right answer, where an engine is killed and started again: `gone` and `seconds`.
    """

    row: str
    round: int
    result: str = "failed"
    seconds: float | None = None
    health: float | None = None
    gone: float = 0.0
    tokens: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)
    message: str = ""

    @property
    def total(self) -> float:
        return self.gone + (self.seconds or 0.0)


class Bench:
    """Everything of one run.

    Args:
        options: vLLM's options, the same for every row.
        out: directory for configuration files and logs.
        gpu: where memory is waited for; None where there is none.
    """

    def __init__(self, options: dict[str, Any], out: Path, gpu: machine.Gpu | None):
        self.options = options
        self.out = out
        self.gpu = gpu
        self.reference: list[int] = []
        self.starts: list[Start] = []
        self.holders: dict[str, dict[str, Any]] = {}
        self._configs = {"disk": self._config("disk", {})}
        self._launched: LaunchedServer | None = None

    def _config(self, row: str, more: dict[str, Any]) -> Path:
        file = self.out / f"{row}.yaml"
        file.write_text(yaml.safe_dump(self.options | {"served-model-name": "local"} | more))
        return file

    def hold(self, kind: type[Holder], row: str, load_format: str, is_alone: bool) -> Holder:
        """Start a holder, wait, and, where nothing else runs, note what it costs with no engine running."""
        options = dict(self.options) | ({"load-format": load_format} if kind is Keeper else {})
        holder = kind(options, self.out, self.out / f"{row}-holder.log", self.gpu)
        try:
            ready = round(holder.wait(LIMIT_SECONDS), 2)
            if is_alone:
                self.holders[holder.name] = {"ready_seconds": ready} | holder.memory()
        except StartError as error:
            holder.close()
            raise SystemExit(f"bench_restart: {holder.name}: {error}") from error
        except BaseException:
            holder.close()
            raise
        extra = {"socket_dir": str(holder.sockets), "fallback": False}
        self._configs[row] = self._config(row, {"load-format": load_format, "model-loader-extra-config": extra})
        say(f"{holder.name}: {self.holders.get(holder.name, f'ready after {ready} s')}")
        return holder

    def prepare(self, rows: list[str], starts: list[str], stack: contextlib.ExitStack, together: bool) -> None:
        """Start the holders that `rows` need and make the uncounted starts, one after the other or all at once."""
        holding = []
        if {"mapped", *LAUNCHED} & set(rows):
            holding.append(lambda: self.hold(Keeper, "mapped", "weightkeeper", not together))
        if "ipc_cache" in rows:
            holding.append(lambda: self.hold(Daemon, "ipc_cache", "ipc_cache", not together))
        if not together:
            for hold in holding:
                stack.callback(hold().close)
            for row in starts:
                self.warm_up(row)
            return
        # Others come and go on the GPU meanwhile, which vLLM's memory profiling does not bear.
        self._configs["disk"] = self._config("disk", {"kv-cache-memory-bytes": TOGETHER_CACHE_BYTES})
        with ThreadPoolExecutor() as pool:
            held = [pool.submit(hold) for hold in holding]
            warmed = [pool.submit(self.warm_up, row, False) for row in starts]
            for one in held:
                stack.callback(lambda one=one: one.exception() or one.result().close())
        for one in [*held, *warmed]:
            one.result()
        self._configs["disk"] = self._config("disk", {})

    def launch(self) -> LaunchedServer:
        """Start the launcher on the keeper's weights, uncounted, and wait for its first answer."""
        environment = {"WEIGHTKEEPER_TAKE_IPC_CACHE": ""}
        self._launched = server = LaunchedServer(self._configs["mapped"], self.out / "launched.log", environment)
        try:
            server.wait_for_health(LIMIT_SECONDS)
            tokens = server.complete(LIMIT_SECONDS)
            say(f"weightkeeper engine: {server.seconds():.1f} s, {server.launcher_phases()}")
            if server.fell_back() or (self.reference and tokens != self.reference):
                raise StartError(f"its first answer is {'from disk' if server.fell_back() else 'wrong'}")
        except StartError as error:
            server.kill()
            raise SystemExit(f"bench_restart: weightkeeper engine: {error}") from error
        except BaseException:
            server.kill()
            raise
        return server

    def replace(self, row: str, number: int) -> Start:
        """One replacement of the launcher's server, from the signal to the answer."""
        start, server = Start(row, number), self._launched
        try:
            server.replace(row, LIMIT_SECONDS)
            start.health = server.wait_for_health(LIMIT_SECONDS)
            start.tokens = server.complete(LIMIT_SECONDS)
            start.seconds = server.seconds()
            start.result = self._judge(start, server)
            start.phases = server.launcher_phases()
        except StartError as error:
            start.message = str(error)
        start.details = server.details()
        return start

    def start(self, row: str, number: int, is_alone: bool = True) -> Start:
        """One start, from spawning to the end of its last process."""
        if row in LAUNCHED:
            return self.replace(row, number)
        start = Start(row, number)
        level = self.gpu.used_bytes() if self.gpu else 0
        environment = {"WEIGHTKEEPER_TAKE_IPC_CACHE": ""} | ({} if row == "mapped" else PLAIN)
        server = ServerRun(self._configs[row], self.out / f"{row}-{number}.log", environment)
        try:
            start.health = server.wait_for_health(LIMIT_SECONDS)
            start.tokens = server.complete(LIMIT_SECONDS)
            start.seconds = server.seconds()
            start.result = self._judge(start, server)
        except StartError as error:
            start.message = str(error)
        finally:
            killed = time.monotonic()
            server.kill()
            if self.gpu and is_alone:
                self.gpu.wait_until_free(level)
            start.gone = time.monotonic() - killed
        start.details = server.details()
        if start.seconds is not None:
            start.phases = server.phases(start.health, start.seconds)
        return start

    def _judge(self, start: Start, server: ServerRun) -> str:
        if start.row != "disk" and server.fell_back():
            return "from disk"
        if start.row == "disk" and start.round > 0 and not self.reference:
            self.reference = start.tokens
        if self.reference and start.tokens != self.reference:
            start.message = f"tokens {start.tokens}, and not {self.reference}"
            return "wrong"
        return "right"

    def warm_up(self, row: str, is_alone: bool = True) -> None:
        """An uncounted start. It gives no reference: after compiling, kernels may be tuned otherwise than later."""
        start = self.start(row, 0, is_alone)
        if start.result != "right":
            raise SystemExit(f"bench_restart: the uncounted start ({row}) is {start.result}:\n{start.message}")
        say(f"uncounted {row}: {start.seconds:.1f} s")

    def rounds(self, rows: list[str], count: int, seed: int, deadline: float) -> Iterator[Start]:
        """The counted starts. Ends early where the next one would probably not end before `deadline`."""
        order = random.Random(seed)  # noqa: S311  an order, not a secret
        took: dict[str, float] = {}
        for number in range(1, count + 1):
            shuffled = order.sample(rows, len(rows))
            if not self.reference:  # the uncounted start may have compiled, and answer otherwise than those after it
                shuffled.sort(key=lambda row: row != "disk")
            for row in shuffled:
                begun = time.monotonic()
                if begun + took.get(row, max(took.values(), default=0.0)) > deadline:
                    say(f"time is over before round {number}, {row}")
                    return
                self.starts.append(self.start(row, number))
                took[row] = time.monotonic() - begun
                yield self.starts[-1]


def table(starts: list[Start], rows: list[str], base: str = "ipc_cache") -> str:
    """Markdown: least, median and most seconds from SIGKILL to a right answer, and the ratio to `base` pair by pair."""
    right = {(one.row, one.round): one for one in starts if one.result == "right"}
    lines = [
        "| row | right | SIGKILL → right completion, s: least / median / most | of it: gone from the GPU "
        f"| spawn → /health | to {base}, pair by pair |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        mine = [one for one in starts if one.row == row]
        good = [one for one in mine if one.result == "right"]
        if not good:
            lines.append(f"| {row} | 0 of {len(mine)} | – | – | – | – |")
            continue
        totals = [one.total for one in good]
        pairs = [one.total / right[base, one.round].total for one in good if (base, one.round) in right]
        ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f}–{max(pairs):.2f})" if pairs else "–"
        lines.append(
            f"| {row} | {len(good)} of {len(mine)} "
            f"| {min(totals):.2f} / {statistics.median(totals):.2f} / {max(totals):.2f} "
            f"| {statistics.median(one.gone for one in good):.2f} "
            f"| {statistics.median(one.health for one in good):.2f} | {ratio} |"
        )
    return "\n".join(lines)


def phase_table(starts: list[Start], rows: list[str]) -> str:
    """Markdown: median seconds of every phase and of every number that the logs tell."""
    good = [one for one in starts if one.result == "right"]
    lines = ["| phase (median s) | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for part, prefix in (("phases", "… "), ("details", "log: ")):
        names = list(dict.fromkeys(name for one in good for name in getattr(one, part)))
        for name in names:
            cells = []
            for row in rows:
                values = [getattr(one, part)[name] for one in good if one.row == row and name in getattr(one, part)]
                cells.append(f"{statistics.median(values):.2f}" if values else "–")
            lines.append(f"| {prefix}{name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(holders: dict[str, dict[str, Any]]) -> str:
    """Markdown: what each holder costs while no engine runs."""
    lines = [
        "| holder | weights MiB | GPU MiB | over the weights | peak while loading MiB | processes on the GPU | "
        "own memory MiB | CUDA libraries mapped | ready after s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    weights = next((one["weight_bytes"] for one in holders.values() if "weight_bytes" in one), None)
    for name, one in holders.items():
        gpu = one.get("gpu_bytes")
        over = (
            f"{(gpu - weights) / machine.MIB:+.1f} MiB ({(gpu / weights - 1) * 100:+.3f} %)" if gpu and weights else "–"
        )
        cells = [
            mib(one.get("weight_bytes")), mib(gpu), over, mib(one.get("gpu_peak_bytes")),
            str(one.get("gpu_processes", "–")), mib(one["resident_bytes"]), str(len(one["cuda_libraries"])),
            f"{one['ready_seconds']:.1f}",
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mib(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / machine.MIB:.1f}"


def say(text: str) -> None:
    print(f"bench_restart: {text}", file=sys.stderr, flush=True)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's options for every row."""
    options: dict[str, Any] = {"model": str(arguments.model), "dtype": "bfloat16", "max-model-len": 2048}
    options["enforce-eager"] = arguments.eager
    options["gpu-memory-utilization"] = arguments.utilization
    for given in arguments.option:
        name, _, value = given.partition("=")
        options[name] = yaml.safe_load(value) if value else True
    return options


def reference_of(file: Path | None) -> list[int]:
    return json.loads(file.read_text())["reference"] if file else []


def write(file: Path | None, bench: Bench, arguments: argparse.Namespace, facts: dict[str, Any]) -> None:
    if file is None:
        return
    result = {
        "machine": facts, "options": bench.options, "rows": arguments.rows, "holders": bench.holders,
        "reference": bench.reference, "starts": [vars(one) | {"total": one.total} for one in bench.starts],
    }  # fmt: skip
    file.write_text(json.dumps(result, indent=1) + "\n")


def arguments_of(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="local checkpoint")
    parser.add_argument("--starts", type=int, default=3, help="of each row")
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=["disk", "ipc_cache", "reload", "crash"],
        help=f"of {','.join(ROWS)}; {','.join(LAUNCHED)} need no `mapped` beside them (default: %(default)s)",
    )
    parser.add_argument("--eager", action="store_true", help="enforce-eager for every row")
    parser.add_argument(
        "--utilization", type=float, default=0.6, help="gpu-memory-utilization; both holders fit beside"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="another one of vLLM's")
    parser.add_argument(
        "--reference", type=Path, help="JSON of an earlier run, for its tokens; no uncounted disk start"
    )
    parser.add_argument("--warm-up", default="", help="rows to start once, uncounted, besides disk")
    parser.add_argument(
        "--together",
        action="store_true",
        help="start the holders and make the uncounted starts at the same time: saves a minute, tells no memory",
    )
    parser.add_argument(
        "--budget", type=float, default=86_400, help="seconds for everything; prints what there is then"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--out", type=Path, help="directory for logs and configurations; a new one in /tmp by default")
    parser.add_argument("--json", type=Path, help="file for everything; written after each start")
    arguments = parser.parse_args(command_line)
    if not arguments.reference and "disk" not in arguments.rows:
        parser.error("what is right is told by the row disk, or by the tokens of an earlier run: --reference FILE")
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))} (known: {', '.join(ROWS)})")
    return arguments


def main() -> int:
    arguments = arguments_of()
    deadline = time.monotonic() + arguments.budget
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = arguments.out or Path(tempfile.mkdtemp(prefix="bench-restart-"))
    out.mkdir(parents=True, exist_ok=True)
    gpu = machine.Gpu.only()
    facts = machine.facts()
    if gpu is None and "ipc_cache" in arguments.rows:
        say("no GPU: vLLM's ipc_cache needs one, its row is left out")
        arguments.rows.remove("ipc_cache")
    bench = Bench(options_of(arguments), out, gpu)
    bench.reference = reference_of(arguments.reference)
    say(f"logs in {out}; {machine.said(facts)}")
    with contextlib.ExitStack() as stack:
        uncounted = [*([] if arguments.reference else ["disk"]), *filter(None, arguments.warm_up.split(","))]
        bench.prepare(arguments.rows, uncounted, stack, arguments.together)
        if set(LAUNCHED) & set(arguments.rows):
            stack.callback(bench.launch().kill)
        for start in bench.rounds(arguments.rows, arguments.starts, arguments.seed, deadline):
            took = "no answer" if start.seconds is None else f"{start.seconds:.2f} s"
            say(f"round {start.round}, {start.row}: {start.result}, {took}\n{start.message}".strip())
            write(arguments.json, bench, arguments, facts)
    print(f"{machine.said(facts)}; {arguments.model}, {'eager' if arguments.eager else 'torch.compile and graphs'}\n")
    print("\n\n".join([table(bench.starts, arguments.rows), phase_table(bench.starts, arguments.rows)]))
    if bench.holders:
        print("\n" + memory_table(bench.holders))
    write(arguments.json, bench, arguments, facts)
    return 0 if bench.starts and all(one.result == "right" for one in bench.starts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
