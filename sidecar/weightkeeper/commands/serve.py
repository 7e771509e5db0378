"""`weightkeeper serve`: the keeper."""

import contextlib
import resource
import shlex

import anyio
import click

from weightkeeper import adopting, client, command_options, keeper, metrics
from weightkeeper.sockets import ALLOW_UID
from weightkeeper.supervisor import options


@click.command(name="serve")
@command_options.socket_dir
@click.option(
    "--config",
    envvar="WEIGHTKEEPER_CONFIG",
    type=click.Path(),
    help="vLLM's config file, which names the model. Without it nothing is loaded. Also WEIGHTKEEPER_CONFIG.",
)
@click.option(
    "--allow-uid",
    "allowed_uids",
    envvar=ALLOW_UID,
    multiple=True,
    type=click.IntRange(min=0),
    help="A user besides our own who may connect. Can be given several times.",
)
@click.option(
    "--poll-seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="After a failed load: between two looks whether the config or the model's files changed.",
)
@click.option(
    "--publish/--no-publish",
    "takes_publications",
    default=True,
    show_default=True,
    help="Whether engines of an allowed user may hand over the weights that they loaded.",
)
@click.option(
    "--ranks-seconds",
    default=keeper.RANKS_SECONDS,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="For a model that engines publish: from its first rank to its last.",
)
@click.option(
    "--adopt-seconds",
    default=adopting.ADOPT_SECONDS,
    show_default=True,
    type=click.FloatRange(min=0),
    help="At the start, where engines outlived the keeper before: to wait for the weights that they map, "
    "before they are loaded. An engine looks for a keeper every 5 s.",
)
@command_options.metrics_port
@command_options.metrics_host
@click.option("--loader", envvar="WEIGHTKEEPER_LOADER", hidden=True, help="Command in place of our own loader.")
def command(
    socket_dir: str,
    config: str | None,
    allowed_uids: tuple[int, ...],
    poll_seconds: float,
    takes_publications: bool,
    ranks_seconds: float,
    adopt_seconds: float,
    metrics_port: int | None,
    metrics_host: str,
    loader: str | None,
) -> None:
    """Hold weights and serve them to engines, until SIGTERM."""
    # Each lease being handed out takes descriptors for a moment, and each connection one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = keeper.Settings(
        socket_dir=socket_dir,
        config=config,
        allowed_uids=frozenset(allowed_uids),
        loader=tuple(shlex.split(loader)) if loader else keeper.LOADER,
        poll_seconds=poll_seconds,
        takes_publications=takes_publications,
        ranks_seconds=ranks_seconds,
        adopt_seconds=adopt_seconds,
        shaping=options.shaping,
    )
    if metrics_port is not None:
        # A thread asks over the control socket, as `weightkeeper status` does, and so reads nothing half changed.
        collector = metrics.KeeperCollector(lambda: client.status(socket_dir))
        metrics.serve(metrics.registry(collector), metrics_host, metrics_port)
    anyio.run(keeper.serve, settings)
