"""`weightkeeper supervise`: apply edits of the engines' configuration."""

from pathlib import Path

import click

from weightkeeper import command_options
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.loop import Settings, Supervisor
from weightkeeper.supervisor.settings import project_options, state_option
from weightkeeper.supervisor.stop import Stop
from weightkeeper.supervisor.watch import Timing


@click.command("supervise")
@project_options
@state_option
@click.option("--settle", type=click.FloatRange(0.05, 60), default=0.5, show_default=True,
              help="Seconds that an edited file has to rest.")  # fmt: skip
@click.option("--check", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True,
              help="Seconds between looks at the files where no event arrives; an edit there is acted upon up to 1.5 s "
              "later.")  # fmt: skip
@click.option("--poll", is_flag=True,
              help="Use no file events and look every 0.5 s: for NFS, 9p, virtiofs and mounts of desktop "
              "machines.")  # fmt: skip
@command_options.metrics_port
@command_options.metrics_host
def command(
    compose: Compose, state_dir: Path, settle: float, check: float, poll: bool, metrics_port: int | None,
    metrics_host: str,
) -> None:  # fmt: skip
    """Reload, restart or recreate the labelled services of a compose project when their configuration changes.

    Compose reads the project with a clean environment: only .env counts, not what this program was started with.
    """
    stop = Stop()
    stop.on_signals()
    timing = Timing(settle=settle, bound=max(5.0, 10 * settle), check=check, is_polling=poll)
    metrics = (metrics_host, metrics_port) if metrics_port is not None else None
    Supervisor(Settings(compose, state_dir, timing, metrics), stop).run()
