"""One rank's weights through vLLM: build, read, pack, publish. Importing this imports vLLM."""

import os
from collections.abc import Callable
from pathlib import Path

from weightkeeper import fingerprint, verified, vllm_api
from weightkeeper.checkpoint import Checkpoint
from weightkeeper.conditions import conditions_of
from weightkeeper.errors import ConfigError
from weightkeeper.options import Options
from weightkeeper.packed import Progress, load_packed
from weightkeeper.protocol import Publish, Receipt


class RankLoader:
    """Loads ranks of the model that vLLM's config file names; one a process.

    Args:
        config: path of the file.
        receipts: of the checkpoint's files, taken before; they have to be true still when vLLM has read them.
        scratch: directory in which the ranks of one load meet.

    Attributes:
        world_size: number of ranks.

    Raises:
        WeightkeeperError: vLLM refuses the options, or the quantization is not verified.
    """

    def __init__(
        self, config: str, options: Options, checkpoint: Checkpoint, receipts: tuple[Receipt, ...], scratch: Path
    ):
        self._config = _vllm_config(config)
        self._options = options
        self._checkpoint = checkpoint
        self._receipts = receipts
        self._scratch = scratch
        self._on_cpu = vllm_api.is_cpu()
        verified.check(self._config.model_config.quantization, "cpu" if self._on_cpu else "cuda")
        parallel = self._config.parallel_config
        self.world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if parallel.data_parallel_size > 1:
            raise ConfigError(f"{config}: data-parallel-size {parallel.data_parallel_size} is not supported yet; use 1")

    def load(self, rank: int, progress: Progress, publish: Callable[[Publish, list[int]], None]) -> None:
        """Load one rank and publish it.

        Args:
            rank: 0 ≤ rank < world_size; all ranks have to be loading at the same time.
            progress: told (stage, bytes done, bytes in all).
            publish: takes the message and the descriptors that go with it; they are closed afterwards.

        Raises:
            WeightkeeperError: the model's layers, its files or the memory are refused.
        """
        model_config = self._config.model_config
        if not self._on_cpu:
            vllm_api.prepare_device(rank, vllm_api.load_device(self._config, self._config.load_config))
        conditions = conditions_of(self._config, model_config, rank, self._options.disk_load_format)
        with vllm_api.process_group(self._config, rank, f"file://{self._scratch}/ranks"):
            packed = load_packed(
                self._config, model_config, self._options, self._checkpoint, lambda: self._receipts, progress
            )
            name = vllm_api.device_name(rank)
        arena = packed.arena
        arena.seal()
        message = Publish(
            device=name,
            rank=rank,
            world_size=self.world_size,
            model=model_config.model,
            fingerprint=fingerprint.compose({r.name: r.blake3 for r in self._receipts}, conditions),
            receipts=self._receipts,
            kind=packed.memory.kind,
            sizes=arena.sizes,
            layout=packed.layout,
        )
        descriptors = arena.export()
        try:
            publish(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            arena.close()


def _vllm_config(config: str) -> vllm_api.VllmConfig:
    try:
        return vllm_api.engine_config(["--config", config])
    except SystemExit as error:
        raise ConfigError(f"{config}: vLLM does not accept these options; its own message is in the log") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{config}: vLLM does not accept these options: {error}") from error
