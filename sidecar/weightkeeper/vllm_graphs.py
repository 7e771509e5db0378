"""Which CUDA graphs vLLM captures when. What is private of vLLM's second model runner is named here.

At a start vLLM captures each batch size twice: in pieces, for batches with prefills (attention runs between the
pieces), and whole, for decoding. Each time it runs the size once before, to warm up. Written for 0.30 to 0.33.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

from weightkeeper import bulk_capture, savings
from weightkeeper.vllm_deferred import CreateForward, Deferred, Forward, cannot_defer

WARM_TO_THE_END = 8
"""Sizes up to here keep every warm-up: Triton compiles other code for 1 and for what 16 does not divide."""

WARM_AT_FIRST = 2
"""So many whole graphs keep their warm-up: the first one also makes buffers that must not be made inside a graph."""

WHOLE_WITHOUT_WARM_UP = frozenset({"FLASH_ATTN"})
"""Attention backends that neither compile nor tune anything for a whole graph that a piecewise run has not."""


@dataclasses.dataclass(slots=True)
class Plan:
    """How the next capture goes.

    Attributes:
        backends: gives names of the attention backends; asked when the capture begins.
        report: told the name of a saving that cannot be applied, and why.
        deferred: the graphs that the capture has left for later.
        captures: how many there were.
    """

    bulk: bool = False
    one_warm_up: bool = False
    defer: bool = False
    backends: Callable[[], set[str]] = set
    report: Callable[[str, str], None] = lambda name, why: None
    deferred: Deferred | None = None
    captures: int = 0

    def run(self, manager: CudaGraphManager, create: CreateForward, original: Callable[[CreateForward], None]) -> None:
        """Capture as planned."""
        self.captures += 1
        why = cannot_defer(manager) if self.defer else "it is not wanted"
        if not why:
            self.deferred = Deferred(manager, create, original, self.one_warm_up)
            self.deferred.capture_the_others()
            return
        if self.defer:
            self.report(savings.DEFERRED_GRAPHS, why)
        if self.one_warm_up:
            unknown = self.backends() - WHOLE_WITHOUT_WARM_UP
            if unknown:
                self.report(savings.ONE_WARM_UP, f"attention backend {', '.join(sorted(unknown))}")
            else:
                create = without_second_warm_up(create)
        original(create)


_plan: Plan | None = None


def follow(plan: Plan | None) -> None:
    """Have all captures of this process go by `plan`; profiling's own stay as they are.

    Raises:
        AttributeError: vLLM's graphs are not as they are known here.
    """
    global _plan
    install()
    _plan = plan


def install() -> None:
    """Put ours around vLLM's capture, once.

    Raises:
        AttributeError: vLLM's graphs are not as they are known here.
    """
    whole = CudaGraphManager.capture
    if hasattr(whole, "weightkeeper"):
        return
    _check(whole)

    @functools.wraps(whole)
    def capture(manager: CudaGraphManager, create_forward_fn: CreateForward, *rest: Any, **named: Any) -> None:
        plan = _plan
        if plan is None or manager._max_full_descs_to_capture is not None:  # profiling measures what it always has
            return whole(manager, create_forward_fn, *rest, **named)
        with bulk_capture.bulk() if plan.bulk else contextlib.nullcontext():
            if type(manager) is not ModelCudaGraphManager:
                return whole(manager, create_forward_fn, *rest, **named)
            return plan.run(manager, create_forward_fn, lambda create: whole(manager, create, *rest, **named))

    capture.weightkeeper = True
    CudaGraphManager.capture = capture


def _check(capture: Callable[..., Any]) -> None:
    needs = {
        "CudaGraphManager.__init__": (CudaGraphManager.__init__, {"_capture_descs", "_max_full_descs_to_capture"}),
        "CudaGraphManager.capture": (
            capture,
            {"_capture_descs", "use_breakable_cg", "graph_capture", "tqdm", "graphs"},
        ),
        "graph_capture": (parallel_state.graph_capture, {"GraphCaptureContext"}),
        "CudaGraphManager.dispatch": (CudaGraphManager.dispatch, {"_candidates", "_graphs_captured"}),
    }
    for name, (function, names) in needs.items():
        if missing := names - set(inspect.unwrap(function).__code__.co_names):
            raise AttributeError(f"vLLM's {name} does not use {', '.join(sorted(missing))}")
    if list(inspect.signature(capture).parameters)[1:2] != ["create_forward_fn"]:
        raise AttributeError("vLLM's CudaGraphManager.capture takes other arguments")
    if missing := {"cg_mode", "num_tokens"} - {field.name for field in dataclasses.fields(BatchExecutionDescriptor)}:
        raise AttributeError(f"vLLM's descriptor of a batch has no {', '.join(sorted(missing))}")


def without_second_warm_up(create: CreateForward) -> CreateForward:
    """`create`, with the warm-ups of whole graphs left out for sizes that were run in pieces before."""
    run: set[int] = set()
    kept: list[int] = []

    def creating(desc: BatchExecutionDescriptor, warmup: bool) -> Forward:
        if warmup and desc.cg_mode == CUDAGraphMode.PIECEWISE:
            run.add(desc.num_tokens)
        elif warmup and desc.num_tokens in run and desc.num_tokens > WARM_TO_THE_END:
            if len(kept) >= WARM_AT_FIRST:
                return lambda mode: None  # vLLM asks again, with warmup=False, for what it captures
            kept.append(desc.num_tokens)
        return create(desc, warmup=warmup)

    return creating


def captured(manager: CudaGraphManager | None) -> tuple[int, int]:
    """Graphs that there are in this process: pieces, and whole ones."""
    entries = [
        entry
        for wrapper in list(CUDAGraphWrapper._all_instances)
        for entry in wrapper.concrete_cudagraph_entries.values()
    ]
    return sum(entry.cudagraph is not None for entry in entries), len(manager.graphs) if manager else 0
