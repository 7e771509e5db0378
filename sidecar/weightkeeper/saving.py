"""Savings of a start, put in place in each process of vLLM."""

import gc
import logging
import os

from weightkeeper import savings, vllm_api

logger = logging.getLogger("vllm.weightkeeper")


def begin() -> None:
    """What is to be decided once a server, before vLLM reads its variables.

    Raises:
        ConfigError: a saving that there is not.
    """
    wanted = savings.wanted(os.environ, vllm_api.VLLM_VERSION)
    if not vllm_api.is_cuda():
        return
    if not wanted and not os.environ.get(savings.SWITCH):
        logger.info(
            "weightkeeper: nothing is saved of a start unasked with vLLM %s, whose tokens were not compared on a GPU; "
            "%s=all saves",
            vllm_api.VLLM_VERSION, savings.SWITCH,
        )  # fmt: skip
    if savings.AOT_ARTIFACT in wanted:
        try:
            from weightkeeper import vllm_artifact
        except (ImportError, AttributeError) as error:
            logger.info("weightkeeper: compiled code is loaded as vLLM does by itself: %s", error)
            return
        vllm_artifact.ask_for(os.environ)


def install() -> None:
    """Have this process, and those it forks, save what is wanted. Nothing is done where vLLM is not for CUDA.

    Raises:
        ConfigError: a saving that there is not.
    """
    wanted = savings.wanted(os.environ, vllm_api.VLLM_VERSION)
    if not wanted or not vllm_api.is_cuda():
        return
    if gc.isenabled():  # where it is not, only imports are made, and what is forked from here begins for itself
        begin()
        if savings.FROZEN_HEAP in wanted:
            gc.freeze()  # vLLM collects some ten times while it starts, each time through all that was imported
    try:
        from weightkeeper import vllm_idle

        vllm_idle.install()
    except (ImportError, AttributeError) as error:
        logger.info("weightkeeper: nothing is saved of a start: this vLLM is not known: %s", error)
