"""The `weightkeeper` program. A command's module is imported only when the command runs, so that each stays small."""

import signal
import sys

if sys.argv[1:2] == ["engine"]:
    # SIGHUP would end the launcher until it hears it, a third of a second from here. Nothing has been read yet, so
    # there is nothing to read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

import importlib
import logging

import click

from weightkeeper import __version__
from weightkeeper.errors import ConfigError, WeightkeeperError

COMMANDS = (
    "doctor", "engine", "engine-reload", "engine-restart", "engine-status", "health", "history", "inspect", "load",
    "plan", "recovery", "release", "restart", "room", "serve", "status", "supervise", "verify",
)  # fmt: skip


class Program(click.Group):
    """A click group whose commands are the modules of `weightkeeper.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            return importlib.import_module(f"weightkeeper.commands.{cmd_name.replace('-', '_')}").command
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("weightkeeper"):
                raise
            return _missing(cmd_name, str(error.name))


def _missing(name: str, package: str) -> click.Command:
    """Stands in for a command that needs a package which this image leaves out."""
    reason = f"needs the Python package {package}, which is not here; run it in the supervisor's container"

    def refuse() -> None:
        raise ConfigError(f"weightkeeper {name} {reason}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, short_help=f"({reason})", help=reason, context_settings=settings)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weightkeeper")
def program() -> None:
    """Keep a vLLM model's prepared weights in memory, so that a restarted engine maps them instead of loading them."""


def main() -> None:
    """Run the program; exit 1 on an error of ours, 2 on a wrong setting, 130 on Ctrl-C."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        sys.exit(program.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except WeightkeeperError as error:
        click.echo(f"weightkeeper: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
