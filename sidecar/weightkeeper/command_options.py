"""Options that several commands share."""

import click

from weightkeeper.sockets import DEFAULT_DIRECTORY

socket_dir = click.option(
    "--socket-dir",
    envvar="WEIGHTKEEPER_SOCKET_DIR",
    default=DEFAULT_DIRECTORY,
    show_default=True,
    type=click.Path(),
    help="Directory of the keeper's sockets. Also WEIGHTKEEPER_SOCKET_DIR.",
)

timeout = click.option(
    "--timeout",
    "timeout_s",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for the keeper to answer.",
)
