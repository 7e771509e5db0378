"""`weightkeeper restart`: restart one engine now, and wait for it."""

import logging
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from weightkeeper.supervisor import place, project
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import PROJECT_LABEL, Engines
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.settings import project_options, state_option
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)


@click.command("restart")
@click.argument("service")
@click.option("--cause", default="by hand", show_default=True, help="For the log and the history.")
@project_options
@state_option
def command(service: str, cause: str, compose: Compose, state_dir: Path) -> None:
    """Restart the engine SERVICE and wait until it is healthy; exit 1 where it does not come up.

    Inside the supervisor's container the project is the one that this container belongs to.
    """
    stop = Stop()
    stop.on_signals()
    connection = Connection(stop)
    history = History(state_dir)
    history.check()
    engines = Engines(_project(compose, connection), connection, stop)
    engines.containers(service)  # refuse before saying that it is done
    log.info("restart %s: %s", service, cause)
    sys.exit(0 if Actor(engines, connection, history, stop).restart(service, cause, is_start=True) else 1)


def _project(compose: Compose, connection: Connection) -> str:
    """The project's name: as told, else of our own container, else as Compose says."""
    if compose.name:
        return compose.name
    context = click.get_current_context()
    if context.get_parameter_source("directory") is ParameterSource.DEFAULT:
        container = place.own(connection)
        if container and (name := container.labels.get(PROJECT_LABEL)):
            return name
    return project.read(compose).name
