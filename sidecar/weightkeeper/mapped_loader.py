"""The loader that an engine uses: keeper → session → mapping → model, or one named cause and the disk."""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from weightkeeper import budget, client, fingerprint, publisher, room, vllm_api
from weightkeeper.adapt import adapt
from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.conditions import conditions_of
from weightkeeper.errors import (
    BuildFailedError,
    CacheUnusableError,
    CheckpointChangedError,
    CheckpointError,
    ConfigError,
    MemoryKindError,
    SlotsError,
    UnsupportedError,
    WeightkeeperError,
)
from weightkeeper.guard import ReadOnly
from weightkeeper.identity import digests
from weightkeeper.mapping import Mapping, open_mapping
from weightkeeper.offering import Source
from weightkeeper.options import Options, default_name, read
from weightkeeper.phases import Phases, mark
from weightkeeper.protocol import Receipt, Report
from weightkeeper.restore import Bound, bind, check
from weightkeeper.sockets import SUFFIX
from weightkeeper.vllm_api import BaseModelLoader, LoadConfig, ModelConfig, VllmConfig
from weightkeeper.vllm_messages import process_name

logger = vllm_api.init_logger("vllm.weightkeeper")

CAUSES = (CacheUnusableError, CheckpointError, CheckpointChangedError, MemoryKindError)
"""What sends an engine to the disk under `fallback: true`."""


