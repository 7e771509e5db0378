"""vLLM's own managers and wrappers of CUDA graphs, with the GPU's calls recorded instead of made."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

SIZES = [1, 2, 4, 8, 16, 24, 32]
PIECES = 3


class Gpu:
    """What was captured and run, in order; pieces and managers are vLLM's own.

    Attributes:
        runs: (`inputs` or `run`, mode, size, whether to warm up) of each forward that was asked for or done.
        calls: of torch, and the error mode of each graph that was begun.
        streams: on which captures ran.
        failing: index of the piece that fails while it is captured; None where none does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import torch
        from vllm.compilation import cuda_graph
        from vllm.distributed import parallel_state
        from vllm.forward_context import BatchDescriptor, override_forward_context
        from vllm.platforms import current_platform
        from vllm.v1.worker.gpu import cudagraph_utils

        self.runs: list[tuple[str, str, int, bool]] = []
        self.calls: list[str] = []
        self.streams: list[object] = []
        self.failing: int | None = None
        self.in_capture = False
        self._batch, self._context = BatchDescriptor, override_forward_context
        gpu = self

        class Graph:
            def capture_begin(self, *pool: object, capture_error_mode: str, **_: object) -> None:
                gpu.calls.append(capture_error_mode)
                gpu.in_capture = True

            def capture_end(self) -> None:
                gpu.in_capture = False

            def replay(self) -> None:
                gpu.calls.append("replay")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty_cache"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: self.calls.append("host"), raising=False)
        monkeypatch.setattr(type(current_platform), "_global_graph_pool", (0, 1))
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda output: output)
        for module in (cuda_graph, cudagraph_utils):
            monkeypatch.setattr(module, "current_stream", lambda: SimpleNamespace())
            if hasattr(module, "capture_pool"):
                monkeypatch.setattr(module, "capture_pool", lambda pool, config: contextlib.nullcontext(pool))
            else:
                monkeypatch.setattr(module, "set_graph_pool_id", lambda pool: None)
        rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
        group = SimpleNamespace(graph_capture=self._graph_capture)
        for name in ("get_tp_group", "get_pp_group", "get_dp_group"):
            monkeypatch.setattr(parallel_state, name, lambda: group)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
        monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: True)
        monkeypatch.setattr(cuda_graph.CUDAGraphWrapper, "_all_instances", set())
        monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", cudagraph_utils.CudaGraphManager.capture)
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=max(SIZES)),
            scheduler_config=SimpleNamespace(max_num_seqs=24),
            parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
            num_speculative_tokens=0,
        )
        piece_mode = cudagraph_utils.CUDAGraphMode.PIECEWISE
        self.pieces = [
            cuda_graph.CUDAGraphWrapper(lambda number=number: self._piece(number), self.config, piece_mode)
            for number in range(PIECES)
        ]

    def manager(self, mode: str = "FULL_AND_PIECEWISE") -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        return ModelCudaGraphManager(self.config, "cuda:0", CUDAGraphMode[mode], 1)

    @contextlib.contextmanager
    def _graph_capture(self, context: Any) -> Iterator[Any]:
        self.streams.append(context.stream)
        yield context

    def _piece(self, number: int) -> int:
        if self.in_capture and self.failing == number:
            raise RuntimeError("CUDA out of memory")
        return number

    def create_forward(self, desc: Any, warmup: bool) -> Any:
        """What vLLM's runner would give its manager."""
        self.runs.append(("inputs", desc.cg_mode.name, desc.num_tokens, warmup))

        def forward(mode: Any) -> None:
            self.runs.append(("run", mode.name, desc.num_tokens, warmup))
            self.run(mode, desc.num_tokens)

        return forward

    def run(self, mode: Any, size: int) -> None:
        context = SimpleNamespace(cudagraph_runtime_mode=mode, batch_descriptor=self._batch(num_tokens=size))
        with self._context(context):
            for piece in self.pieces:
                piece()

    def capture(self, manager: Any) -> None:
        """As the runner's manager calls its base."""
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        CudaGraphManager.capture(manager, self.create_forward, "Capturing")

    def sizes(self) -> list[list[int]]:
        """Of each piece, those that have a graph."""
        return [
            sorted(key.num_tokens for key, entry in piece.concrete_cudagraph_entries.items() if entry.cudagraph)
            for piece in self.pieces
        ]

    def warmed(self, mode: str) -> list[int]:
        """Sizes that were run without a graph, though for graphs of this mode."""
        sizes, inputs = [], None
        for what, its_mode, size, warmup in self.runs:
            if what == "inputs":
                inputs = (its_mode, warmup)
            elif its_mode == "NONE" and inputs == (mode, True):
                sizes.append(size)
        return sizes
