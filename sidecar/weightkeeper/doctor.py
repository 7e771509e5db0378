"""Tries what this machine can do with shared memory, between processes, in the namespaces that it is started in.

It plays the keeper: it holds descriptors that one process made, and hands them to others. What may crash or hang, a
driver or a forbidden write, does so in those.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial

from weightkeeper import __version__, memory
from weightkeeper.doctor_causes import cause, warnings
from weightkeeper.doctor_facts import collect
from weightkeeper.doctor_process import TrialProcess
from weightkeeper.doctor_report import SCHEMA, Facts, Gpu, Kind, Report, Step
from weightkeeper.errors import TrialError, WeightkeeperError
from weightkeeper.frames import close_all
from weightkeeper.memory import MemoryKind


def examine(socket_dir: str, seconds: float, say: Callable[[str], None] = lambda _: None) -> Report:
    """Everything, with every process ended at the end.

    Args:
        socket_dir: of the keeper, which is looked at and not touched.
        seconds: for each answer of a process.
        say: told what is being tried.
    """
    say("asking the driver")
    facts = collect(socket_dir, seconds)
    kinds = [_tried("host", None, facts, seconds, say)]
    kinds += [_tried("cuda-vmm", gpu, facts, seconds, say) for gpu in facts.gpus]
    if not facts.gpus:
        found = cause(facts.cuda_error, facts.cuda_number, facts, None)
        kinds.append(Kind("cuda-vmm", "", "does not", found.code, facts.cuda_error, found.remedy))
    kinds.append(Kind("cuda-ipc", "", "not used", why="this version of weightkeeper does not use it"))
    needed = "cuda-vmm" if facts.gpus else "host"
    works = all(kind.state == "works" for kind in kinds if kind.kind == needed)
    return Report(SCHEMA, __version__, works, needed, tuple(kinds), tuple(warnings(facts)), facts)


def _tried(kind: MemoryKind, gpu: Gpu | None, facts: Facts, seconds: float, say: Callable[[str], None]) -> Kind:
    device = gpu.uuid if gpu else ""
    say(f"trying {kind} {device}".rstrip())
    trial = _Trial(kind, gpu.ordinal if gpu else 0, seconds)
    try:
        trial.run()
    except (WeightkeeperError, OSError) as error:
        found = cause(str(error), getattr(error, "number", 0), facts, gpu)
        failed = [step.name for step in trial.steps if not step.ok] or ["start"]
        why = f"{failed[0]}: {error}"
        return Kind(kind, device, "does not", found.code, why, found.remedy, tuple(trial.steps))
    return Kind(kind, device, "works", steps=tuple(trial.steps))


class _Trial:
    """The steps of one kind on one device.

    Attributes:
        steps: done so far; the last one is not ok where `run` raised.
    """

    def __init__(self, kind: MemoryKind, ordinal: int, seconds: float):
        self.steps: list[Step] = []
        self._start = partial(TrialProcess, kind=kind, ordinal=ordinal, secret=secrets.token_hex(8), seconds=seconds)
        self._check = memory.checker_of(kind)

    def run(self) -> None:
        """All steps.

        Raises:
            TrialError: a process crashed, was silent, or reported an error, or a write went through.
            WeightkeeperError: what a keeper does with the descriptors failed.
        """
        before = len(os.listdir("/proc/self/fd"))
        descriptors: list[int] = []
        try:
            with self._start("make") as maker:
                with self._step("make"):
                    maker.expect("start", "create")
                with self._step("export"):
                    answer = maker.expect("export")
                    descriptors, sizes = maker.taken, answer["sizes"]
                self._share(descriptors, sizes)
                self._refuse(descriptors, sizes)
                with self._step("outlive"):
                    maker.tell({})
                    maker.finish("close")
                    with self._start("read") as reader:
                        reader.tell({"sizes": sizes}, descriptors)
                        reader.finish("start", "map", "read", "close")
        finally:
            close_all(descriptors)
        with self._step("clean up"):
            left = len(os.listdir("/proc/self/fd")) - before
            if left:
                raise TrialError(f"{left} descriptors are left open")

    def _share(self, descriptors: list[int], sizes: list[int]) -> None:
        """Read in a second process while the first one lives."""
        with self._start("read") as reader:
            with self._step("hand over"):
                for descriptor, nbytes in zip(descriptors, sizes, strict=True):
                    self._check(descriptor, nbytes)
                reader.expect("start")
                reader.tell({"sizes": sizes}, descriptors)
            with self._step("map"):
                reader.expect("map")
            with self._step("read"):
                reader.expect("read")
                reader.finish("close")

    def _refuse(self, descriptors: list[int], sizes: list[int]) -> None:
        """Write in a third process, which has to die of it or get an error."""
        with self._step("refuse writes") as detail, self._start("write") as writer:
            writer.tell({"sizes": sizes}, descriptors)
            writer.expect("start", "map")
            try:
                answer = writer.expect("write")
            except TrialError as error:
                if not error.is_fault:
                    raise
                detail.append(str(error))
                return
            if answer["changed"]:
                raise TrialError("a write into memory that is mapped read-only went through")
            detail.append("no error, and no effect")

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[list[str]]:
        """Record a step; what the body appends to the list is its detail."""
        started = time.monotonic()
        detail: list[str] = []
        is_done = False
        try:
            yield detail
            is_done = True
        except (WeightkeeperError, OSError) as error:
            detail.append(str(error))
            raise
        finally:
            taken = round((time.monotonic() - started) * 1000, 1)
            self.steps.append(Step(name, is_done, "; ".join(detail), taken))
