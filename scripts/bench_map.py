#!/usr/bin/env python3
"""How long an engine takes to get weights from a keeper, by size: connect, receive, map, bind.

    python3 scripts/bench_map.py [--cuda] [--sizes 0.3,1,2,4,8] [-n 20] [--json OUT]

Real keepers, one a size, each filled by synthetic_loader.py; all of them are held at once and measured in shuffled
order, after one uncounted pass. Each measurement binds real torch parameters, as the engine's loader does, and then
reads from every one of them that the bytes are right. On the CPU, pages are mapped when they are read first: that is
the engine's first forward pass, the same as after a disk load, and is not part of these times.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import torch
import yaml
from synthetic_loader import FINGERPRINT, fill, path_of
from torch import nn

from weightkeeper import client, memory
from weightkeeper.errors import WeightkeeperError
from weightkeeper.protocol import Status
from weightkeeper.restore import bind
from weightkeeper.tensors import bytes_of

PHASES = ("connect", "receive", "map", "bind")
LOAD_SECONDS = 600.0
GB = 1e9


class Keeper:
    """`weightkeeper serve` with synthetic weights."""

    def __init__(self, directory: Path, kind: str, gigabytes: float, tensors: int):
        self.gigabytes = gigabytes
        self.kind = kind
        self.directory = directory
        self.sockets = directory / "run"
        self.sockets.mkdir(parents=True, mode=0o700)
        wanted = {"kind": kind, "nbytes": int(gigabytes * GB), "tensors": tensors}
        config = directory / "engine.yaml"
        config.write_text(yaml.safe_dump({"model": "synthetic", "synthetic": wanted}))
        loader = [sys.executable, str(Path(__file__).with_name("synthetic_loader.py"))]
        command = [sys.executable, "-m", "weightkeeper.cli", "serve", "--socket-dir", str(self.sockets)]
        command += ["--config", str(config), "--loader", shlex.join(loader)]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip

    def wait(self) -> Status:
        """Its status, once it is ready."""
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(WeightkeeperError):
                status = client.status(self.sockets)
                if status.state == "ready":
                    self.device = next(iter(status.held.devices))
                    return status
                if status.state == "failed":
                    break
            time.sleep(0.05)
        log = (self.directory / "log").read_text()
        raise SystemExit(f"bench_map: the keeper of {self.gigabytes:g} GB is not ready:\n{log[-3000:]}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Stopwatch:
    """Milliseconds between one `lap` and the next, by name."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.milliseconds[name] = (now - self._last) * 1000
        self._last = now


