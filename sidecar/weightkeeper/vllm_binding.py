"""The CPUs that a CPU engine's forked workers compute on: those that vLLM would bind a spawned worker to.

vLLM tells a spawned worker its CPUs (VLLM_CPU_OMP_THREADS_BIND, `auto` by default) in variables that OpenMP reads as it
is loaded. A forked worker has OpenMP loaded, so its process is bound to these CPUs instead, with as many threads: each
may move among them, where a spawned one's stays on one. vLLM's choice of the memory node follows that, too.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger("vllm.weightkeeper")

BIND = "VLLM_CPU_OMP_THREADS_BIND"

PLACED_BY = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables of OpenMP's own, which it has read by the time of a fork, and acts upon in each worker."""

_of_next: list[int] = []
"""CPUs of the worker that is being forked."""


def check(vllm_config: Any) -> None:
    """Refuse what vLLM would refuse only in the engine core, when the server before is gone.

    Raises:
        AssertionError, ValueError: in vLLM's words, or because the CPUs of a worker are none of ours.
    """
    module = _module()
    if module is None or vllm_config.parallel_config.distributed_executor_backend != "mp":
        return
    said = logging.getLogger(module.__name__)
    level = said.level
    said.setLevel(logging.ERROR)  # the engine core will say it
    try:
        manager = module.OMPProcessManager(vllm_config)
    finally:
        said.setLevel(level)
    ours = os.sched_getaffinity(0)
    for rank, cpus in enumerate([] if manager.skip_setup else manager.cpu_lists):
        if not ours & set(cpus):
            raise ValueError(f"{BIND}: none of the CPUs {_text(cpus)} of rank {rank} is one of ours, {_text(ours)}")


def bind_workers() -> None:
    """Bind each worker that the engine core forks from here on."""
    module = _module()
    if module is None:
        return
    given = [name for name in PLACED_BY if name in os.environ]
    if given and os.environ.get(BIND) != "nobind":
        logger.warning("weightkeeper: %s places the workers' threads, %s does not; remove it", ", ".join(given), BIND)
    manager = module.OMPProcessManager
    configured = manager.configure_omp_envs

    @contextlib.contextmanager
    def configure_omp_envs(self: Any, rank: int, local_rank: int) -> Iterator[None]:
        with configured(self, rank=rank, local_rank=local_rank), _next(rank, _cpus(self, local_rank)):
            yield

    manager.configure_omp_envs = configure_omp_envs
    os.register_at_fork(after_in_child=_bind)


def _module() -> ModuleType | None:
    """None in a version of vLLM in which the workers bind themselves."""
    try:
        from vllm.utils import ompmultiprocessing
    except ImportError:
        return None
    return ompmultiprocessing


def _cpus(manager: Any, local_rank: int) -> list[int]:
    return [] if manager.skip_setup else manager.cpu_lists[local_rank]


@contextlib.contextmanager
def _next(rank: int, cpus: list[int]) -> Iterator[None]:
    """A worker that is forked in this context gets these CPUs; all are left to it where there are none."""
    if not cpus:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(len(cpus))  # here, since it may start threads, of which a forked process has none
    logger.info("weightkeeper: worker %d has the CPUs %s, and as many threads", rank, _text(cpus))
    _of_next[:] = cpus
    try:
        yield
    finally:
        _of_next.clear()
        torch.set_num_threads(threads)


def _bind() -> None:
    """In a forked process: take the CPUs that are meant for it, if any."""
    if not _of_next:
        return
    cpus = set(_of_next)
    _of_next.clear()  # they are not its children's
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("weightkeeper: a worker is not bound to the CPUs %s: %s", _text(cpus), error.strerror)


def _text(cpus: Any) -> str:
    return ", ".join(map(str, sorted(cpus)))
