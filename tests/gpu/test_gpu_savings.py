"""What a start saves, on a GPU: same tokens, same KV cache and in the end the same graphs as without it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from gpu_engines import GIGABYTES, SHARE, Models
from gpu_machine import GPU, REHEARSING, WHY_NOT, wait_until_free

from weightkeeper import savings
from weightkeeper.launcher.warming import CAREFUL, SINGLE_THREADED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), pytest.mark.skipif(REHEARSING, reason="graphs need the GPU")]

OPTIONS = {
    "dtype": "bfloat16", "max_model_len": 1024, "gpu_memory_utilization": SHARE, "enforce_eager": False, "seed": 0,
}  # fmt: skip

RUNS = [
    {"name": "compiling", "environment": {savings.SWITCH: "none"}},
    {"name": "plain", "environment": {savings.SWITCH: "none"}},
    {"name": "first", "environment": {savings.SWITCH: "all"}},
    {"name": "second", "environment": {savings.SWITCH: "all"}},
    {"name": "at-once", "environment": {savings.SWITCH: "frozen-heap,bulk-capture,one-warm-up,kv-size"}},
    {"name": "processes", "environment": {savings.SWITCH: "all"}, "processes": True},
    {"name": "artifact-compiling", "environment": {savings.SWITCH: "all", "VLLM_USE_MEGA_AOT_ARTIFACT": "1"}},
    {"name": "artifact", "environment": {savings.SWITCH: "all", "VLLM_USE_MEGA_AOT_ARTIFACT": "1"}},
]
"""In this order; they share their caches, so the first compiles, and `first` keeps the size for those after it. What
compiled is compared with nothing: it tuned kernels once more at its first run, and kept that to itself."""

SAVED = re.compile(r"weightkeeper: savings of this start: (.*)")
ALL_THERE = re.compile(
    r"all graphs are there: (\d+) deferred sizes took ([\d.]+) s, (\d+) piecewise graphs, (\d+) whole"
)


class Runs:
    """Their answers and logs."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __getitem__(self, name: str) -> dict[str, Any]:
        answer = self._directory / f"{name}.json"
        assert answer.exists(), f"{name} did not answer:\n{self.log(name)[-6000:]}"
        return json.loads(answer.read_text())

    def log(self, name: str) -> str:
        log = self._directory / f"{name}.log"
        return log.read_text() if log.exists() else "it was not started"

    def saved(self, name: str) -> str:
        """The line with what was saved."""
        found = SAVED.search(self.log(name))
        assert found, self.log(name)[-6000:]
        return found[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    directory = tmp_path_factory.mktemp("savings")
    model = Models(directory / "models", {"base": ["--gigabytes", GIGABYTES]})["base"]
    request = directory / "request.json"
    request.write_text(json.dumps({"model": str(model), "options": OPTIONS, "runs": RUNS}))
    environment = engines.QUIET | {
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    environment |= SINGLE_THREADED | CAREFUL  # so that one process can import vLLM for all of them
    script = Path(__file__).with_name("savings_run.py")
    before = GPU.used_bytes()
    subprocess.run([sys.executable, script, request], env=os.environ | environment, timeout=560, check=False)
    yield Runs(directory)
    wait_until_free(before, 30)


def test_the_first_start_measures_as_without_savings(runs, tell):
    """Its KV cache has as many blocks and its graphs are all there at once; what it measured is kept."""
    plain, first = runs["plain"], runs["first"]
    assert first["blocks"] == pytest.approx(plain["blocks"], rel=0.005)
    assert first["started"] == plain["started"]
    assert "kv-size (no good start of this configuration is known)" in runs.saved("first")
    assert re.search(r"the KV cache's size, \d+ bytes, is kept for the next start", runs.log("first"))
    assert "weightkeeper: savings" not in runs.log("plain")
    for name in ("plain", "first", "second", "at-once", "processes"):
        tell(f"{name}: {runs[name]['seconds']:.2f} s, {runs[name]['blocks']} blocks")


def test_the_second_start_has_the_same_size_and_defers_its_graphs(runs, tell):
    """Not one block less or more; at the start only whole graphs, in the end all."""
    first, second, plain = runs["first"], runs["second"], runs["plain"]
    assert second["blocks"] == first["blocks"]
    assert second["started"] == [0, plain["graphs"][1]]
    assert second["graphs"] == plain["graphs"]
    saved = runs.saved("second")
    assert saved.startswith("frozen-heap, bulk-capture, one-warm-up, deferred-graphs (")
    assert re.search(r"late-inductor, kv-size \([\d.]+ GiB as in the last good start\)$", saved)
    sizes, seconds, pieces, whole = ALL_THERE.search(runs.log("second")).groups()
    assert [int(pieces), int(whole)] == plain["graphs"]
    tell(f"{sizes} sizes were captured later in {seconds} s")


def test_the_tokens_are_those_of_a_start_without_savings(runs):
    """One at a time and 16 at once; without the deferred graphs, with half of them, and with all."""
    plain = runs["plain"]["before"]
    assert runs["plain"]["after"] == plain
    assert runs["first"]["before"] == plain
    for when in ("before", "halfway", "after"):
        assert runs["second"][when] == plain, when


def test_graphs_that_were_captured_with_one_warm_up_give_the_same(runs):
    """Whole graphs of sizes that ran in pieces before were not run again, and they are all there at the start."""
    at_once, plain = runs["at-once"], runs["plain"]
    assert runs.saved("at-once").startswith("frozen-heap, bulk-capture, one-warm-up, kv-size (")
    assert at_once["started"] == at_once["graphs"] == plain["graphs"]
    assert at_once["blocks"] == runs["first"]["blocks"]
    assert at_once["before"] == at_once["after"] == plain["before"]


def test_compiled_code_that_is_loaded_as_one_file_gives_the_same(runs, tell):
    """As vLLM does with torch 2.12 and, if asked, with 2.10: tokens, graphs and KV cache are those of its other way."""
    artifact, plain = runs["artifact"], runs["plain"]
    assert "reconstructed serializable fn from standalone compile artifacts" in runs.log("artifact")
    assert "Dynamo bytecode transform" not in runs.log("artifact")
    for when in ("before", "halfway", "after"):
        assert artifact[when] == plain["before"], when
    assert artifact["graphs"] == plain["graphs"]
    assert artifact["blocks"] == pytest.approx(plain["blocks"], rel=0.005)
    tell(f"plain {plain['seconds']:.2f} s, second {runs['second']['seconds']:.2f}, artifact {artifact['seconds']:.2f}")


def test_an_engine_core_of_its_own_captures_while_it_is_idle(runs):
    """Without anybody's help, to the last graph."""
    answer, plain = runs["processes"], runs["plain"]
    _, _, pieces, whole = ALL_THERE.search(runs.log("processes")).groups()
    assert [int(pieces), int(whole)] == plain["graphs"]
    assert answer["before"]["single"] == answer["after"]["single"] == plain["before"]["single"]
    assert answer["blocks"] == runs["first"]["blocks"]
