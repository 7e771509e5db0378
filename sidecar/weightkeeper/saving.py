"""Savings of a start, put in place in each process of vLLM."""

import gc
import logging
import os

from weightkeeper import savings, vllm_api

logger = logging.getLogger("vllm.weightkeeper")


def install() -> None:
    """Have this process, and those it forks, save what is wanted. Nothing is done where vLLM is not for CUDA.

    Raises:
        ConfigError: a saving that there is not.
    """
    wanted = savings.wanted(os.environ)
    if not wanted or not vllm_api.is_cuda():
        return
    if savings.FROZEN_HEAP in wanted and gc.isenabled():  # where it is not, somebody freezes once all is imported
        gc.freeze()  # vLLM collects some ten times while it starts, each time through all that was imported
    try:
        from weightkeeper import vllm_idle

        vllm_idle.install()
    except (ImportError, AttributeError) as error:
        logger.info("weightkeeper: nothing is saved of a start: this vLLM is not known: %s", error)
