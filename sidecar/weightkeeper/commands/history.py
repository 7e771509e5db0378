"""`weightkeeper history`: what was done to the engines, why, and what became of it."""

from pathlib import Path

import click
import msgspec

from weightkeeper.supervisor.history import History, Record
from weightkeeper.supervisor.settings import state_option


@click.command("history")
@click.option("-n", "count", type=click.IntRange(1), default=20, show_default=True, help="The last N records.")
@click.option("--json", "is_json", is_flag=True, help="JSON lines, one a record.")
@state_option
def command(count: int, is_json: bool, state_dir: Path) -> None:
    """Print restarts, recreations and crashes of the engines, the latest one last."""
    records = History(state_dir).read()[-count:]
    for record in records:
        click.echo(msgspec.json.encode(record).decode() if is_json else line(record))
    if not records and not is_json:
        click.echo("nothing yet")


def line(record: Record) -> str:
    """One record for people."""
    detail = f" {record.detail}" if record.detail else ""
    seconds = f" after {record.seconds:.1f} s" if record.seconds else ""
    return f"{record.time}  {record.action} {record.service}: {record.cause} — {record.result}{detail}{seconds}"
