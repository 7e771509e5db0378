"""Which graphs are captured when: vLLM's own managers and wrappers of graphs, with the GPU's calls recorded."""

import gc
from typing import Any

import pytest
from fake_graphs import PIECES, SIZES, Gpu

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def graphs(gpu):
    from weightkeeper import vllm_graphs

    yield vllm_graphs
    vllm_graphs.follow(None)


def plan(graphs, **options: Any) -> Any:
    made = graphs.Plan(**options)
    graphs.follow(made)
    return made


def size_of(manager: Any, tokens: int) -> tuple[str, int]:
    """Mode and padded size of a mixed batch, as the runner asks for it."""
    desc = manager.dispatch(2, tokens, None, 0)
    return desc.cg_mode.name, desc.num_tokens


ALL_PIECES = [SIZES] * PIECES
WHOLE = [24, 16, 8, 4, 2, 1]
"""Sizes of whole graphs: up to max_num_seqs, the largest first."""


def test_without_a_plan_vllm_captures_as_always(gpu, graphs):
    """By itself ours does nothing: each size is warmed up in each mode, and each graph clears caches."""
    manager = gpu.manager()
    graphs.follow(None)
    gpu.capture(manager)
    assert gpu.sizes() == ALL_PIECES
    assert sorted(desc.num_tokens for desc in manager.graphs) == sorted(WHOLE)
    assert gpu.warmed("PIECEWISE") == SIZES[::-1]
    assert gpu.warmed("FULL") == WHOLE
    assert gpu.calls.count("empty_cache") == len(SIZES) * PIECES + len(WHOLE)


def test_a_bulk_capture_captures_the_same_and_clears_twice(gpu, graphs):
    """Same graphs, same warm-ups; caches are emptied before the first and after the last."""
    manager = gpu.manager()
    plan(graphs, bulk=True)
    gpu.capture(manager)
    assert gpu.sizes() == ALL_PIECES
    assert len(manager.graphs) == len(WHOLE)
    assert (gpu.warmed("PIECEWISE"), gpu.warmed("FULL")) == (SIZES[::-1], WHOLE)
    assert [call for call in gpu.calls if call == "empty_cache"] == ["empty_cache"] * 2
    assert gpu.calls.count("global") == len(SIZES) * PIECES + len(WHOLE)


def test_profiling_is_left_as_it_is(gpu, graphs):
    """vLLM measures the memory of graphs with a few of them: that has to give what it always gave."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, one_warm_up=True, defer=True)
    manager._max_full_descs_to_capture = 2
    gpu.capture(manager)
    assert gpu.sizes() == ALL_PIECES
    assert len(manager.graphs) == 2
    assert gpu.calls.count("empty_cache") == len(SIZES) * PIECES + 2
    assert (made.captures, made.deferred) == (0, None)


def test_one_warm_up_for_both_modes(gpu, graphs):
    """Whole graphs of sizes that ran in pieces do without, but for the first two and the small ones."""
    manager = gpu.manager()
    gpu.config.scheduler_config.max_num_seqs = 32
    manager = gpu.manager()
    plan(graphs, one_warm_up=True, backends=lambda: {"FLASH_ATTN"})
    gpu.capture(manager)
    assert gpu.sizes() == ALL_PIECES
    assert len(manager.graphs) == len(SIZES)
    assert gpu.warmed("PIECEWISE") == SIZES[::-1]
    assert gpu.warmed("FULL") == [32, 24, 8, 4, 2, 1]
    assert ("inputs", "FULL", 16, True) not in gpu.runs
    assert ("inputs", "FULL", 16, False) in gpu.runs


def test_other_attention_backends_keep_their_warm_ups(gpu, graphs):
    """One that compiles kernels would compile them inside a graph."""
    told: list[tuple[str, str]] = []
    manager = gpu.manager()
    plan(graphs, one_warm_up=True, backends=lambda: {"TRITON_ATTN"}, report=lambda *said: told.append(said))
    gpu.capture(manager)
    assert gpu.warmed("FULL") == WHOLE
    assert told == [("one-warm-up", "attention backend TRITON_ATTN")]


def test_deferred_graphs_are_captured_one_size_at_a_time(gpu, graphs):
    """At the start only whole graphs; then, the largest first, each piece of a size; at the end all are there."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, one_warm_up=True, defer=True)
    gpu.capture(manager)
    deferred = made.deferred
    assert gpu.sizes() == [[]] * PIECES
    assert sorted(desc.num_tokens for desc in manager.graphs) == sorted(WHOLE)
    assert graphs.captured(manager) == (0, len(WHOLE))
    assert deferred.left == len(SIZES)
    gpu.calls.clear()
    for number, size in enumerate(SIZES[::-1], 1):
        assert deferred.next_size == size
        deferred.capture_next()
        assert gpu.sizes() == [sorted(SIZES[::-1][:number])] * PIECES
    assert deferred.left == 0
    deferred.finish()
    assert graphs.captured(manager) == (len(SIZES) * PIECES, len(WHOLE))
    assert gpu.calls == ["synchronize", *["thread_local"] * PIECES, "synchronize"] * len(SIZES)
    assert [mode.name for mode in manager._capture_descs] == ["FULL", "PIECEWISE"]
    assert "dispatch" not in vars(manager)


