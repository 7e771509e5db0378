"""Capturing many CUDA graphs in a row, without what torch does around each one.

Before each graph `torch.cuda.graph` waits for the GPU and empties the allocators of device and host memory. For some
two thousand small graphs that is a second or more, and the memory given back is asked for again at once.
"""

import ast
import contextlib
import gc
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

_LEFT_OUT = (
    "torch.cuda.synchronize()",
    "if torch.compiler.config.force_cudagraph_gc:\n    gc.collect()",
    "torch.cuda.empty_cache()",
    "torch._C._host_emptyCache()",
)
_ANNOTATING = (
    "if self._enable_annotations:\n"
    "    from torch.cuda._graph_annotations import enable_annotations as _enable_ann\n"
    "    _enable_ann()"
)
_STREAM = "self.stream_ctx.__enter__()"
_BEGIN = "self.cuda_graph.capture_begin(*self.pool, capture_error_mode=self.capture_error_mode)"
_BEGIN_CHECKED = _BEGIN.removesuffix(")") + ", check_input_liveness=self.check_input_liveness)"

KNOWN = (
    (*_LEFT_OUT, _STREAM, _BEGIN),
    (*_LEFT_OUT, _ANNOTATING, _STREAM, _BEGIN),
    (*_LEFT_OUT, _STREAM, _BEGIN_CHECKED),
    (*_LEFT_OUT, _ANNOTATING, _STREAM, _BEGIN_CHECKED),
)
"""What `torch.cuda.graph.__enter__` is made of: in torch 2.11 the first, in 2.13 the last."""


def why_not() -> str:
    """Why this torch's way to begin a graph cannot be shortened; empty where it can."""
    try:
        source = textwrap.dedent(inspect.getsource(torch.cuda.graph.__enter__))
        statements = tuple(ast.unparse(statement) for statement in ast.parse(source).body[0].body)
    except (AttributeError, OSError, SyntaxError, TypeError) as error:
        return f"torch {torch.__version__} does not show how it begins a graph ({error})"
    return "" if statements in KNOWN else f"torch {torch.__version__} begins a graph in a way that is not known here"


@contextlib.contextmanager
def shortened(error_mode: str | None = None) -> Iterator[None]:
    """Graphs that are begun inside neither wait nor empty caches. The caller has waited for the GPU.

    Args:
        error_mode: of capture, in place of what is asked for; `thread_local` where other threads use the GPU.
    """
    whole = torch.cuda.graph.__enter__

    def enter(self: Any) -> None:
        if getattr(self, "_enable_annotations", False):
            return whole(self)
        self.stream_ctx.__enter__()
        named = {"capture_error_mode": error_mode or self.capture_error_mode}
        if hasattr(self, "check_input_liveness"):
            named["check_input_liveness"] = self.check_input_liveness
        self.cuda_graph.capture_begin(*self.pool, **named)
        return None

    torch.cuda.graph.__enter__ = enter
    try:
        yield
    finally:
        torch.cuda.graph.__enter__ = whole


@contextlib.contextmanager
def bulk() -> Iterator[None]:
    """As `shortened`, with what is left out done once before and once after."""
    _clear()
    with shortened():
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _clear() -> None:
    torch.cuda.synchronize()
    if torch.compiler.config.force_cudagraph_gc:
        gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
