"""`weightkeeper release`: have the keeper let its weights go."""

import click

from weightkeeper import client, command_options


@click.command(name="release")
@command_options.socket_dir
@command_options.timeout
@click.option("--force", is_flag=True, help="Also while engines map the weights; memory goes back when they end.")
def command(socket_dir: str, timeout_s: float, force: bool) -> None:
    """Give the memory of the weights back; `weightkeeper load` brings them in again."""
    click.echo(f"released: {client.release(socket_dir, force, timeout_s)}")
