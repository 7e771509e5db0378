"""The vLLM plugin: `--load-format weightkeeper` maps the keeper's weights, or says why it loads from disk.

vLLM calls `register` in each of its processes; the loader itself runs only in workers.
"""

import os

from weightkeeper import (
    phases,  # noqa: F401  its import is the moment from which phases are counted
    vllm_messages,
)

TAKE_IPC_CACHE = "WEIGHTKEEPER_TAKE_IPC_CACHE"
"""Variable that, set to 1, also serves vLLM's own `--load-format ipc_cache` (our engine image sets it)."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. May be called more than once."""
    vllm_messages.install()
    from weightkeeper import budget, saving, vllm_api
    from weightkeeper.mapped_loader import MappedLoader

    vllm_api.register_loader("weightkeeper", MappedLoader)
    formats = {"weightkeeper"}
    if os.environ.get(TAKE_IPC_CACHE) == "1":
        formats.add("ipc_cache")
        vllm_api.register_loader("ipc_cache", MappedLoader)
    if not vllm_api.is_cpu():
        vllm_api.replace_request_memory(lambda config, snapshot: budget.request(config, snapshot, formats))
    saving.install()