def skeleton(tensors: int, nbytes: int) -> nn.Module:
    """A model with `tensors` parameters on the meta device, as vLLM's loader has it before binding."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(tensors):
        layer = nn.Module()
        empty = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="meta")
        layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))
        model.layers.append(layer)
    return model


def measure(keeper: Keeper, tensors: int) -> dict[str, float]:
    """One engine's way to its weights, in milliseconds a phase; everything is given back at the end."""
    size = -(-int(keeper.gigabytes * GB) // tensors // 512) * 512
    model = skeleton(tensors, size)
    watch = Stopwatch()
    with client.open_session(keeper.sockets, keeper.device, name="bench_map") as session:
        watch.lap("connect")
        session.receipts()
        granted = session.map(FINGERPRINT, "zero_copy")
        watch.lap("receive")
        region = memory.of_kind(granted.grant.kind).map(granted.descriptors, granted.grant.sizes)
        for descriptor in granted.descriptors:
            os.close(descriptor)
        whole = bytes_of(region)
        watch.lap("map")
        bound = bind(model, granted.grant.layout, whole, share=True)
        watch.lap("bind")
        if bound.mapped_bytes != granted.grant.layout.nbytes:
            raise SystemExit(f"bench_map: {bound.mapped_bytes} bytes are bound, not {granted.grant.layout.nbytes}")
        check(model)
        del model, whole, region
        gc.collect()  # the range is unmapped when its last view is gone
    return watch.milliseconds


def check(model: nn.Module) -> None:
    """Every parameter has its own bytes, at its start and its end."""
    parameters = dict(model.named_parameters())
    for number in range(len(parameters)):
        tensor = parameters[path_of(number)].data.view(torch.uint8)
        ends = torch.stack([tensor[0], tensor[-1]]).tolist()
        if ends != [fill(number)] * 2:
            raise SystemExit(f"bench_map: {path_of(number)} holds {ends}, expected {fill(number)}")


def run(keepers: list[Keeper], count: int, tensors: int, seed: int) -> dict[float, list[dict[str, float]]]:
    """`count` measurements of each keeper, shuffled all together."""
    for keeper in keepers:
        measure(keeper, tensors)
    order = [keeper for keeper in keepers for _ in range(count)]
    random.Random(seed).shuffle(order)  # noqa: S311  an order, not a secret
    samples: dict[float, list[dict[str, float]]] = {keeper.gigabytes: [] for keeper in keepers}
    for keeper in order:
        samples[keeper.gigabytes].append(measure(keeper, tensors))
    return samples


def table(samples: dict[float, list[dict[str, float]]], segments: dict[float, int]) -> str:
    """Markdown: median (least–most) in milliseconds."""
    lines = ["| GB | segments | " + " | ".join(f"{name} ms" for name in PHASES) + " | in all ms |"]
    lines.append("|---" * (len(PHASES) + 3) + "|")
    for gigabytes, rows in samples.items():
        columns = [[row[name] for row in rows] for name in PHASES] + [[sum(row.values()) for row in rows]]
        cells = [f"{statistics.median(c):.2f} ({min(c):.2f}–{max(c):.2f})" for c in columns]
        lines.append(f"| {gigabytes:g} | {segments[gigabytes]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fitting(kind: str, sizes: list[float]) -> None:
    """Stop before anything is allocated where the sizes do not fit together."""
    wanted = sum(sizes) * GB
    if kind == "host":
        from weightkeeper.memory.available import available

        room, where = available().nbytes, "memory"
    elif torch.cuda.is_available():
        room, where = torch.cuda.mem_get_info()[0], "GPU memory"
    else:
        raise SystemExit("bench_map: --cuda needs a GPU and a torch for it; there is none here")
    if wanted > 0.95 * room:
        sizes_text = f"{wanted / GB:.1f} GB are wanted at once and {room / GB:.1f} GB of {where} are free"
        raise SystemExit(f"bench_map: {sizes_text}; give smaller --sizes")


@contextlib.contextmanager
def started(kind: str, sizes: list[float], tensors: int) -> Iterator[list[Keeper]]:
    """Keepers of all sizes, ready; gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="wk"))
    keepers: list[Keeper] = []
    try:
        for gigabytes in sizes:
            keepers.append(Keeper(directory / f"{gigabytes:g}", kind, gigabytes, tensors))
            keepers[-1].wait()
        yield keepers
    finally:
        for keeper in keepers:
            keeper.close()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="GPU memory; sizes 1,14,60 where none are given")
    parser.add_argument("--sizes", help="GB (10^9 bytes), separated by commas")
    parser.add_argument("-n", type=int, default=20, help="measurements of each size")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kind = "cuda-vmm" if arguments.cuda else "host"
    sizes = [float(one) for one in (arguments.sizes or ("1,14,60" if arguments.cuda else "0.3,1,2,4,8")).split(",")]
    fitting(kind, sizes)
    with started(kind, sizes, arguments.tensors) as keepers:
        states = {keeper.gigabytes: keeper.wait() for keeper in keepers}
        samples = run(keepers, arguments.n, arguments.tensors, arguments.seed)
        segments = {keeper.gigabytes: segments_of(keeper) for keeper in keepers}
    facts = machine.facts()
    print(f"{kind}, {arguments.tensors} parameters, n = {arguments.n}, median (least–most); {machine.said(facts)}\n")
    print(table(samples, segments))
    if arguments.json:
        result = as_json(facts, kind, arguments, samples, segments, states)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def segments_of(keeper: Keeper) -> int:
    with client.open_session(keeper.sockets, keeper.device, name="bench_map") as session:
        granted = session.map(FINGERPRINT, "zero_copy")
        for descriptor in granted.descriptors:
            os.close(descriptor)
        return len(granted.descriptors)


def as_json(facts: dict, kind: str, arguments: Any, samples: dict, segments: dict, states: dict) -> dict[str, Any]:
    rows = [
        {
            "gigabytes": size,
            "held_bytes": states[size].held.nbytes,
            "keeper_own_bytes": states[size].own_bytes,
            "segments": segments[size],
            "milliseconds": {name: [round(row[name], 4) for row in found] for name in PHASES},
        }
        for size, found in samples.items()
    ]
    return {"machine": facts, "kind": kind, "tensors": arguments.tensors, "n": arguments.n, "sizes": rows}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
