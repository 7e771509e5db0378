"""`weightkeeper engine-restart`: have a launcher replace its server."""

import click

from weightkeeper.commands import engine_options
from weightkeeper.launcher import client
from weightkeeper.launcher.settings import checked_name


@click.command(name="engine-restart")
@engine_options.name
@engine_options.socket_dir
@engine_options.cause
@engine_options.timeout(5.0, "for the launcher to answer")
def command(engine: str | None, socket_dir: str, cause: str, timeout_s: float) -> None:
    """Replace an engine's server by a new one with the same configuration, at once."""
    click.echo(client.restart(socket_dir, checked_name(engine), cause, timeout_s))
