"""Savings of a start, put in place in each process of vLLM."""

import gc
import logging
import os

from weightkeeper import savings, vllm_api

logger = logging.getLogger("vllm.weightkeeper")


def begin() -> None:
    """A server of the launcher begins: what its user has not decided is saved by default, and so in all its processes.

    Raises:
        ConfigError: a saving that there is not.
    """
    if savings.is_default(os.environ):
        os.environ[savings.SWITCH] = savings.DEFAULT
        if vllm_api.is_cuda() and not savings.is_compared(vllm_api.VLLM_VERSION):
            logger.info(
                "weightkeeper: nothing is saved of a start by default with vLLM %s, whose tokens were not compared on "
                "a GPU; %s=all saves",
                vllm_api.VLLM_VERSION, savings.SWITCH,
            )  # fmt: skip
    install()


def install() -> None:
    """Have this process, and those it forks, save what is wanted. Nothing is done where vLLM is not for CUDA.

    Raises:
        ConfigError: a saving that there is not.
    """
    wanted = savings.wanted(os.environ, vllm_api.VLLM_VERSION)
    if not wanted or not vllm_api.is_cuda():
        return
    if savings.FROZEN_HEAP in wanted and gc.isenabled():  # where it is not, somebody freezes once all is imported
        gc.freeze()  # vLLM collects some ten times while it starts, each time through all that was imported
    try:
        from weightkeeper import vllm_idle

        vllm_idle.install()
    except (ImportError, AttributeError) as error:
        logger.info("weightkeeper: nothing is saved of a start: this vLLM is not known: %s", error)