class MappedLoader(BaseModelLoader):
    """Binds a model to weights that a keeper holds.

    Every cause for not doing so is found before the model is built: vLLM keeps layer names and meta objects from a
    build, so that a second one in the same process fails. Should the build itself fail, the keeper refuses the next
    start once, so that it goes to disk with that cause.
    """

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        self.options = read(load_config.model_loader_extra_config)
        self.name = default_name()

    def download_model(self, model_config: ModelConfig) -> None:
        self._disk().download_model(model_config)

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of this device that the keeper holds for this engine (vLLM from 0.32 asks)."""
        return budget.external_bytes(self.options, vllm_api.device_name(vllm_api.model_rank()))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """vLLM calls this to load again into a running model.

        Raises:
            UnsupportedError: always; the parameters lie in memory that is shared and read-only.
        """
        self._refuse_weights()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """The model with its weights, mapped or from disk.

        Raises:
            WeightkeeperError: the keeper cannot be used and `fallback` is false, or there is no room for the disk's.
        """
        phases = Phases()
        try:
            mapping = self._map(vllm_config, model_config, phases)
        except CAUSES as cause:
            if publisher.can_publish(self.options, cause, model_config):
                return self._load_and_publish(cause, vllm_config, model_config, prefix, phases)
            return self._fall_back(cause, vllm_config, model_config, prefix)
        return self._build(mapping, vllm_config, model_config, prefix, phases)

    def _map(self, vllm_config: VllmConfig, model_config: ModelConfig, phases: Phases) -> Mapping:
        check_supported(vllm_config, self.options)
        rank = vllm_api.model_rank()
        conditions = conditions_of(vllm_config, model_config, rank, self.options.disk_load_format)
        session = client.open_session(
            self.options.socket_dir,
            vllm_api.device_name(rank),
            name=self.name,
            connect_timeout_s=self.options.connect_timeout_s,
            state_timeout_s=self.options.state_timeout_s,
            wait=lambda text: logger.info("weightkeeper: waiting: %s", text),
            wait_for_keeper=not self.options.fallback,
            socket_path=self.options.socket_path,
        )
        try:
            phases.end("connect")
            checkpoint = open_checkpoint(vllm_api.checkpoint_path(model_config))
            receipts = session.receipts()
            content = digests(checkpoint, receipts)
            if content.hashed:
                names = ", ".join(content.hashed)
                logger.info("weightkeeper: hashed %s: the keeper's receipts do not cover them", names)
            fields = fingerprint.compose(content.by_name, conditions)
            phases.end("fingerprint")
            source = self._source(model_config, rank, receipts) if self.options.mode == "zero_copy" else None
            mapping = open_mapping(session, fields, self.options.mode, vllm_api.device_ordinal(), source)
            phases.end("map")
            return mapping
        except BaseException:
            session.close()
            raise

    def _source(self, model_config: ModelConfig, rank: int, receipts: tuple[Receipt, ...]) -> Source:
        path = self.options.socket_path
        return Source(
            socket_dir=os.path.dirname(path) if path else self.options.socket_dir,
            device=os.path.basename(path).removesuffix(SUFFIX) if path else vllm_api.device_name(rank),
            rank=rank,
            world_size=vllm_api.model_world_size(),
            model=model_config.model,
            receipts=receipts,
            name=self.name,
            connect_timeout_s=self.options.connect_timeout_s,
        )

    def _build(
        self, mapping: Mapping, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, phases: Phases
    ) -> nn.Module:
        share = self.options.mode == "zero_copy"
        device = vllm_api.load_device(vllm_config, self.load_config)
        try:
            model = vllm_api.build(vllm_config, model_config, prefix, torch.device("meta"))
            phases.end("skeleton")
            if mapping.layout.processed:
                adapt(model, mapping.layout)
            bound = bind(model, mapping.layout, mapping.whole, share=share)
            phases.end("bind")
            with self._processing(mapping):
                vllm_api.process_weights(model, model_config, device)
            if mapping.layout.processed:
                check(model, mapping.layout)
            if share:
                model.load_weights = self._refuse_weights
            phases.end("post-process")
            mark(process_name(), "map")
        except Exception as error:
            mapping.close()
            raise self._failed(error) from error
        mapping.attach(model, release=self.options.release)
        self._say(self.options.mode, bound, phases)
        return model.eval()

    @contextlib.contextmanager
    def _processing(self, mapping: Mapping) -> Iterator[None]:
        """How vLLM's step after loading has to run on what the keeper gave."""
        with contextlib.ExitStack() as stack:
            if mapping.layout.processed:
                stack.enter_context(vllm_api.already_processed())
            elif self.options.mode == "zero_copy":
                stack.enter_context(vllm_api.without_cpu_repacking())
            if self.options.mode == "zero_copy":
                stack.enter_context(ReadOnly(*mapping.extent))
            yield

    def _refuse_weights(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            "the weights are shared and read-only, so nothing can be loaded into them; "
            "load the keeper again (`make load`) and restart the engine, or use `mode: copy`"
        )

    def _say(self, how: str, bound: Bound, phases: Phases) -> None:
        milliseconds = phases.milliseconds("connect", "fingerprint", "map", "bind")
        logger.info(
            "weightkeeper: %s, mapped %d bytes and copied %d in %.1f ms (%s)",
            how, bound.mapped_bytes, bound.copied_bytes, milliseconds, phases,
        )  # fmt: skip
        self._report(
            Report(
                "mapped",
                self.name,
                mode=how,
                nbytes=bound.mapped_bytes + bound.copied_bytes,
                milliseconds=milliseconds,
                phases=phases.seconds,
            )
        )

    def _failed(self, error: Exception) -> WeightkeeperError:
        """Tell the keeper, so that the next start goes to disk, and say what happened."""
        code = error.code if isinstance(error, SlotsError) else BuildFailedError.code
        self._report(Report("build_failed", self.name, code=code, message=str(error)))
        return BuildFailedError(
            f"building the model on the keeper's weights failed (code={code}): {error}; "
            "the next start of an engine loads from disk, once"
        )

    def _fall_back(
        self, cause: WeightkeeperError, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> nn.Module:
        self._report(Report("fallback", self.name, code=cause.code, message=str(cause)))
        if not self.options.fallback:
            logger.error("weightkeeper: cannot use the keeper and fallback is off, code=%s: %s", cause.code, cause)
            raise cause
        self._check_room(cause, model_config)
        mark(process_name(), "map")
        logger.warning("weightkeeper: fallback to disk, code=%s: %s", cause.code, cause)
        started = time.monotonic()
        model = self._disk().load_model(vllm_config, model_config, prefix)
        logger.info("weightkeeper: loaded from disk in %.1f s", time.monotonic() - started)
        return model

    def _check_room(self, cause: WeightkeeperError, model_config: ModelConfig) -> None:
        if room.second_copy(cause):
            room.check(vllm_api.checkpoint_path(model_config), cause, vllm_api.free_device_bytes())

    def _load_and_publish(
        self, cause: WeightkeeperError, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, phases: Phases
    ) -> nn.Module:
        logger.info("weightkeeper: loading from disk for the keeper, code=%s: %s", cause.code, cause)
        self._check_room(cause, model_config)
        mark(process_name(), "map")
        made = publisher.load_and_publish(vllm_config, model_config, prefix, self.options, self.name, phases)
        mark(process_name(), "load")
        weakref.finalize(made.model, made.lease.close)
        made.model.load_weights = self._refuse_weights
        self._say("published" if made.is_taken else "packed", made.bound, phases)
        return made.model.eval()

    def _disk(self) -> BaseModelLoader:
        return vllm_api.disk_loader(self.load_config, self.options.disk_load_format, self.options.disk_extra_config)

    def _report(self, report: Report) -> None:
        try:
            client.report(self.options.socket_dir, report, timeout_s=self.options.connect_timeout_s)
        except WeightkeeperError as error:
            logger.debug("weightkeeper: the keeper was not told about this start: %s", error)


def check_supported(vllm_config: VllmConfig, options: Options) -> None:
    """Refuse options that would move or overwrite mapped weights.

    Raises:
        ConfigError: the option to change is named. It is a mistake, not a passing cause, so there is no fallback.
    """
    if options.mode != "zero_copy":
        return
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError("enable-sleep-mode moves weights, mode zero_copy shares them; remove one, or use mode: copy")
    if vllm_config.parallel_config.enable_eplb:
        raise ConfigError("enable-eplb rewrites experts, mode zero_copy shares them; remove one, or use mode: copy")
