"""`weightkeeper load`: have the keeper load what its configuration names now."""

import time

import click

from weightkeeper import client, command_options
from weightkeeper.errors import LoadFailedError
from weightkeeper.protocol import Status
from weightkeeper.quantities import bytes_text

POLL_SECONDS = 0.25


@click.command(name="load")
@command_options.socket_dir
@command_options.timeout
@click.option("--wait", is_flag=True, help="Return when the weights are held, or fail when they cannot be.")
def command(socket_dir: str, timeout_s: float, wait: bool) -> None:
    """Load the weights, or load them again; what is held now is served until the new ones are there."""
    before = client.status(socket_dir, timeout_s)
    answer = client.load(socket_dir, timeout_s)
    if not wait:
        click.echo(answer)
        return
    if answer != "loading":
        click.echo(f"{answer}; what was changed since that load began is loaded after it", err=True)
    state = _wait(socket_dir, timeout_s)
    if state.loads == before.loads or state.held is None:
        raise LoadFailedError(state.failure or "the load was stopped: the weights were released meanwhile")
    held = state.held
    click.echo(f"ready: {held.model}, {bytes_text(held.nbytes)} in {held.load_seconds:.1f} s")


def _wait(socket_dir: str, timeout_s: float) -> Status:
    """Until no load runs any more. Each step is shown once; progress inside one on a terminal only."""
    shown = ""
    while True:
        state = client.status(socket_dir, timeout_s)
        if state.loading is None:
            return state
        text = client.loading_text(state)
        if text != shown:
            click.echo(text, err=True)
            shown = text
        time.sleep(POLL_SECONDS)
