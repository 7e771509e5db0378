"""`weightkeeper recovery`: replace the engine in every way there is, and see whether an agent's work comes back."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from weightkeeper.commands import recovery_options as given
from weightkeeper.errors import ConfigError


@click.group(name="recovery")
def command() -> None:
    """Measure on this machine, with your model, how an agent's work survives the loss of its engine."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Say which optional packages are missing where an import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weightkeeper"):
            raise
        raise ConfigError(
            f"this needs the Python package {error.name}, which is not here; install `weightkeeper[{extra}]`"
        ) from error


@command.command()
@given.run
def run(
    model: Path | None, config: Path | None, eager: bool, options: tuple[str, ...], project: Path | None,
    restart_docker: str, names: str | None, loaded: str | None, out: Path | None, file: Path | None, limit_s: float,
    steps: int, tokens: int, server: str | None, application: str, has_agent: bool, load_s: float | None, **plan,
) -> None:  # fmt: skip
    """Lose the engine in every way there is, several times each, while an agent works, and keep what is seen.

    With --no-agent nobody works: only how long it takes from the loss to the first right completion is measured.

    Without --project everything runs in processes of its own on this machine, and a running project is not touched.
    The result is a JSON file, written after each sample; `weightkeeper recovery report` makes a page of it. A long run
    can be split: give each part some of the --scenarios; the baseline is in every part.
    """
    from weightkeeper.recovery import bench, composed, composed_scenarios, runner, scenarios, summary, table
    from weightkeeper.recovery.plan import Plan

    if has_agent:
        given.check_agent_packages()
    if restart_docker and not project:
        raise ConfigError("--restart-docker: containers are restarted with it; give --project, or leave it out")
    if project and plan["together"]:
        raise ConfigError("--together: all containers of a --project are up before its engine is lost; leave it out")
    known = scenarios.ALL if project is None else composed_scenarios.ALL
    chosen, others = given.scenarios(names, known, scenarios.BASELINE)
    after = given.names_of(loaded)
    given.check_names("--throughput-of", after or (), known)
    if project is None:
        path, values = given.model_and_options(model, config, eager, options)
    elif model or config or eager or options:
        raise ConfigError("--project brings its own model and options; leave --model, --config, --eager, --option out")
    else:
        path, values = Path(), {}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    file = file or Path(f"recovery-{stamp}.json")
    settings = bench.Settings(
        path, values, (out or Path(f"recovery-{stamp}")).resolve(), limit_s, steps, tokens,
        tuple(server.split()) if server else bench.SERVER, application, has_agent=has_agent,
    )  # fmt: skip
    load_s = load_s if load_s is not None else given.LOAD_SECONDS if has_agent else 0.0
    given.check_writable("--json", file)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    opened = composed.open_bench(project, settings, restart_docker) if project else bench.Bench(settings)
    with given.disk_faults(settings.out), contextlib.closing(opened) as stand, quiet_end():
        click.echo(f"recovery: result in {file}, logs in {settings.out}", err=True)
        command = ("weightkeeper", *sys.argv[1:])
        planned = Plan(file=file, command=command, loaded=after, load_s=load_s, **plan)
        found = runner.Runner(
            stand, planned, chosen, others, lambda text: click.echo(f"recovery: {text}", err=True)
        ).go()
    result = summary.join([found])
    click.echo("\n".join(table.lines(result)))
    if not result.is_passed:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """A second Ctrl-C does not keep processes from being ended."""
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN.json...")
@click.option("-o", "--output", "page", default="recovery.html", show_default=True, type=click.Path(path_type=Path),
              help="The page.")  # fmt: skip
def report(files: tuple[Path, ...], page: Path) -> None:
    """Make one page of a run, or of the parts of one; it opens without a network."""
    with needs("report"):
        from weightkeeper.recovery import report, result, summary, table

    given.check_page(page, files)
    joined = summary.join([result.read(file) for file in files])
    with given.disk_faults(page):
        report.write(page, report.page(joined))
    click.echo("\n".join(table.lines(joined)))
    click.echo(f"\nwritten: {page}", err=True)


@command.command()
@click.argument("one", type=click.Path(path_type=Path), metavar="A.json")
@click.argument("other", type=click.Path(path_type=Path), metavar="B.json")
def compare(one: Path, other: Path) -> None:
    """Show two results side by side: of two machines, versions, models or settings."""
    from weightkeeper.recovery import comparing, result, summary

    results = [summary.join([result.read(file)]) for file in (one, other)]
    click.echo("\n".join(comparing.lines(*results)))


@command.command()
def schema() -> None:
    """Print the JSON Schema of a run."""
    from weightkeeper.recovery import result

    click.echo(json.dumps(result.schema(), indent=1))


@command.command()
@given.agent
def agent(wrong: bool, **options) -> None:
    """Do a job whose steps depend on each other, with a side effect in each; go on with it where it was begun.

    Its state is in SQLite in the directory, so that it can be killed at any moment and started again.
    """
    with needs("recovery"):
        from weightkeeper.recovery import agent, wrong_agent

    with given.disk_faults(options["directory"]):
        (wrong_agent if wrong else agent).run(agent.Settings(**options))
