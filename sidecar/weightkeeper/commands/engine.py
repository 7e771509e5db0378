"""`weightkeeper engine`: the launcher of a vLLM server."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weightkeeper.commands import engine_options
from weightkeeper.errors import ConfigError
from weightkeeper.launcher.settings import APPLICATION, Settings, checked_name

if TYPE_CHECKING:
    from weightkeeper.launcher.reaping import Exit

SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(name="engine", options_metavar="[OPTIONS] --")
@engine_options.name
@engine_options.socket_dir
@click.option("--control/--no-control", default=True, show_default=True, help="Whether there is a control socket.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Keep a history of starts and ends in this directory."
)
@click.option(
    "--env-file",
    "env_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="NAME=VALUE lines over the inherited environment; read again at each reload. Can be given several times.",
)
@click.option(
    "--prefork/--no-prefork", default=True, show_default=True, help="Fork servers from a process with their imports."
)
@click.option("--restart/--no-restart", "restarts", default=True, show_default=True,
              help="Whether a server that ended is started again.")  # fmt: skip
@click.option("--stop-grace", default=30.0, show_default=True, type=click.FloatRange(min=0),
              help="Seconds from SIGTERM to SIGKILL; longer than vLLM's --shutdown-timeout, shorter than Docker's "
              "stop_grace_period.")  # fmt: skip
@click.option("--start-timeout", default=3600.0, show_default=True, type=SECONDS,
              help="Seconds from a server's start to its first 200 from /health; else it has crashed.")  # fmt: skip
@click.option("--health-interval", default=5.0, show_default=True, type=SECONDS,
              help="Seconds between two requests for /health, and for its answer.")  # fmt: skip
@click.option("--health-failures", default=3, show_default=True, type=click.IntRange(min=1),
              help="Failures in a row after which the server is replaced.")  # fmt: skip
@click.option("--restart-delay", "delay", default=1.0, show_default=True, type=SECONDS,
              help="Seconds before the second start in a row; doubles each time.")  # fmt: skip
@click.option("--restart-delay-max", "delay_max", default=60.0, show_default=True, type=SECONDS, help="Up to this.")
@click.option("--healthy-seconds", default=60.0, type=SECONDS, hidden=True)
@click.option("--application", envvar="WEIGHTKEEPER_APPLICATION", default=APPLICATION, hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="VLLM_SERVE_ARGUMENTS...")
def command(
    engine: str | None,
    socket_dir: str,
    control: bool,
    arguments: tuple[str, ...],
    env_files: tuple[Path, ...],
    **options,
) -> None:
    """Run a vLLM server that is back in seconds, after a crash as well as after a change of its configuration.

    What follows -- is what would follow `vllm serve`:

        weightkeeper engine -- --config /config/engine.yaml --port 8000

    The launcher imports vLLM once and forks the server from that process; it owns the listening socket, so that clients
    wait during a restart instead of being refused.

    \b
    SIGHUP   read the config file and --env-file again and check them; then replace the server.
             Refused settings leave it serving.
    SIGTERM  let running requests end (vLLM's --shutdown-timeout), then end with the server's exit code.
             SIGINT does the same and ends with 130; a second signal ends at once.

    A server that ends, loses one of its processes, or no longer answers /health is replaced: at once after a minute of
    health, else after 1, 2, 4 … 60 seconds. After five deaths without becoming healthy the launcher waits for SIGHUP
    or `weightkeeper engine-restart`, and answers clients with status 503 and the cause.
    """
    early = heard()
    if arguments[:2] == ("vllm", "serve"):
        arguments = arguments[2:]
    if not arguments:
        raise ConfigError(
            "no arguments for the server: `weightkeeper engine -- --config FILE`, or a model behind the --"
        )
    settings = Settings(
        arguments=arguments,
        name=checked_name(engine),
        env_files=env_files,
        socket_dir=socket_dir if control else None,
        **options,
    )

    import anyio  # these take a while, in which a signal may come

    from weightkeeper.launcher.loop import Launcher

    async def run() -> "Exit":
        return await Launcher(settings, early).run()

    leave(anyio.run(run))


def heard() -> list[int]:
    """Signals from here on, until the launcher hears them itself. Without this SIGHUP would end us; process 1 would
    not even see SIGTERM."""
    numbers: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: numbers.append(number))
    return numbers


def leave(ended: "Exit") -> None:
    """End as the server did: with its code, or by its signal, which process 1 cannot do and ends with 128 + signal."""
    if ended.signal is not None and os.getpid() != 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it is not our core
        if ended.signal != signal.SIGKILL:
            signal.signal(ended.signal, signal.SIG_DFL)
        os.kill(os.getpid(), ended.signal)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended.status)  # and not wait for a thread that may still read a file