def test_each_deferred_size_was_run_once_before_its_graph(gpu, graphs):
    """By the whole graph's warm-up; the largest, for the sake of workspaces, before all whole graphs."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, one_warm_up=True, defer=True)
    gpu.capture(manager)
    assert gpu.warmed("PIECEWISE") == [32]
    assert gpu.warmed("FULL") == WHOLE
    assert gpu.runs[0] == ("inputs", "PIECEWISE", 32, True)
    while made.deferred.left:
        made.deferred.capture_next()
    assert gpu.warmed("PIECEWISE") == [32]


def test_deferred_sizes_are_warmed_up_where_that_is_not_spared(gpu, graphs):
    """The two savings are independent of each other."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    while made.deferred.left:
        made.deferred.capture_next()
    assert gpu.warmed("PIECEWISE") == [32, *SIZES[::-1]]


def test_a_batch_is_padded_the_same_with_and_without_its_graph(gpu, graphs):
    """Only its mode differs, so it runs the same compiled code; decoding has its whole graphs from the start."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    assert [size_of(manager, tokens) for tokens in (3, 20, 30)] == [("NONE", 4), ("NONE", 24), ("NONE", 32)]
    assert manager.dispatch(3, 3, 1, 0, 1).cg_mode.name == "FULL"
    assert size_of(manager, 33) == ("NONE", 33)
    made.deferred.capture_next()
    made.deferred.capture_next()
    assert [size_of(manager, tokens) for tokens in (3, 20, 30)] == [("NONE", 4), ("PIECEWISE", 24), ("PIECEWISE", 32)]
    while made.deferred.left:
        made.deferred.capture_next()
    made.deferred.finish()
    assert [size_of(manager, tokens) for tokens in (3, 20, 30)] == [
        ("PIECEWISE", 4), ("PIECEWISE", 24), ("PIECEWISE", 32),
    ]  # fmt: skip


def test_a_size_is_replayed_once_it_is_captured(gpu, graphs):
    """Each piece replays its graph."""
    from vllm.config import CUDAGraphMode

    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    made.deferred.capture_next()
    gpu.calls.clear()
    gpu.run(CUDAGraphMode.PIECEWISE, 32)
    assert gpu.calls == ["replay"] * PIECES


def test_all_captures_are_on_one_stream(gpu, graphs):
    """A matrix library's workspace belongs to a stream, and is made before the first graph."""
    from vllm.distributed import parallel_state

    before = parallel_state.GraphCaptureContext
    manager = gpu.manager()
    made = plan(graphs, bulk=True, one_warm_up=True, defer=True)
    gpu.capture(manager)
    while made.deferred.left:
        made.deferred.capture_next()
    assert len(gpu.streams) == 3 * (1 + len(SIZES))  # of the groups of tensor, pipeline and data parallel
    assert set(gpu.streams) == {gpu.streams[0]}
    assert parallel_state.GraphCaptureContext is before


@pytest.mark.parametrize("failing", range(PIECES))
def test_a_size_that_cannot_be_captured_has_no_graph_at_all(gpu, graphs, failing):
    """A piece's graph reads what the one before it left: a size has all or none. The others that wait go without."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    made.deferred.capture_next()
    gpu.failing = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        made.deferred.capture_next()
    assert gpu.sizes() == [[32]] * PIECES
    assert made.deferred.left == 0
    made.deferred.finish()
    assert [size_of(manager, tokens) for tokens in (20, 30)] == [("NONE", 24), ("PIECEWISE", 32)]
    assert [mode.name for mode in manager._capture_descs] == ["FULL", "PIECEWISE"]
    assert gc.isenabled()


def test_a_size_that_another_rank_lacks_is_left_by_all(gpu, graphs):
    """Also the last one, which this rank has captured."""
    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    while made.deferred.left:
        made.deferred.capture_next()
    made.deferred.leave(1)
    made.deferred.finish()
    assert gpu.sizes() == [SIZES[1:]] * PIECES
    assert [size_of(manager, tokens) for tokens in (1, 2)] == [("NONE", 1), ("PIECEWISE", 2)]


def test_little_memory_is_given_back_before_a_deferred_capture(gpu, graphs, monkeypatch):
    """As vLLM would before each graph."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 140 << 30))
    manager = gpu.manager()
    made = plan(graphs, bulk=True, defer=True)
    gpu.capture(manager)
    gpu.calls.clear()
    made.deferred.capture_next()
    assert gpu.calls == ["synchronize", "empty_cache", *["thread_local"] * PIECES, "synchronize"]


@pytest.mark.parametrize(
    ("mode", "said"), [("PIECEWISE", "graphs of PIECEWISE only"), ("FULL_DECODE_ONLY", "graphs of FULL only")]
)
def test_graphs_of_one_mode_are_captured_at_the_start(gpu, graphs, mode, said):
    """Nothing could stand in for them."""
    told: list[tuple[str, str]] = []
    manager = gpu.manager(mode)
    made = plan(graphs, bulk=True, defer=True, report=lambda *what: told.append(what))
    gpu.capture(manager)
    assert made.deferred is None
    assert told == [("deferred-graphs", said)]
    assert gpu.sizes() == (ALL_PIECES if mode == "PIECEWISE" else [[]] * PIECES)


def test_a_vllm_whose_graphs_are_made_otherwise_is_left_alone(gpu, graphs, monkeypatch):
    """Names that our code relies on are looked for in vLLM's own before anything is changed."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def capture(self, create_forward_fn, progress_bar_desc=""):
        """Of another version."""

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    with pytest.raises(
        AttributeError,
        match=r"vLLM's CudaGraphManager.capture does not use _capture_descs, graph_capture, graphs, tqdm",
    ):
        graphs.follow(graphs.Plan(bulk=True))
    assert CudaGraphManager.capture is capture
    monkeypatch.undo()
