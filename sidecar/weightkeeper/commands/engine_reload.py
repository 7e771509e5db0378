"""`weightkeeper engine-reload`: have a launcher read its configuration again."""

import click

from weightkeeper.commands import engine_options
from weightkeeper.errors import ConfigError
from weightkeeper.launcher import client
from weightkeeper.launcher.settings import checked_name


@click.command(name="engine-reload")
@engine_options.name
@engine_options.socket_dir
@engine_options.cause
@click.option("--last-good", "is_last_good", is_flag=True, help="Serve what was healthy last, whatever the file says.")
@click.option("--check", "is_check", is_flag=True, help="Say whether it would pass, and leave the server alone.")
@engine_options.timeout(client.RELOAD_SECONDS, "for the check of the configuration")
def command(
    engine: str | None, socket_dir: str, cause: str, is_last_good: bool, is_check: bool, timeout_s: float
) -> None:
    """Read an engine's configuration again and replace its server where it passes the check.

    Exits with 2 and the reason where it is refused; the server then goes on as it is.
    """
    if is_check and is_last_good:
        raise ConfigError("--check and --last-good cannot be given together: the last good one needs no check")
    name = checked_name(engine)
    if is_check:
        click.echo(client.check(socket_dir, name, cause, timeout_s))
    else:
        click.echo(client.reload(socket_dir, name, cause, timeout_s, is_last_good))
