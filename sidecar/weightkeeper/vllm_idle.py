"""The engine core's part in the savings: it asks its workers, before vLLM measures memory and while it is idle."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from weightkeeper import savings, vllm_api, worker_savings

logger = logging.getLogger("vllm.weightkeeper")

BETWEEN_STEPS_S = 1.0
"""How often a graph is captured between two steps of a server that is never idle."""

WORKER = "vllm.v1.worker.gpu_worker.Worker"

_ATTRIBUTE = "weightkeeper_idle"


def install() -> None:
    """Put ours around vLLM's engine core, once.

    Raises:
        AttributeError: it has not got what is expected.
    """
    prepared, waiting = EngineCore._initialize_kv_caches, EngineCoreProc._process_input_queue
    if hasattr(prepared, "weightkeeper"):
        return
    for name in ("has_work", "is_running", "is_scheduler_paused"):
        getattr(EngineCoreProc, name)
    notified = EngineCoreProc._notify_idle_state_callbacks

    @functools.wraps(prepared)
    def initialize_kv_caches(engine: EngineCore, *arguments: Any, **named: Any) -> Any:
        idle = begin(engine)
        result = prepared(engine, *arguments, **named)
        if idle is not None:
            idle.wait_for_idleness()
        return result

    @functools.wraps(waiting)
    def process_input_queue(engine: EngineCoreProc) -> Any:
        idle = vars(engine).get(_ATTRIBUTE)
        if idle is not None:
            idle.work()
        return waiting(engine)

    @functools.wraps(notified)
    def notify_idle_state_callbacks(engine: EngineCoreProc) -> None:
        # vLLM comes by here before each wait for a request; from one without work to do it does not leave its queue
        notified(engine)
        idle = vars(engine).get(_ATTRIBUTE)
        if idle is not None and not engine.has_work():
            idle.work()

    EngineCoreProc._notify_idle_state_callbacks = notify_idle_state_callbacks
    initialize_kv_caches.weightkeeper = True
    EngineCore._initialize_kv_caches = initialize_kv_caches
    EngineCoreProc._process_input_queue = process_input_queue


def begin(engine: EngineCore) -> "Idle | None":
    """Let all ranks say what they could save, and tell them what they will. None where nothing can be."""
    try:
        # of this server, which may be forked from a process with other variables
        wanted = savings.wanted(os.environ, vllm_api.VLLM_VERSION)
        if not wanted:
            return None
        if why := _unknown(engine):
            logger.info("weightkeeper: nothing is saved of this start: %s", why)
            return None
        idle = Idle(engine)
        offers = idle.ask(worker_savings.prepare, list(wanted))
        defer = next((offer["defer"] for offer in offers if offer["defer"]), "")
        if not idle.is_driven:
            defer = "this process has no loop in which it would be idle"
        use_kv = all(offer["kv_bytes"] > 0 for offer in offers)
        idle.ask(worker_savings.decide, use_kv, defer, idle.is_driven)
        return idle
    except Exception as error:
        logger.warning("weightkeeper: nothing is saved of this start: %s: %s", type(error).__name__, error)
        return None


def _unknown(engine: EngineCore) -> str:
    if type(engine.model_executor) not in (UniProcExecutor, MultiprocExecutor):
        return f"{type(engine.model_executor).__name__} runs the workers"
    parallel = engine.vllm_config.parallel_config
    if parallel.worker_cls != WORKER:
        return f"the worker is {parallel.worker_cls}"
    if parallel.nnodes > 1:
        return "several machines"
    if parallel.world_size_across_dp > 1 and savings.is_default(os.environ):
        return f"by default only on one GPU, where tokens were compared; {savings.SWITCH}=all saves here, too"
    return ""


class Idle:
    """What is left to do while the engine core has nothing else to do.

    Attributes:
        is_driven: whether the engine core has a loop that comes by.
    """

    def __init__(self, engine: EngineCore):
        self._engine = engine
        self.is_driven = type(engine) is EngineCoreProc
        self._steps: list[Callable[[], bool]] = [self._start, self._capture, self._make_inductor_ready]
        self._last = 0.0
        self._busy = 0.0
        self._sizes = 0

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of `worker_savings` in all workers; their answers."""
        return self._engine.model_executor.collective_rpc(function, args=arguments)

    def wait_for_idleness(self) -> None:
        """The start is over: from now on, `work` is called between steps; where it is not, nothing is left to do."""
        if self.is_driven:
            setattr(self._engine, _ATTRIBUTE, self)
            return
        with contextlib.suppress(StopIteration):
            self._guarded(self._start)

    def work(self) -> None:
        """Go on as long as nothing else is to be done; under constant load, one graph a second."""
        engine = self._engine
        while self._steps and self._is_idle():
            self._guarded(self._steps[0])
        if not self._steps:
            vars(engine).pop(_ATTRIBUTE, None)
            return
        now = time.monotonic()
        self._last = self._last or now
        if engine.has_work() and engine.is_running() and now - self._last >= BETWEEN_STEPS_S:
            self._last = now
            if self._steps[0] == self._capture:
                # workers answer in order, so after this no thread of theirs waits for a result of the GPU
                self._guarded(lambda: bool(self.ask(worker_savings.settle)))
            if self._steps and self._steps[0] != self._make_inductor_ready:
                self._guarded(self._steps[0])

    def _is_idle(self) -> bool:
        engine = self._engine
        return (
            engine.is_running()
            and not engine.has_work()
            and engine.input_queue.empty()
            and not engine.is_scheduler_paused()
        )

    def _guarded(self, step: Callable[[], bool]) -> None:
        """Do a step; it says whether it has to be called again."""
        try:
            again = step()
        except Exception as error:
            logger.warning("weightkeeper: what was left for later is given up: %s: %s", type(error).__name__, error)
            self._steps.clear()
            return
        if not again and self._steps and self._steps[0] == step:
            self._steps.pop(0)

    def _start(self) -> bool:
        answers = self.ask(worker_savings.started)
        self._sizes = max(answers)
        if not self._sizes:
            self._steps.remove(self._capture)
        return False

    def _capture(self) -> bool:
        begun = time.monotonic()
        answers = self.ask(worker_savings.capture_next)
        self._busy += time.monotonic() - begun
        if failed := next((answer["failed"] for answer in answers if answer["failed"]), ""):
            self.ask(worker_savings.leave, max(answer["size"] for answer in answers))
            logger.warning(
                "weightkeeper: batches of some sizes go on without graphs until the next start: size %d: %s",
                max(answer["size"] for answer in answers), failed,
            )  # fmt: skip
            return False
        if any(answer["left"] for answer in answers):
            return True
        pieces, whole = self.ask(worker_savings.finish)[0]
        logger.info(
            "weightkeeper: all graphs are there: %d deferred sizes took %.2f s, %d piecewise graphs, %d whole ones",
            self._sizes, self._busy, pieces, whole,
        )  # fmt: skip
        return False

    def _make_inductor_ready(self) -> bool:
        self.ask(worker_savings.make_inductor_ready)
        return False
