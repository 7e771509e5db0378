"""How vLLM's memory budget counts weights that a keeper holds: once, as weights.

vLLM plans its KV cache from the memory it may use and what it sees used by itself. The keeper's bytes are in neither,
so they are taken from the budget; a disk load and a mapped one then plan the same cache.
"""

from typing import Any

from weightkeeper import client, room, vllm_api
from weightkeeper.errors import CacheUnusableError
from weightkeeper.options import Options, read

logger = vllm_api.init_logger("vllm.weightkeeper")


def held_bytes(options: Options, device: str) -> int:
    """Bytes that the keeper holds on `device`, after waiting for a load that is still going on.

    0 where this engine will not use them: no keeper, nothing held, or another one's socket.
    """
    try:
        session = client.open_session(
            options.socket_dir,
            device,
            name="memory budget",
            connect_timeout_s=options.connect_timeout_s,
            state_timeout_s=options.state_timeout_s,
            wait=lambda text: logger.info("weightkeeper: waiting before memory is planned: %s", text),
            wait_for_keeper=not options.fallback,
            socket_path=options.socket_path,
        )
        session.close()
        held = client.status(options.socket_dir, timeout_s=options.connect_timeout_s).held
    except CacheUnusableError as cause:
        logger.debug("weightkeeper: no weights are counted, code=%s: %s", cause.code, cause)
        return 0
    return held.devices.get(device, 0) if held else 0


def external_bytes(options: Options, device: str) -> int:
    """What vLLM has to take from its budget: the keeper's bytes in zero-copy mode, nothing in copy mode."""
    return held_bytes(options, device) if options.mode == "zero_copy" else 0


def request(vllm_config: vllm_api.VllmConfig, snapshot: Any, formats: set[str]) -> int | None:
    """What a GPU worker may use, or None where its load format is none of ours.

    vLLM before 0.32 takes the snapshot before it asks; it is taken again here, after waiting for the keeper.
    """
    load_config = vllm_config.load_config
    if load_config.load_format not in formats:
        return None
    options = read(load_config.model_loader_extra_config)
    device = vllm_api.device_name(vllm_api.model_rank())
    held = held_bytes(options, device)
    snapshot.measure()
    utilization = vllm_config.cache_config.gpu_memory_utilization
    if options.mode == "copy" and not options.release:
        held = 0  # the keeper's copy stays beside this engine's, as anybody's memory
    allowed = room.requested(snapshot.total_memory, snapshot.free_memory, utilization, held, options.mode, device)
    if options.mode == "copy":
        snapshot.free_memory += held  # given back before vLLM looks again
        snapshot.cuda_memory -= held
        snapshot.non_torch_memory -= held
    return allowed
