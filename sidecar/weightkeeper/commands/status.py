"""`weightkeeper status`: everything a keeper knows of itself, as a table or as JSON."""

import time
from collections.abc import Iterator

import click
import msgspec

from weightkeeper import client, command_options
from weightkeeper.protocol import Held, Lease, Report, Status
from weightkeeper.quantities import bytes_text, one_line, printable, seconds_text

_SHOWN_FINGERPRINT = 16


@click.command(name="status")
@command_options.socket_dir
@command_options.timeout
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; times in seconds since the epoch.")
def command(socket_dir: str, timeout_s: float, as_json: bool) -> None:
    """Show what the keeper holds, who maps it, and how the last load and the last engine's start went."""
    state = client.status(socket_dir, timeout_s)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
        return
    name_before = ""
    for name, text in rows(state, time.time()):
        click.echo(f"{name if name != name_before else '':<12} {text}")
        name_before = name


def rows(state: Status, now: float) -> Iterator[tuple[str, str]]:
    """Name and text of each line; several lines of one name belong together."""
    yield "state", state.state
    if state.loading is not None:
        yield "loading", f"{client.loading_text(state)}, for {seconds_text(state.loading.seconds)}"
    if state.failure:
        for line in state.failure.splitlines():
            yield "last load", f"failed: {line}" if line == state.failure.splitlines()[0] else line
    if state.held is not None:
        yield "model", state.held.model
        yield "weights", _held(state.held, now)
        yield "fingerprint", state.held.fingerprint[:_SHOWN_FINGERPRINT]
        for device, nbytes in state.held.devices.items():
            yield "devices", f"{device}  {bytes_text(nbytes)}"
    for old in state.releasing:
        count = sum(lease.generation == old.generation for lease in state.leases)
        yield "releasing", f"generation {old.generation}, {bytes_text(old.nbytes)}, mapped by {count} engine(s)"
    engines = [lease for lease in state.leases if lease.is_engine]
    for lease in engines:
        yield "engines", _lease(lease, now)
    if not engines:
        yield "engines", "none"
    for lease in state.leases:
        if not lease.is_engine:
            yield "verifying", _lease(lease, now)
    if state.fallbacks:
        yield "fallbacks", ", ".join(f"{code} {count}" for code, count in sorted(state.fallbacks.items()))
    if state.last_report is not None:
        yield "last start", f"{_report(state.last_report)}, {seconds_text(now - state.last_report_at)} ago"
        if phases := state.last_report.phases:
            yield "last start", ", ".join(f"{printable(name)} {took:.2f} s" for name, took in phases.items())
    up = seconds_text(now - state.started_at)
    yield "keeper", f"{state.version}, pid {state.pid}, {bytes_text(state.own_bytes)} of its own, up {up}"
    yield "config", state.config or "none"


def _held(held: Held, now: float) -> str:
    return (
        f"{bytes_text(held.nbytes)} of {held.kind} memory, {held.tensors} tensors, generation {held.generation}, "
        f"{_origin(held)}, {seconds_text(now - held.loaded_at)} ago"
    )


def _origin(held: Held) -> str:
    """How the keeper came by it: `loaded in 3.2 s`, or `adopted from vllm-a`."""
    return f"adopted from {held.adopted_from}" if held.adopted_from else f"loaded in {held.load_seconds:.1f} s"


def _lease(lease: Lease, now: float) -> str:
    who = f"pid {lease.pid}, " if lease.pid else ""
    return (
        f"{lease.name or 'without a name'}  {lease.device}  {lease.mode}, generation {lease.generation}, "
        f"{who}uid {lease.uid}, for {seconds_text(now - lease.since)}"
    )


def _report(report: Report) -> str:
    name, message = printable(report.name) or "an engine", printable(one_line(report.message), 400)
    if report.event == "mapped":
        return f"{name}: {printable(report.mode)}, {bytes_text(report.nbytes)} in {report.milliseconds:.0f} ms"
    return f"{name}: {report.event}, code={printable(report.code)}: {message}"
