"""`weightkeeper engine-reload`: have a launcher read its configuration again."""

import click

from weightkeeper.commands import engine_options
from weightkeeper.launcher import client
from weightkeeper.launcher.settings import checked_name


@click.command(name="engine-reload")
@engine_options.name
@engine_options.socket_dir
@engine_options.cause
@click.option("--last-good", "is_last_good", is_flag=True, help="Serve what was healthy last, whatever the file says.")
@engine_options.timeout(client.RELOAD_SECONDS, "for the check of the configuration")
def command(engine: str | None, socket_dir: str, cause: str, is_last_good: bool, timeout_s: float) -> None:
    """Read an engine's configuration again and replace its server where it passes the check.

    Exits with 2 and the reason where it is refused; the server then goes on as it is.
    """
    click.echo(client.reload(socket_dir, checked_name(engine), cause, timeout_s, is_last_good))
