"""`weightkeeper engine-status`: everything a launcher knows of its engine, as a table or as JSON."""

import time
from collections.abc import Iterator

import click
import msgspec

from weightkeeper.commands import engine_options
from weightkeeper.launcher import client, timeline
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.launcher.settings import checked_name
from weightkeeper.quantities import one_line, printable, seconds_text


@click.command(name="engine-status")
@engine_options.name
@engine_options.socket_dir
@engine_options.timeout(5.0, "for the launcher to answer")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; times in seconds since the epoch.")
def command(engine: str | None, socket_dir: str, timeout_s: float, as_json: bool) -> None:
    """Show an engine's state, its last start and its last end."""
    status = client.status(socket_dir, checked_name(engine), timeout_s)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    for name, text in rows(status, time.time()):
        click.echo(f"{name:<12} {text}")


def rows(status: EngineStatus, now: float) -> Iterator[tuple[str, str]]:
    """Name and text of each line."""
    delay = f", next start in {seconds_text(status.next_start_at - now)}" if status.next_start_at else ""
    cause = f" ({printable(one_line(status.cause), 400)})" if status.cause else ""
    yield "state", f"{status.state} for {seconds_text(now - status.since)}{cause}{delay}"
    if status.pid:
        yield "server", f"pid {status.pid}, generation {status.generation}, {len(status.processes)} process(es)"
    yield "model", status.model or "not said"
    yield "address", status.address or "not known yet"
    yield "config", status.config or "none"
    if status.phases:
        yield "last start", f"{status.start_seconds:.2f} s: {timeline.text(status.phases)}"
    if (last := status.last_exit) is not None:
        how = f"signal {last.signal}" if last.signal is not None else f"exit code {last.code}"
        ago = seconds_text(now - last.at)
        yield "last end", f"generation {last.generation}, {how}, {ago} ago ({printable(one_line(last.cause), 400)})"
    if status.restarts:
        yield "restarts", ", ".join(f"{kind} {count}" for kind, count in sorted(status.restarts.items()))
    if status.refusal:
        yield "refused", f"{seconds_text(now - status.refused_at)} ago: {printable(one_line(status.refusal), 400)}"
    if status.prefork:
        yield "template", f"pid {status.template}, {status.threads} thread"
    else:
        yield "template", f"none: {status.why_plain}" if status.why_plain else "none yet"
    warden = f", warden pid {status.warden}" if status.warden else ""
    yield "launcher", f"{status.version}, pid {status.launcher}, up {seconds_text(now - status.started_at)}{warden}"
