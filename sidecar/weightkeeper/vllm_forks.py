"""What is different for a vLLM server whose processes are forked from one that has its imports."""

import atexit
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
from multiprocessing import resource_tracker
from typing import NoReturn

from weightkeeper import phases, threads, vllm_api, vllm_binding, vllm_tokenizer

logger = logging.getLogger("vllm.weightkeeper")

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable for how engine core and workers are started."""


def settle_in(listener: socket.socket) -> None:
    """Be as a server that has made its imports itself, and have engine core and workers forked as well.

    Args:
        listener: which belongs to the server alone.
    """
    threads.restore()
    vllm_tokenizer.renew()
    prefer_fork()
    _track_resources()
    if vllm_api.is_cpu():
        vllm_api.unlink_shared_memory()
        vllm_binding.bind_workers()
    os.register_at_fork(before=_config_is_over, after_in_child=functools.partial(_leave_server, listener))


def end() -> NoReturn:
    """End a forked server as Python does, but for taking apart some thousand modules, which takes 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def prefer_fork() -> None:
    """Let vLLM fork unless the user has it spawn.

    On the CPU its platform sets `spawn` while it checks a configuration. vLLM's guards against a fork after CUDA stay.
    """
    from vllm.platforms import current_platform

    if (method := os.environ.setdefault(METHOD, "fork")) != "fork":
        logger.warning(
            "weightkeeper: %s is %s, so engine core and workers import vLLM again; remove it", METHOD, method
        )
    platform = type(current_platform)
    checked = platform.check_and_update_config

    def check_and_update_config(vllm_config: object) -> None:
        method = os.environ[METHOD]
        checked(vllm_config)
        os.environ[METHOD] = method
        if vllm_api.is_cpu():
            vllm_binding.check(vllm_config)

    platform.check_and_update_config = staticmethod(check_and_update_config)


def _track_resources() -> None:
    """Start the process that removes shared memory which was left behind, while it can still outlive the engine core.

    The first process that needs it starts it. That would be the engine core, which vLLM kills with all below it.
    """
    warned = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning"  # it would warn of what it removes at each stop
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if warned is not None:
            os.environ["PYTHONWARNINGS"] = warned


@functools.cache
def _config_is_over() -> None:
    """Said once, and not again in the processes that the server forks: they inherit that it was said."""
    phases.mark("server", "config")


def _leave_server(listener: socket.socket) -> None:
    """In a process that the server forked: have nothing of the server's."""
    signal.set_wakeup_fd(-1)  # or the signals of this process would reach the server's event loop
    listener.close()
    # At its end vLLM unfreezes and collects what it allocated, so that one process could run a second engine. Here the
    # process ends, and it would go through, and so copy, all that was imported before the fork: 0.5 s each time.
    gc.unfreeze = lambda: None
    for stream in (sys.stdout, sys.stderr):
        if (write := getattr(stream, "_original_write", None)) is not None:
            stream.write = write  # vLLM before 0.32 would put its prefix behind the server's
            del stream._original_write
