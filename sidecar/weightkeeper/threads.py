"""How many threads a forked process computes with: what the user asked for, although its imports were told one."""

import os
from collections.abc import Mapping


def wanted(environment: Mapping[str, str]) -> int:
    """Threads that torch would compute with in a fresh process of this environment: at least 1."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # a list is OpenMP's way to give each level of nesting its own number
        value = environment.get(name, "").split(",")[0].strip()
        if value.isdecimal() and int(value) > 0:
            return int(value)
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def restore() -> None:
    """Let torch compute as this process's environment asks; the variables by themselves do nothing after the imports.

    numpy's own matrix library stays on one thread; vLLM does not compute with it.
    """
    import torch

    torch.set_num_threads(wanted(os.environ))
