"""What a keeper holds, who maps it, and what engines said about it. No sockets and no processes: plain state."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightkeeper import fingerprint
from weightkeeper.errors import (
    BuildFailedError,
    CacheUnusableError,
    MismatchError,
    NotLoadedError,
    ProtocolError,
    ReleaseRefusedError,
    WeightkeeperError,
)
from weightkeeper.frames import close_all
from weightkeeper.holding import Generation, Part
from weightkeeper.protocol import Held, Lease, MapRequest, Report
from weightkeeper.quantities import bytes_text, printable
from weightkeeper.sockets import Peer

OTHER = "other"
"""How a fallback code that no error class has is counted, so that the table of counts stays small."""

MAX_NUMBER = 1 << 53
"""In a report: what a JSON number holds exactly everywhere; as bytes it is 9 PB, as milliseconds many lives."""

MAX_PHASES = 32

logger = logging.getLogger("weightkeeper.keeper")


@dataclass(frozen=True, slots=True)
class Granted:
    """An answer to a MapRequest. The descriptors are copies that the receiver closes."""

    lease: Lease
    grant: bytes
    descriptors: list[int]


class Store:
    """At most one generation that is offered, and those before it that engines still map.

    Attributes:
        changed: called when what is offered, or who maps it, is another.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.current: Generation | None = None
        self.fallbacks: dict[str, int] = {}
        self.last_report: Report | None = None
        self.last_report_at = 0.0
        self.released = False
        self._releasing: dict[int, Held] = {}
        self._leases: list[Lease] = []
        self._build_failed = ""

    @property
    def held(self) -> Held | None:
        return self.current.held if self.current else None

    @property
    def releasing(self) -> tuple[Held, ...]:
        return tuple(self._releasing.values())

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases)

    def part(self, device: str) -> Part:
        """What is offered on one device.

        Raises:
            NotLoadedError: nothing is.
        """
        part = self.current.parts.get(device) if self.current else None
        if part is None:
            raise NotLoadedError(f"no weights are held for {device}; `weightkeeper load` brings them back")
        return part

    def replace(self, generation: Generation) -> None:
        """Offer a complete generation instead of the current one, whose leases go on."""
        self._drop()
        self.current = generation
        self.released = False
        self._build_failed = ""

    def grant(self, device: str, name: str, peer: Peer, request: MapRequest) -> Granted:
        """A new lease on what is offered.

        Raises:
            BuildFailedError: the engine before could not build on it; said once.
            NotLoadedError: nothing is offered.
            MismatchError: the engine asks for other weights.
        """
        part = self.part(device)
        if request.mode != "verify":
            self._check(part, request)
        descriptors: list[int] = []
        try:
            for descriptor in part.descriptors:
                descriptors.append(os.dup(descriptor))
        except OSError as error:
            close_all(descriptors)
            raise CacheUnusableError(f"the keeper is out of descriptors: {error.strerror}") from error
        return Granted(self.begin(device, name, peer, request.mode), part.grant, descriptors)

    def begin(self, device: str, name: str, peer: Peer, mode: str) -> Lease:
        """A new lease on what is offered, for an engine that has it mapped or is about to."""
        number = self.current.number
        lease = Lease(name, device, mode, peer.uid, peer.pid, time.time(), number)
        self._leases.append(lease)
        self.changed()
        logger.info("lease begins: %s", _described(lease))
        return lease

    def _check(self, part: Part, request: MapRequest) -> None:
        if self._build_failed:
            cause, self._build_failed = self._build_failed, ""
            raise BuildFailedError(f"the last engine failed while it built on these weights: {cause}")
        if found := fingerprint.differences(part.fingerprint, request.fingerprint):
            raise MismatchError(found)

    def end(self, lease: Lease) -> None:
        """The engine is gone. Ending a lease twice does nothing."""
        position = next((index for index, other in enumerate(self._leases) if other is lease), None)
        if position is None:
            return
        del self._leases[position]
        self.changed()
        logger.info("lease ends: %s after %.1f s", _described(lease), time.time() - lease.since)
        if not self._leases_on(lease.generation):
            self._releasing.pop(lease.generation, None)

    def give_back(self, lease: Lease) -> str:
        """End the lease of an engine that has its own copy; the weights go if it was the last one on them."""
        self.end(lease)
        if self.current is None or self.current.number != lease.generation:
            return "these weights are no longer offered"
        others = self._engines_on(lease.generation)
        if others:
            return f"kept: {len(others)} other engine(s) map these weights"
        return self._release()

    def release(self, force: bool) -> str:
        """Stop offering the weights and let them go.

        Raises:
            ReleaseRefusedError: engines map them and `force` is not set; it names them.
        """
        leases = self._engines_on(self.current.number) if self.current else []
        if leases and not force:
            names = ", ".join(lease.name or f"an engine with pid {lease.pid}" for lease in leases)
            raise ReleaseRefusedError(
                f"{len(leases)} engine(s) map the weights: {names}; stop them first, or release with --force "
                "(memory then goes back when the last of them ends)"
            )
        return self._release()

    def report(self, report: Report) -> None:
        """Count and keep what an engine says of its start.

        Raises:
            ProtocolError: with numbers that cannot be.
        """
        numbers = (report.nbytes, report.milliseconds, *report.phases.values())
        if not all(0 <= number <= MAX_NUMBER for number in numbers):
            raise ProtocolError(f"a report with a number below 0 or above {MAX_NUMBER}")
        self.last_report = report = _shortened(report)
        self.last_report_at = time.time()
        name = report.name or "an engine"
        if report.event == "fallback":
            code = report.code if report.code in _codes() else OTHER
            self.fallbacks[code] = self.fallbacks.get(code, 0) + 1
            logger.warning("%s does not use these weights, code=%s: %s", name, code, report.message)
        elif report.event == "build_failed":
            self._build_failed = f"{name}: {report.message}"
            logger.warning("%s failed while it built its model on the weights: %s", name, report.message)
        else:
            size = bytes_text(report.nbytes)
            logger.info("%s: %s, %s in %.0f ms", name, report.mode, size, report.milliseconds)

    def names(self) -> tuple[str, ...]:
        """Of the engines that compute on what is offered; for people."""
        leases = self._engines_on(self.current.number) if self.current else []
        return tuple(lease.name for lease in leases if lease.mode == "zero_copy")

    def close(self) -> None:
        if self.current:
            self.current.close()
            self.current = None

    def _leases_on(self, number: int) -> list[Lease]:
        return [lease for lease in self._leases if lease.generation == number]

    def _engines_on(self, number: int) -> list[Lease]:
        return [lease for lease in self._leases_on(number) if lease.is_engine]

    def _release(self) -> str:
        held = self.held
        self._drop()
        self.released = True
        self.changed()
        if held is None:
            return "nothing was held"
        text = f"generation {held.generation}, {bytes_text(held.nbytes)}"
        if leases := self._engines_on(held.generation):
            text += f"; {len(leases)} engine(s) still map it"
        logger.info("released: %s", text)
        return text

    def _drop(self) -> None:
        """End offering the current generation. Mappings keep their memory, so the descriptors go at once."""
        if self.current is None:
            return
        held = self.current.held
        if self._leases_on(held.generation):
            self._releasing[held.generation] = held
        self.current.close()
        self.current = None


def _described(lease: Lease) -> str:
    name = lease.name or "an engine without a name"
    return f"{name} on {lease.device} ({lease.mode}, generation {lease.generation})"


def _shortened(report: Report) -> Report:
    """Without what would not fit into a line, so that what is kept stays small."""
    phases = list(report.phases.items())[:MAX_PHASES]
    return Report(
        event=report.event,
        name=printable(report.name),
        code=printable(report.code, 40),
        message=printable(report.message, 1000),
        mode=printable(report.mode, 40),
        nbytes=report.nbytes,
        milliseconds=report.milliseconds,
        phases={printable(name, 40): seconds for name, seconds in phases},
    )


def _codes() -> set[str]:
    found = [WeightkeeperError]
    for each in found:
        found += each.__subclasses__()
    return {each.code for each in found}
