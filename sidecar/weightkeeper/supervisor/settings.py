"""What a user can say about the supervisor, and the options of the programs that say it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from weightkeeper.errors import ConfigError
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.history import STATE_DIR

state_option = click.option(
    "--state-dir", type=click.Path(path_type=Path), default=STATE_DIR, show_default=True,
    envvar="WEIGHTKEEPER_STATE_DIR", help="Where the history is kept.",
)  # fmt: skip


def project_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a compose project; the command gets it as its argument `compose`."""

    @click.option(
        "--project-directory",
        "directory",
        type=click.Path(path_type=Path),
        default=Path(),
        help="Directory of the compose project, at one path inside and outside of a container.  [default: here]",
    )
    @click.option("--file", "-f", "files", multiple=True, type=click.Path(path_type=Path), help="A compose file.")
    @click.option("--env-file", "env_files", multiple=True, type=click.Path(path_type=Path), help="Instead of .env.")
    @click.option("--project-name", "-p", "name", help="Of the project, where Compose was told one.")
    @functools.wraps(command)
    def with_compose(
        directory: Path, files: tuple[Path, ...], env_files: tuple[Path, ...], name: str | None, **rest: Any
    ) -> Any:
        return command(compose=named(directory, files, env_files, name), **rest)

    return with_compose


def is_here() -> bool:
    """Whether no project directory was given, so that a container's own project is meant."""
    return click.get_current_context().get_parameter_source("directory") is ParameterSource.DEFAULT


def named(directory: Path, files: tuple[Path, ...], env_files: tuple[Path, ...], name: str | None) -> Compose:
    """The project that the options name; files are relative to its directory.

    Raises:
        ConfigError: there is no such directory.
    """
    directory = directory.absolute()
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give the compose project's with --project-directory")
    return Compose(
        directory,
        tuple(directory / file for file in files),
        tuple(directory / file for file in env_files),
        name,
    )
