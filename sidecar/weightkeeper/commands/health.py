"""`weightkeeper health`: for a container's health check. The answer comes from the keeper, never from a file."""

import sys

import click

from weightkeeper import client, command_options
from weightkeeper.errors import WeightkeeperError
from weightkeeper.protocol import Status
from weightkeeper.quantities import bytes_text


@click.command(name="health")
@command_options.socket_dir
@command_options.timeout
def command(socket_dir: str, timeout_s: float) -> None:
    """Exit with 0 when the keeper serves as it was told to, with 1 and the reason when it does not (yet).

    A keeper whose weights were released, or that was never told to load any, is healthy.
    """
    try:
        state = client.status(socket_dir, timeout_s)
    except WeightkeeperError as error:
        click.echo(f"unreachable: {error}", err=True)
        sys.exit(1)
    is_healthy = state.state in ("ready", "released", "empty")
    click.echo(_line(state), err=not is_healthy)
    sys.exit(0 if is_healthy else 1)


def _line(state: Status) -> str:
    if state.held is not None:
        engines = sum(lease.is_engine for lease in state.leases)
        text = f"ready: {state.held.model}, {bytes_text(state.held.nbytes)}, {engines} engine(s)"
        return f"{text}; the last load failed: {state.failure}" if state.failure else text
    if state.state == "loading":
        return f"loading: {client.loading_text(state)}"
    if state.state == "failed":
        return f"failed: {state.failure}"
    why = "the weights were released" if state.state == "released" else "no model was named"
    return f"{state.state}: {why}; engines load from disk"
