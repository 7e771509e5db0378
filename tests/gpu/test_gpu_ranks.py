"""Tensor parallel on two GPUs: a keeper that holds a shard on each, and real vLLM that maps both. `make test-gpu`."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import Keeper as PlainKeeper
from gpu_engines import GIGABYTES, Keeper, Models, on, start
from gpu_machine import GPUS, REHEARSING

from weightkeeper.recovery.gpu import wait_until_free

MIB = 1 << 20
FORKED_WORKERS = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
MAPPED_LINE = re.compile(r"weightkeeper: zero_copy, mapped (\d+) bytes and copied (\d+) in ([\d.]+) ms")
OTHER_RANK = re.compile(
    r"weightkeeper: fallback to disk, code=mismatch: rank: the keeper has (\d), the engine has (\d); "
    r"\S+: name the GPUs in one order"
)
"""And no other field, which would stand before the device and the remedy."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(len(GPUS) < 2 and not REHEARSING, reason="needs two GPUs"),
]


def answer_of(model: Path, variables: dict[str, str] | None = None, **request: Any) -> tuple[dict[str, Any], str]:
    """What one engine with two ranks answers, and its log."""
    environment = FORKED_WORKERS | (variables or {})
    with start(model, plain=True, environment=environment, options=TWO_RANKS, **request) as engine:
        answer = engine.answer()
        engine.end()
        return answer, engine.log()


def exchanged(keeper: Keeper) -> dict[str, Any]:
    """Of a request: the keeper's weights, for ranks that compute each on the GPU of the other's shard.

    In a rehearsal, where ranks have no devices, each finds the other's socket under its own name.
    """
    if GPUS:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = visible.split(",") if visible else [str(index) for index in range(len(GPUS))]
        return {"variables": {"CUDA_VISIBLE_DEVICES": f"{words[1]},{words[0]}"}, "extra": keeper.extra()}
    directory = keeper.dir / "x"
    directory.mkdir(mode=0o700)
    for own, name in {"control": "control", "cpu-0": "cpu-1", "cpu-1": "cpu-0"}.items():
        os.link(keeper.sockets / f"{own}.sock", directory / f"{name}.sock")
    return {"extra": {"socket_dir": str(directory)}}


class Ranks:
    """A model, the keeper that holds its two shards, and what engines answered, side by side.

    Attributes:
        grown: bytes in use on each GPU, by UUID, that were not before the keeper, with nothing else running.
        sizes: bytes that the keeper says it holds on each GPU.
    """

    def __init__(
        self, model: Path, keeper: Keeper, before: dict[str, int], publishes: PlainKeeper, pool: ThreadPoolExecutor
    ):
        self.sizes = dict(keeper.wait("ready").held.devices)
        for gpu in GPUS:
            wait_until_free([gpu], before[gpu.uuid] + self.sizes[gpu.uuid], 20)
        self.grown = {gpu.uuid: gpu.used_bytes() - before[gpu.uuid] for gpu in GPUS}
        self.keeper = keeper
        self.publishes = publishes
        asked = {"load_format": "weightkeeper", "extra": publishes.extra(publish=True)}
        self.disk: Future = pool.submit(answer_of, model)
        self.mapped: Future = pool.submit(answer_of, model, **on(keeper))
        self.publisher: Future = pool.submit(answer_of, model, **asked)
        self.exchanged: Future = pool.submit(answer_of, model, load_format="weightkeeper", **exchanged(keeper))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    model = Models(tmp_path_factory.mktemp("models"), {"base": ["--gigabytes", GIGABYTES]})["base"]
    before = {gpu.uuid: gpu.used_bytes() for gpu in GPUS}
    keeper = Keeper(model, tensor_parallel_size=2)
    publishes = PlainKeeper(None)
    try:
        publishes.until_answers()
        with ThreadPoolExecutor(1 if REHEARSING else 4) as pool:
            yield Ranks(model, keeper, before, publishes, pool)
    finally:
        keeper.close()
        publishes.close()


def test_each_gpu_holds_its_shard_and_nothing_more(ranks, tell: Callable[[str], None]):
    """Half of the model on either, and at most 0.1 % besides."""
    assert sorted(ranks.sizes) == sorted(gpu.uuid for gpu in GPUS) or REHEARSING
    for uuid, nbytes in ranks.sizes.items():
        if GPUS:
            assert nbytes <= ranks.grown[uuid] <= nbytes * 1.001 + 2 * MIB
            tell(f"{uuid}: {nbytes / MIB:.1f} MiB of weights, {ranks.grown[uuid] / MIB:.1f} MiB in use")
    assert len(set(ranks.sizes.values())) == 1


def test_two_ranks_answer_as_two_ranks_from_disk(ranks, tell: Callable[[str], None]):
    """The loaders published; tokens and logprobs bit for bit, and each rank mapped its own shard."""
    disk, log = ranks.disk.result()
    assert "weightkeeper:" not in log
    answer, log = ranks.mapped.result()
    assert answer["tokens"] == disk["tokens"]
    assert answer["logprobs"] == disk["logprobs"]
    lines = MAPPED_LINE.findall(log)
    assert len(lines) == 2
    tell("mapped in " + " and ".join(f"{milliseconds} ms" for _, _, milliseconds in lines))


def test_ranks_on_each_other_s_gpus_are_refused_and_load_from_disk(ranks):
    """CUDA_VISIBLE_DEVICES is 1,0 where the loaders had 0,1: a socket is a GPU's, a fingerprint a rank's, so each rank
    finds the other's shard, names both ranks and leaves it alone. The answer is right, the keeper holds on."""
    disk, _ = ranks.disk.result()
    answer, log = ranks.exchanged.result()
    assert sorted(OTHER_RANK.findall(log)) == [("0", "1"), ("1", "0")], log[-6000:]
    assert not MAPPED_LINE.search(log)
    assert answer["tokens"] == disk["tokens"]
    assert answer["logprobs"] == disk["logprobs"]
    status = ranks.keeper.status()
    assert (status.state, status.loads, status.fallbacks) == ("ready", 1, {"mismatch": 2})
    assert dict(status.held.devices) == ranks.sizes


def test_an_engine_with_two_ranks_publishes_and_the_next_one_maps(ranks, tell: Callable[[str], None]):
    """To a keeper that was started with nothing; both answer as from disk."""
    published, log = ranks.publisher.result()
    disk, _ = ranks.disk.result()
    assert published["tokens"] == disk["tokens"]
    assert published["logprobs"] == disk["logprobs"]
    held = ranks.publishes.status().held
    assert held.devices == ranks.sizes, log
    answer, log = answer_of(Path(held.model), **on(ranks.publishes))
    assert answer["tokens"] == disk["tokens"]
    assert answer["logprobs"] == disk["logprobs"]
    lines = MAPPED_LINE.findall(log)
    assert len(lines) == 2
    tell("published, then mapped in " + " and ".join(f"{milliseconds} ms" for _, _, milliseconds in lines))
