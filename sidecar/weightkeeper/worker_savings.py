"""What a vLLM worker does for the savings. The engine core asks for each step, of all ranks at once.

The dialogue: `prepare` → what this rank could do; `decide` → what all ranks do; then vLLM measures, captures and warms
up; `started` once that is over; `capture_next` until nothing is left, `finish`, `make_inductor_ready`. A function gets
what vLLM's executor hands to a function, the worker's wrapper, never raises, and answers with plain data.

vLLM's own modules are imported where they are needed: the engine core imports this one for the functions' names only.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from weightkeeper import phases, savings
from weightkeeper.kv_size import KvSize
from weightkeeper.vllm_messages import process_name

logger = logging.getLogger("vllm.weightkeeper")

_OF_CAPTURE = (savings.BULK_CAPTURE, savings.ONE_WARM_UP, savings.DEFERRED_GRAPHS)
_MEASURING = "this start measures memory"


class State:
    """Of one worker's savings.

    Attributes:
        plan: of the capture, once it is decided.
        kv_bytes: the recalled size; 0 where there is none.
    """

    def __init__(self, worker: Any, wanted: list[str]):
        self.worker = worker
        self.account = savings.Account(wanted)
        self.kv_size: KvSize | None = None
        self.kv_bytes = 0
        self.plan: Any = None
        self.make_inductor_ready: Callable[[], None] | None = None

    @property
    def deferred(self) -> Any:
        """The graphs that were left for later; None where there are none."""
        return self.plan.deferred if self.plan is not None else None

    def backends(self) -> set[str]:
        """Names of the attention backends in use."""
        return {group.backend.get_name() for groups in self.worker.model_runner.attn_groups for group in groups}


_states: "weakref.WeakKeyDictionary[Any, State]" = weakref.WeakKeyDictionary()


def prepare(wrapper: Any, wanted: list[str]) -> dict[str, Any]:
    """What this rank could save.

    Returns:
        `kv_bytes`: the KV cache's size of the last good start, or 0; `defer`: why graphs cannot wait, empty where they
        can.
    """
    offer: dict[str, Any] = {"kv_bytes": 0, "defer": "this worker is not known"}
    try:
        state = _states[wrapper.worker] = State(wrapper.worker, wanted)
        from weightkeeper import bulk_capture, vllm_conditions

        offer["kv_bytes"] = state.kv_bytes = _recall(state)
        offer["defer"] = bulk_capture.why_not() or vllm_conditions.cannot_defer(wrapper.worker)
    except Exception as error:
        logger.info("weightkeeper: this vLLM's worker is not known: %s: %s", type(error).__name__, error)
    return offer


def _recall(state: State) -> int:
    """The size of the last good start, marked as in use; 0 where there is none."""
    from weightkeeper import vllm_conditions, vllm_kv_size

    account = state.account
    if state.worker.cache_config.kv_cache_memory_bytes is not None:
        account.skip(savings.KV_SIZE, "it is given")
    if not account.wants(savings.KV_SIZE):
        return 0
    try:
        if why := vllm_conditions.cannot_recall(state.worker):
            account.skip(savings.KV_SIZE, why)
            return 0
        state.kv_size = vllm_kv_size.of(state.worker)
        recalled = state.kv_size.recall()
        if recalled.nbytes:
            state.kv_size.begin()
    except Exception as error:
        account.skip(savings.KV_SIZE, f"{type(error).__name__}: {error}")
        return 0
    if recalled.why:
        account.skip(savings.KV_SIZE, recalled.why)
    return recalled.nbytes


def decide(wrapper: Any, use_kv: bool, defer: str, driven: bool) -> None:
    """Do what all ranks do.

    Args:
        use_kv: use the recalled size.
        defer: why graphs are not left for later; empty where they are.
        driven: the engine core will ask for what is left when it is idle.
    """
    with _spared(wrapper, savings.ALL) as state:
        _size_cache(state, use_kv)
    is_known = state.worker.cache_config.kv_cache_memory_bytes is not None
    with _spared(wrapper, _OF_CAPTURE):
        _plan_capture(state, is_known, defer)
    with _spared(wrapper, [savings.FROZEN_HEAP]):
        _freeze(state, is_known)
    with _spared(wrapper, [savings.LATE_INDUCTOR]):
        _postpone_inductor(state, driven)
    phases.mark(process_name(), "savings")


def _size_cache(state: State, use_kv: bool) -> None:
    if use_kv and state.kv_bytes:
        state.worker.cache_config.kv_cache_memory_bytes = state.kv_bytes
        state.account.apply(savings.KV_SIZE, f"{state.kv_bytes / 2**30:.2f} GiB as in the last good start")
        return
    state.account.skip(savings.KV_SIZE, "another rank measures")
    if state.kv_bytes:
        state.kv_bytes = 0
        state.kv_size.good()


def _plan_capture(state: State, is_known: bool, defer: str) -> None:
    from weightkeeper import bulk_capture, vllm_conditions, vllm_graphs

    account = state.account
    if not is_known:  # vLLM suggests a size at the end of such a start, for which all graphs have to be there
        account.skip(savings.ONE_WARM_UP, _MEASURING)
        account.skip(savings.DEFERRED_GRAPHS, _MEASURING)
    if defer:
        account.skip(savings.DEFERRED_GRAPHS, defer)
    if why := bulk_capture.why_not():
        account.skip(savings.BULK_CAPTURE, why)
        account.skip(savings.DEFERRED_GRAPHS, why)
    if why := vllm_conditions.cannot_spare_warm_ups(state.worker):
        account.skip(savings.ONE_WARM_UP, why)
    bulk, one_warm_up, defers = (account.wants(name) for name in _OF_CAPTURE)
    state.plan = vllm_graphs.Plan(bulk, one_warm_up, defers, state.backends, account.skip)
    vllm_graphs.follow(state.plan if bulk or one_warm_up or defers else None)


def _freeze(state: State, is_known: bool) -> None:
    from weightkeeper import vllm_start

    keeps = is_known and state.account.wants(savings.FROZEN_HEAP)
    vllm_start.keep_frozen_after_capture(keeps)
    state.account.apply(savings.FROZEN_HEAP, "" if keeps else "up to the capture")


def _postpone_inductor(state: State, driven: bool) -> None:
    from weightkeeper import vllm_conditions, vllm_start

    why = vllm_conditions.cannot_postpone_inductor() if driven else "nobody would ask for it"
    if why:
        state.account.skip(savings.LATE_INDUCTOR, why)
    elif state.account.wants(savings.LATE_INDUCTOR):
        state.make_inductor_ready = vllm_start.postpone_inductor()
        state.account.apply(savings.LATE_INDUCTOR)


def started(wrapper: Any) -> int:
    """The start has come up: keep the size it measured, say what was saved. Gives the number of sizes that wait."""
    left = 0
    with _spared(wrapper, savings.ALL) as state:
        left = state.deferred.left if state.deferred is not None else 0
        _account_for_capture(state)
        if state.worker.rank == 0:
            logger.info("weightkeeper: %s", state.account)
        if state.kv_size is not None:
            _keep_size(state)
    return left


def _account_for_capture(state: State) -> None:
    account, plan = state.account, state.plan
    for name in _OF_CAPTURE:
        if account.wants(name) and (plan is None or not plan.captures):
            account.skip(name, "nothing was captured")
    account.apply(savings.BULK_CAPTURE)
    account.apply(savings.ONE_WARM_UP)
    if state.deferred is not None:
        account.apply(savings.DEFERRED_GRAPHS, f"{state.deferred.left} sizes wait")


def _keep_size(state: State) -> None:
    if state.kv_bytes:
        state.kv_size.good()
    elif measured := int(getattr(state.worker, "available_kv_cache_memory_bytes", 0)):
        state.kv_size.keep(measured)
        logger.info("weightkeeper: the KV cache's size, %d bytes, is kept for the next start of the same", measured)


def settle(wrapper: Any) -> None:
    """Nothing: once this is answered, so is everything before it."""


def capture_next(wrapper: Any) -> dict[str, Any]:
    """Capture the next size. Gives the sizes that are `left`, the `size` it was, and what `failed`, if it did."""
    size = 0
    try:
        state = _states[wrapper.worker]
        size = state.deferred.next_size
        state.deferred.capture_next()
        return {"left": state.deferred.left, "size": size, "failed": ""}
    except Exception as error:
        return {"left": 0, "size": size, "failed": f"{type(error).__name__}: {error}"}


def leave(wrapper: Any, size: int) -> None:
    """This rank or another could not capture this size.

    The KV cache's size is forgotten: it may be that which leaves too little room.
    """
    with _spared(wrapper, []) as state:
        state.deferred.leave(size)
        if state.kv_size is not None:
            state.kv_size.forget()


def finish(wrapper: Any) -> tuple[int, int]:
    """All sizes are captured, on all ranks. Gives the graphs that there are: pieces, and whole ones."""
    with _spared(wrapper, []) as state:
        from weightkeeper import vllm_graphs

        state.deferred.finish()
        return vllm_graphs.captured(state.worker.model_runner.cudagraph_manager)
    return 0, 0


def make_inductor_ready(wrapper: Any) -> None:
    """What was postponed of torch's compiler."""
    with _spared(wrapper, []) as state:
        if state.make_inductor_ready is not None:
            state.make_inductor_ready()


@contextlib.contextmanager
def _spared(wrapper: Any, names: Any) -> Iterator[State]:
    """The state; an error inside ends the savings with these names and nothing else."""
    state = _states.get(wrapper.worker) or State(wrapper.worker, [])
    try:
        yield state
    except Exception as error:
        logger.warning("weightkeeper: a saving failed: %s: %s", type(error).__name__, error)
        for name in names:
            state.account.skip(name, f"{type(error).__name__}: {error}")
