"""`weightkeeper doctor`: what this machine can do with shared memory, why not, and what to do about it."""

import sys
from collections.abc import Iterator

import click
import msgspec

from weightkeeper import command_options, doctor
from weightkeeper.doctor_report import Facts, Gpu, Kind, Report
from weightkeeper.quantities import bytes_text


@click.command(name="doctor")
@command_options.socket_dir
@click.option(
    "--timeout",
    "timeout_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for each step of a trial.",
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(socket_dir: str, timeout_s: float, as_json: bool) -> None:
    """Try, between processes and in the namespaces of this one, whether memory can be shared as weightkeeper does it.

    Start it where the sidecar or an engine would run. Exits with 0 where the kind of memory that this machine needs
    works (GPU memory where a GPU is visible), with 1 where it does not.
    """
    progress = (lambda text: click.echo(f"doctor: {text}", err=True)) if sys.stderr.isatty() else (lambda _: None)
    report = doctor.examine(socket_dir, timeout_s, progress)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        click.echo("\n".join(lines(report)))
    sys.exit(0 if report.works else 1)


def lines(report: Report) -> Iterator[str]:
    """The report for people."""
    yield from (f"{name:<12} {text}" for name, text in _facts(report.facts))
    yield ""
    yield f"{'kind':<12} {'':<10} device"
    for kind in report.kinds:
        yield f"{kind.kind:<12} {kind.state:<10} {kind.device or '-'}"
        yield from (f"{'':<12} {text}" for text in _kind(kind))
    for warning in report.warnings:
        yield ""
        yield f"{'warning':<12} {warning.message}"
        yield f"{'':<12} → {warning.remedy}"
    yield ""
    yield f"{report.needed} is what this machine needs, and it {'works' if report.works else 'does not work'}"


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    wsl = ", WSL" if facts.wsl else ""
    container = "no container" if facts.container == "none" else f"container: {facts.container}"
    yield "machine", f"Linux {facts.kernel}{wsl}, uid {facts.uid}, {container}"
    yield "namespaces", ", ".join(f"{name} {state}" for name, state in facts.namespaces.items())
    memlock = "unlimited" if facts.memlock_bytes is None else bytes_text(facts.memlock_bytes)
    yield "limits", f"{bytes_text(facts.shm_bytes)} in /dev/shm, memlock {memlock}"
    cuda = f"CUDA {facts.cuda_version}" if facts.cuda_version else "no CUDA"
    yield "driver", f"{facts.driver_version or 'no NVIDIA kernel module'}, {cuda}"
    for gpu in facts.gpus:
        yield f"GPU {gpu.ordinal}", _gpu(gpu)
    for name, value in facts.visible.items():
        yield "environment", f"{name}={value}"
    if facts.device_files:
        yield "devices", ", ".join(f.path + ("" if f.usable else " (no access)") for f in facts.device_files)
    directory = facts.socket_directory
    state = "usable" if directory.usable else "not usable"
    yield "sockets", f"{directory.path}: {state}{f', {directory.message}' if directory.message else ''}"


def _gpu(gpu: Gpu) -> str:
    exports = "" if gpu.exports_descriptors else ", exports no descriptors"
    return (
        f"{gpu.name}, {gpu.uuid}, {bytes_text(gpu.nbytes)}, compute mode {gpu.compute_mode}, "
        f"MIG {gpu.mig}, persistence mode {gpu.persistence}{exports}"
    )


def _kind(kind: Kind) -> Iterator[str]:
    done = [f"{step.name} {step.milliseconds:.0f} ms" for step in kind.steps if step.ok]
    if done:
        yield ", ".join(done)
    yield from (f"writes: {s.detail}" for s in kind.steps if s.ok and s.name == "refuse writes")
    if kind.why:
        yield kind.why
    if kind.remedy:
        yield f"→ {kind.remedy}"
