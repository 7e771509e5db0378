"""`weightkeeper restart`: a new server for one engine now, and wait for it."""

import logging
import sys
from pathlib import Path

import click

from weightkeeper.supervisor import arguments, place, programs, project
from weightkeeper.supervisor.act import Actor
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.engines import PROJECT_LABEL, Engines
from weightkeeper.supervisor.history import History
from weightkeeper.supervisor.plan import Reload, Restart
from weightkeeper.supervisor.settings import is_here, project_options, state_option
from weightkeeper.supervisor.stop import Stop

log = logging.getLogger(__name__)


@click.command("restart")
@click.argument("service")
@click.option("--cause", default="by hand", show_default=True, help="For the log and the history.")
@click.option(
    "--container", "is_container", is_flag=True, help="Restart the container, also where a launcher is in it."
)
@project_options
@state_option
def command(service: str, cause: str, is_container: bool, compose: Compose, state_dir: Path) -> None:
    """Give the engine SERVICE a new server and wait until it is healthy; exit 1 where it does not come up.

    A launcher reads its configuration again and replaces its server; where there is none, the container is restarted.
    Inside the supervisor's container the project is the one that this container belongs to.
    """
    stop = Stop()
    stop.on_signals()
    connection = Connection(stop)
    history = History(state_dir)
    history.check()
    engines = Engines(_project(compose, connection), connection, stop)
    [container, *_] = engines.containers(service)  # refuse before saying that it is done
    config = container.attrs["Config"]
    words = arguments.words({"entrypoint": config.get("Entrypoint"), "command": config.get("Cmd")})
    launcher = programs.find(words, "engine")
    is_reload = launcher is not None and not launcher.has("--no-control") and not is_container
    action = Reload(service, cause) if is_reload else Restart(service, cause)
    log.info("%s", action)
    actor = Actor(engines, connection, history, stop)
    ended = actor.reload(action, launcher, is_rolled_back=False) if is_reload else actor.restart(action, is_start=True)
    sys.exit(0 if ended == "good" else 1)


def _project(compose: Compose, connection: Connection) -> str:
    """The project's name: as told, else of our own container, else as Compose says."""
    if compose.name:
        return compose.name
    container = place.own(connection) if is_here() else None
    if container and (name := container.labels.get(PROJECT_LABEL)):
        return name
    return project.read(compose).name
