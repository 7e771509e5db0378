"""`weightkeeper verify`: whether what the keeper holds is still what was loaded."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from weightkeeper import client, command_options
from weightkeeper.errors import NotLoadedError
from weightkeeper.protocol import Status
from weightkeeper.quantities import bytes_text, printable

if TYPE_CHECKING:
    from weightkeeper.verify import Verified


@click.command(name="verify")
@command_options.socket_dir
@command_options.timeout
@click.option("--device", "chosen", multiple=True, help="A GPU's UUID or cpu-RANK, as `status` shows it; default: all.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(socket_dir: str, timeout_s: float, chosen: tuple[str, ...], as_json: bool) -> None:
    """Read all weights that the keeper holds, and compare them with the digests that were taken at load.

    Exits with 1 where bytes differ or cannot be checked, and names each tensor. Engines go on meanwhile.
    """
    devices = _devices(client.status(socket_dir, timeout_s), chosen)
    from weightkeeper.verify import verify  # takes torch

    found = []
    for device in devices:
        found.append(verify(socket_dir, device, timeout_s, _Progress(device)))
        if not as_json:
            click.echo("\n".join(lines(found[-1])))
    is_same = all(each.is_same for each in found)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"same": is_same, "devices": found}), indent=2).decode())
    sys.exit(0 if is_same else 1)


def _devices(state: Status, chosen: tuple[str, ...]) -> list[str]:
    if state.held is None:
        raise NotLoadedError(f"the keeper holds no weights (it is {state.state}), so there is nothing to verify")
    held = list(state.held.devices)
    unknown = [device for device in chosen if device not in held]
    if unknown:
        raise click.BadParameter(f"nothing is held on {', '.join(unknown)}; held: {', '.join(held)}")
    return list(dict.fromkeys(chosen)) or held


def lines(found: "Verified") -> Iterator[str]:
    """The result for people: one line, and one for each tensor at fault."""
    size, speed = bytes_text(found.nbytes), bytes_text(found.nbytes / max(found.seconds, 1e-9))
    counts = f"{size} in {found.storages} storages, {found.seconds:.2f} s, {speed}/s"
    if found.is_same:
        yield f"{found.device}: as it was loaded ({counts})"
    elif not found.storages:
        yield f"{found.device}: cannot be verified: its loader took no digests; `weightkeeper load` takes them"
        return
    else:
        yield f"{found.device}: {len(found.differences)} of {found.storages} storages differ ({counts})"
    for each in found.differences:
        names = ", ".join(printable(path, 200) for path in each.paths)
        yield f"  {names}: {each.nbytes} bytes at {each.offset}: digest {each.expected} at load, {each.found} now"
    for path in found.unchecked:
        yield f"  {printable(path, 200)}: no digest was taken"


class _Progress:
    """A line on stderr that grows, where people look on."""

    def __init__(self, device: str):
        self._device = device
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // max(total, 1)
        if percent == self._shown or not sys.stderr.isatty():
            return
        self._shown = percent
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{self._device}: {percent} % of {bytes_text(total)}{end}")
        sys.stderr.flush()
