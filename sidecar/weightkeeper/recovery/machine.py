"""What a result was measured on."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from weightkeeper import __version__
from weightkeeper.recovery import gpu, page_cache, subject

PACKAGES = ("vllm", "torch", "transformers", "cuda-bindings", "flashinfer-python", "openai")


def facts(files: Sequence[Path] = ()) -> subject.Machine:
    """Processor, memory, versions, GPUs, and how fast these files can be read."""
    gpus = gpu.Gpu.visible()
    disk, cache = page_cache.speeds(files) if files else (None, None)
    return subject.Machine(
        processor=_field("/proc/cpuinfo", "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions(),
        gpus=tuple(subject.Gpu(each.name, each.uuid, each.total_bytes) for each in gpus),
        driver=gpus[0].driver if gpus else "",
        disk_bytes_s=disk,
        page_cache_bytes_s=cache,
    )


def versions() -> dict[str, str]:
    found = {"weightkeeper": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def said(machine: subject.Machine) -> str:
    """The facts in one line, for people."""
    gpus = ", ".join(f"{each.name} ({each.memory_bytes / 2**30:.0f} GiB)" for each in machine.gpus) or "no GPU"
    driver = f", driver {machine.driver}" if machine.driver else ""
    names = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{gpus}{driver}, {machine.cores} cores of {machine.processor}, Linux {machine.kernel}, "
        f"Python {machine.python}, {names}"
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"
