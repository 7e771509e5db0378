"""What vLLM does at the end of a start that can be cheaper, or later."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from vllm import envs
from vllm.compilation import compiler_interface
from vllm.v1.worker.gpu import model_runner

_freeze_for_capture = model_runner.freeze_gc_for_cudagraph_capture
_inductor_lazy_init = compiler_interface.trigger_inductor_lazy_init


def keep_frozen_after_capture(keep: bool) -> None:
    """Have vLLM leave what lives during the capture out of later collections, as it does at the end of the start.

    vLLM unfreezes the heap after the capture, collects all of it, and a little later collects and freezes it again.
    """
    model_runner.freeze_gc_for_cudagraph_capture = _frozen_for_capture if keep else _freeze_for_capture


@contextlib.contextmanager
def _frozen_for_capture() -> Iterator[None]:
    if envs.VLLM_ENABLE_CUDAGRAPH_GC:
        with _freeze_for_capture():
            yield
        return
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def postpone_inductor() -> Callable[[], None]:
    """Have vLLM make torch's compiler ready only when the function that is given back is called."""
    asked: list[tuple[Any, ...]] = []

    def later(*arguments: Any) -> None:
        asked.append(arguments)

    def now() -> None:
        compiler_interface.trigger_inductor_lazy_init = _inductor_lazy_init
        while asked:
            _inductor_lazy_init(*asked.pop())

    compiler_interface.trigger_inductor_lazy_init = later
    return now
