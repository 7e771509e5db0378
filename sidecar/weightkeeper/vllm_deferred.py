"""Piecewise CUDA graphs that a start leaves for later, on the classes of vLLM's second model runner, 0.30 to 0.33."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from weightkeeper import bulk_capture

Forward = Callable[[CUDAGraphMode], None]
CreateForward = Callable[..., Forward]
"""(descriptor, warmup: bool) → what runs the model once; vLLM's own."""

LOW_MEMORY_BYTES = 1 << 30
"""Below this much free memory a deferred capture lets the allocator give back what it keeps, as vLLM would."""


def cannot_defer(manager: CudaGraphManager) -> str:
    """Why this manager's piecewise graphs have to be captured at the start; empty where they can wait."""
    if manager.use_breakable_cg:
        return "the model is not compiled in pieces"
    if manager.ubatch_runner is not None:
        return "batches are split"
    modes = {mode for mode, descs in manager._capture_descs.items() if descs}
    if modes != {CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE}:
        return f"graphs of {' and '.join(sorted(mode.name for mode in modes)) or 'no mode'} only"
    return ""


class Deferred:
    """Piecewise graphs that are captured later, a size at a time, between steps.

    Until all pieces of a size have their graphs, a batch of that size is padded as it would be with them and runs the
    same compiled code, so its numbers are the same.
    """

    def __init__(
        self,
        manager: CudaGraphManager,
        create: CreateForward,
        original: Callable[[CreateForward], None],
        one_warm_up: bool,
    ):
        self._manager = manager
        self._create = create
        self._original = original
        self._one_warm_up = one_warm_up
        self._waiting = list(manager._capture_descs[CUDAGraphMode.PIECEWISE])  # largest first
        self._missing = set(self._waiting)
        self._warmed: set[int] = set()
        self._context: Any = None

    @property
    def left(self) -> int:
        """Sizes that are still to be captured."""
        return len(self._waiting)

    @property
    def next_size(self) -> int:
        """In tokens."""
        return self._waiting[0].num_tokens

    def capture_the_others(self) -> None:
        """Capture the whole graphs now, and have batches of the other sizes run without."""
        piecewise = self._manager._capture_descs.pop(CUDAGraphMode.PIECEWISE)
        try:
            with self._same_stream():
                self._original(self._warming)
        finally:
            self._manager._capture_descs[CUDAGraphMode.PIECEWISE] = piecewise
        dispatch = self._manager.dispatch

        def dispatching(*arguments: Any, **named: Any) -> BatchExecutionDescriptor:
            desc = dispatch(*arguments, **named)
            if desc.cg_mode == CUDAGraphMode.PIECEWISE and desc in self._missing:
                return dataclasses.replace(desc, cg_mode=CUDAGraphMode.NONE)
            return desc

        self._manager.dispatch = dispatching

    def capture_next(self) -> None:
        """Capture all pieces of the next size; whoever calls makes sure that no step is half done.

        Raises:
            Exception: of the capture. The size then has no graph at all, and the others wait.
        """
        desc = self._waiting[0]
        manager = self._manager
        captured = manager._capture_descs
        torch.cuda.synchronize()  # the graphs share their memory with those that may be running
        if torch.cuda.mem_get_info()[0] < LOW_MEMORY_BYTES:
            torch.cuda.empty_cache()
        manager._capture_descs = {CUDAGraphMode.PIECEWISE: [desc]}
        try:
            with _quiet(), self._same_stream(), bulk_capture.shortened("thread_local"):
                self._original(self._warmed_already)
            torch.cuda.synchronize()
        except BaseException:
            manager._capture_descs = captured
            self.leave(desc.num_tokens)
            with contextlib.suppress(Exception):  # where the capture's end failed as well, before it came to this
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), manager.pool)
            raise
        finally:
            manager._capture_descs = captured
        self._waiting.pop(0)
        self._missing.remove(desc)

    def leave(self, size: int) -> None:
        """Have no graph of this size, and capture none of those that wait.

        A piece's graph reads what the one before it left at an address, so a size has all of its graphs or none; and
        all ranks have the same.
        """
        for wrapper in list(CUDAGraphWrapper._all_instances):
            entries = wrapper.concrete_cudagraph_entries
            for key in [key for key in entries if key.num_tokens == size]:
                del entries[key]
        every = self._manager._capture_descs[CUDAGraphMode.PIECEWISE]
        self._missing.update(desc for desc in every if desc.num_tokens == size)
        self._waiting.clear()

    def finish(self) -> None:
        """All ranks have all graphs: batches find theirs as if they had always been there."""
        if not self._missing:
            vars(self._manager).pop("dispatch", None)

    @contextlib.contextmanager
    def _same_stream(self) -> Iterator[None]:
        """Have all captures on the stream of the first.

        cuBLAS has a workspace for each stream. It is made at the first use, which must not be inside a graph, and takes
        some 30 MB.
        """
        made = parallel_state.GraphCaptureContext

        def context(stream: torch.cuda.Stream) -> Any:
            if self._context is None:
                self._context = made(stream)
            return self._context

        parallel_state.GraphCaptureContext = context
        try:
            yield
        finally:
            parallel_state.GraphCaptureContext = made

    def _warming(self, desc: BatchExecutionDescriptor, warmup: bool) -> Forward:
        if warmup and not self._warmed:
            # workspaces get the size that piecewise runs need before a whole graph holds their address
            self._create(self._waiting[0], warmup=True)(CUDAGraphMode.NONE)
            self._warmed.add(self._waiting[0].num_tokens)
        if warmup:
            self._warmed.add(desc.num_tokens)
        return self._create(desc, warmup=warmup)

    def _warmed_already(self, desc: BatchExecutionDescriptor, warmup: bool) -> Forward:
        forward = self._create(desc, warmup=warmup)
        if not self._one_warm_up or desc.num_tokens not in self._warmed:
            return forward
        return lambda mode: None if mode == CUDAGraphMode.NONE else forward(mode)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for one size, and no garbage collection, which could unload a kernel inside a graph."""
    bar, collecting = cudagraph_utils.tqdm, gc.isenabled()
    cudagraph_utils.tqdm = lambda descs, **_: descs
    gc.disable()
    try:
        yield
    finally:
        cudagraph_utils.tqdm = bar
        if collecting:
            gc.enable()
