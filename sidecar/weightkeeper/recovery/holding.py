"""What holds weights in one run: each holder made when it is first needed, or several of them at once."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper.recovery import gpu, holders
from weightkeeper.recovery.gpu import Gpu
from weightkeeper.recovery.holders import Daemon, Holder, Keeper
from weightkeeper.recovery.result import Held


class Holding:
    """The holders of one run.

    Attributes:
        held: name of a holder → what it cost when it came up first.

    Args:
        options: vLLM's, with `model`.
        out: directory for configurations and logs.
        sockets: directory with a short path.
        gpus: that engines use.
        limit_s: for the start of each.
    """

    def __init__(self, options: dict[str, Any], out: Path, sockets: Path, gpus: list[Gpu], limit_s: float):
        self.held: dict[str, Held] = {}
        self._options = options
        self._out = out
        self._sockets = sockets
        self._gpus = gpus
        self._limit_s = limit_s
        self._living: dict[type[Holder], Holder] = {}
        self._is_measured = True

    def get(self, kind: type[Holder]) -> Holder:
        """One that holds the weights; the one from before, if it lives.

        Raises:
            ServerStartError: it does not come up.
        """
        known = self._living.get(kind)
        if known is not None and known.is_alive:
            return known
        if known is not None:
            known.close()
        holder = self._living[kind] = self._made(kind, self._gpus)
        try:
            held = holder.wait(self._limit_s)
        except BaseException:
            del self._living[kind]
            holder.close()
            raise
        self.held.setdefault(holder.name, held)
        return holder

    def begin(self, kinds: Sequence[type[Holder]]) -> None:
        """Start several at once, beside whatever else starts; `wait` is for all of them."""
        for kind in kinds:
            self._living[kind] = self._made(kind, [])
        self._is_measured = False

    def wait(self) -> None:
        """Until all that were begun hold the weights.

        Raises:
            ServerStartError: one ended, failed, or takes too long.
        """
        while not all([holder.look(self._limit_s) for holder in self._living.values()]):
            time.sleep(holders.POLL_SECONDS)
        for holder in self._living.values():
            self.held[holder.name] = holder.wait(self._limit_s)

    def measure(self, base: int) -> None:
        """Find out what holders that came up beside others have on the devices; now no engine runs.

        One that tells its weights has no more than these (tests see to that); the rest belongs to the other.

        Args:
            base: bytes that were in use before all of this.
        """
        if self._is_measured or not self._gpus:
            return
        self._is_measured = True
        rest = gpu.settled_bytes(self._gpus) - base
        silent = [held for held in self.held.values() if held.weight_bytes is None] or list(self.held.values())
        if len(silent) == 1:
            others = sum(held.weight_bytes or 0 for held in self.held.values() if held is not silent[0])
            self.held[silent[0].name] = msgspec.structs.replace(silent[0], device_bytes=rest - others)

    @property
    def nbytes(self) -> int:
        """Memory of the holders that are there."""
        known = [self.held.get(holder.name) for holder in self._living.values()]
        return sum(_bytes_of(held) for held in known if held is not None)

    def close(self) -> None:
        """End all of them, whatever fails on the way."""
        with contextlib.ExitStack() as stack:
            for holder in self._living.values():
                stack.callback(holder.close)

    def _made(self, kind: type[Holder], gpus: list[Gpu]) -> Holder:
        if kind is Keeper:
            return Keeper(self._options | {"load-format": "weightkeeper"}, self._out, self._sockets / "k", gpus)
        return Daemon(self._options, self._out, self._sockets / "d", gpus)


def _bytes_of(held: Held) -> int:
    return held.device_bytes if held.device_bytes is not None else held.weight_bytes or 0
