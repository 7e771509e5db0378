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

metrics_port = click.option(
    "--metrics-port",
    envvar="WEIGHTKEEPER_METRICS_PORT",
    type=click.IntRange(0, 65535),
    help="Answer Prometheus there; else there are no metrics. Also WEIGHTKEEPER_METRICS_PORT.",
)

metrics_host = click.option(
    "--metrics-host",
    envvar="WEIGHTKEEPER_METRICS_HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address for --metrics-port. Also WEIGHTKEEPER_METRICS_HOST.",
)
