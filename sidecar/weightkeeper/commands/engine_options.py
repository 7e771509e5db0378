"""Options of the commands that run a launcher or talk to one."""

import click

from weightkeeper.sockets import DEFAULT_DIRECTORY

name = click.option(
    "--name",
    "engine",
    envvar="WEIGHTKEEPER_ENGINE",
    help="Of the engine: of its control socket and its history. Also WEIGHTKEEPER_ENGINE; else the host's name.",
)

socket_dir = click.option(
    "--socket-dir",
    envvar="WEIGHTKEEPER_SOCKET_DIR",
    default=DEFAULT_DIRECTORY,
    show_default=True,
    type=click.Path(),
    help="Directory in which engine-NAME/control.sock lies. Also WEIGHTKEEPER_SOCKET_DIR.",
)


def timeout(seconds: float, what: str):
    """`--timeout`, with its default."""
    kind = click.FloatRange(min=0, min_open=True)
    return click.option(
        "--timeout", "timeout_s", default=seconds, show_default=True, type=kind, help=f"Seconds {what}."
    )


cause = click.option("--cause", default="by hand", show_default=True, help="For the log and the history.")
