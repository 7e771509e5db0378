"""`weightkeeper room`: whether the weights that a config file names fit beside what is held."""

import click
import msgspec

from weightkeeper import engine_config
from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.errors import ConfigError
from weightkeeper.loader import kind_of_device
from weightkeeper.memory.available import Available, available
from weightkeeper.recovery import gpu

SEGMENT_BYTES = 1 << 30
"""While packing, about one segment is there twice."""

PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size")


@click.command(name="room")
@click.option(
    "--config",
    envvar="WEIGHTKEEPER_CONFIG",
    required=True,
    type=click.Path(),
    help="vLLM's config file, which names the model. Also WEIGHTKEEPER_CONFIG.",
)
def command(config: str) -> None:
    """Print as JSON how many bytes a load needs, by the checkpoint's headers, and how many are free here."""
    values = engine_config.read(config)
    size = open_checkpoint(engine_config.required(values, "model", config)).nbytes
    ranks = 1
    for option in PARALLEL:
        ranks *= _number(values.get(option, 1), option, config)
    room = available() if kind_of_device() == "cpu" else _on_gpus(ranks)
    needed = size + min(size, SEGMENT_BYTES * ranks)
    free = None if room is None else room.nbytes
    bound = f"{ranks} GPU(s) are not visible here, or NVML does not say what is free" if room is None else room.bound
    click.echo(msgspec.json.encode({"needed": needed, "free": free, "bound": bound}).decode())


def _number(value: object, option: str, config: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(f"{config}: {option} is {value!r}, expected a number from 1")


def _on_gpus(ranks: int) -> Available | None:
    """What fits on so many GPUs, evenly; the fullest one counts. None where NVML does not say."""
    free = gpu.free_bytes(ranks)
    return None if free is None else Available(free * ranks, f"on {ranks} GPU(s)")
