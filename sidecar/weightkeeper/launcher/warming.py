"""The imports of a server, and whether a process that has them can be forked."""

import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from weightkeeper.launcher import cuda_state
from weightkeeper.launcher.native_threads import NativeThread, native_threads

SINGLE_THREADED = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""Variables that keep libraries from starting threads as they are imported. A server gets the user's own again."""

CAREFUL = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables under which imports do not initialize CUDA to see whether there is any. vLLM sets it too, but in the midst
of its own imports; servers have it as well."""

ALLOWED_THREADS = "WEIGHTKEEPER_ALLOW_THREADS"
"""Variable with names between commas, of native threads or of the libraries they wait in (`libexample*`), that may be
lost at a fork: idle ones that hold no lock. A thread of Python's own is never allowed."""

HARMLESS_THREADS = ("jemalloc_bg_thd", "cuda[0-9]*")
"""Names of native threads that may be lost always. jemalloc's own fork handlers see to its thread (libarrow has one);
NVML leaves the other, and vLLM itself forks after it. Whether CUDA is initialized is asked apart from it."""


def warm(application: str, arguments: list[str]) -> tuple[ModuleType | None, dict[str, Any], dict[str, str]]:
    """Import everything.

    Returns:
        The application; what to say to the launcher; variables that the imports set, which every server has to have.
    """
    began = time.monotonic()
    before = dict(os.environ)
    os.environ |= CAREFUL
    try:
        module = importlib.import_module(application)
        module.warm(arguments)
    except (Exception, SystemExit) as error:
        logging.getLogger(__name__).warning("the imports of the server broke", exc_info=True)
        return None, {"unusable": f"{type(error).__name__}: {error}"}, {}
    if (reason := unfit()) is not None:
        return None, {"unusable": reason}, {}
    message = {"ready": True, "seconds": time.monotonic() - began, "threads": len(os.listdir("/proc/self/task"))}
    return module, message, {name: value for name, value in os.environ.items() if before.get(name) != value}


def unfit() -> str | None:
    """Why nothing may be forked from this process; None where it may."""
    if cuda_state.is_initialized():  # first, for it has threads of its own
        return "the imports initialized CUDA, which no fork survives"
    if others := _others():
        names = ", ".join(others)
        return f"the imports left {len(others) + 1} threads running, and a fork keeps only one (besides it: {names})"
    return None


def fork() -> int:
    """As os.fork(); what is buffered is not written twice, and Python 3.12's warning of other threads is not given."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `unfit` looks closer
        return os.fork()


def _others() -> list[str]:
    """The threads besides the first that no fork may lose."""
    # not by native_id, which before Python 3.12 is still the parent's in a forked process
    python = [f"{each.name} of Python" for each in threading.enumerate() if each is not threading.main_thread()]
    allowed = {name for each in os.environ.get(ALLOWED_THREADS, "").split(",") if (name := each.strip())}
    native = native_threads()
    return python + [str(one) for one in native if not _is_allowed(one, allowed)]


def _is_allowed(thread: NativeThread, names: Collection[str]) -> bool:
    return (
        thread.name in names
        or any(fnmatchcase(thread.name, name) for name in HARMLESS_THREADS)
        or any(fnmatchcase(thread.library, name) for name in names)
    )
