"""An engine that has to load from disk anyway gives what it loaded to the keeper, and goes on computing on it."""

import time
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from weightkeeper import client, fingerprint, verified, vllm_api
from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.client import Session
from weightkeeper.conditions import conditions_of
from weightkeeper.errors import (
    KeeperFailedError,
    MismatchError,
    NotLoadedError,
    UnverifiedQuantizationError,
    WeightkeeperError,
)
from weightkeeper.frames import close_all
from weightkeeper.memory import Region
from weightkeeper.offering import Lease, Offer
from weightkeeper.options import Options
from weightkeeper.packed import Packed, load_packed
from weightkeeper.phases import Phases
from weightkeeper.protocol import Publish
from weightkeeper.receipts import Receipts
from weightkeeper.restore import Bound, check, rebind
from weightkeeper.tensors import bytes_of
from weightkeeper.vllm_api import ModelConfig, VllmConfig

logger = vllm_api.init_logger("vllm.weightkeeper")

PUBLISHABLE = (NotLoadedError, KeeperFailedError, MismatchError)
"""Causes that say: a keeper is there, and it does not have these weights."""


def can_publish(options: Options, cause: WeightkeeperError, model_config: ModelConfig) -> bool:
    """Whether an engine with this cause should offer the keeper what it loads itself."""
    if not options.publish or options.mode != "zero_copy" or not isinstance(cause, PUBLISHABLE):
        return False
    try:
        verified.check(model_config.quantization, "cpu" if vllm_api.is_cpu() else "cuda")
    except UnverifiedQuantizationError as error:
        logger.warning("weightkeeper: nothing is published: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class Published:
    """A model that computes on packed, read-only memory.

    Attributes:
        lease: on it; with the next keeper, where the one that is there did not take it.
        is_taken: whether it did.
        extent: first address and bytes of the memory.
    """

    model: nn.Module
    bound: Bound
    lease: Lease
    is_taken: bool
    extent: tuple[int, int]


def load_and_publish(
    vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, options: Options, name: str, phases: Phases
) -> Published:
    """Load from disk, pack, give the keeper the descriptors, and bind the model to the same memory, read-only.

    A keeper that does not take it is said and costs nothing: the engine has its weights.

    Raises:
        WeightkeeperError: the files, the layers or the memory are refused; there is no model then.
    """
    rank = vllm_api.model_rank()
    conditions = conditions_of(vllm_config, model_config, rank, options.disk_load_format)
    checkpoint = open_checkpoint(vllm_api.checkpoint_path(model_config))
    receipts = Receipts(checkpoint)
    progress = lambda stage, done, total: None  # noqa: E731  an engine's own log tells it
    packed = load_packed(vllm_config, model_config, options, checkpoint, receipts.get, progress, prefix)
    phases.end("load from disk and pack")
    packed.arena.seal()
    descriptors = packed.arena.export()
    try:
        region = packed.memory.map(descriptors, packed.arena.sizes)
        extent = (region.address, region.nbytes)
        bound = _finish(packed, region, vllm_config, model_config)
        phases.end("bind")
        message = Publish(
            device=vllm_api.device_name(rank),
            rank=rank,
            world_size=vllm_api.model_world_size(),
            model=model_config.model,
            fingerprint=fingerprint.compose({each.name: each.blake3 for each in receipts.get()}, conditions),
            receipts=receipts.get(),
            kind=packed.memory.kind,
            sizes=packed.arena.sizes,
            layout=packed.layout,
        )
        session = _publish(message, descriptors, options, name)
        phases.end("publish")
    except BaseException:
        close_all(descriptors)
        raise
    finally:
        packed.arena.close()
    mapped = msgspec.structs.replace(message, mapped_at=time.time())
    offer = Offer(options.socket_dir, mapped, descriptors, name, options.connect_timeout_s)
    return Published(packed.model, bound, Lease(session, offer), session is not None, extent)


def _finish(packed: Packed, region: Region, vllm_config: VllmConfig, model_config: ModelConfig) -> Bound:
    bound = rebind(packed.model, packed.layout, bytes_of(region))
    if not packed.layout.processed:
        device = torch.device(vllm_config.device_config.device)
        with vllm_api.without_cpu_repacking():
            vllm_api.process_weights(packed.model, model_config, device)
    check(packed.model, packed.layout)
    return bound


def _publish(message: Publish, descriptors: list[int], options: Options, name: str) -> Session | None:
    try:
        return client.publish(
            options.socket_dir,
            message,
            descriptors,
            name=name,
            connect_timeout_s=options.connect_timeout_s,
            state_timeout_s=options.state_timeout_s,
        )
    except WeightkeeperError as error:
        logger.warning("weightkeeper: the keeper did not take the weights, code=%s: %s", error.code, error)
        return None
