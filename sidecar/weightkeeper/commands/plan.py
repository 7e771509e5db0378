"""`weightkeeper plan`: what the supervisor would do about the files of now, without doing it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from weightkeeper.errors import ConfigError, DockerLostError
from weightkeeper.supervisor import images, place, project, variables
from weightkeeper.supervisor.builds import Build, Pair
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.plan import Action, plan
from weightkeeper.supervisor.project import Service, Snapshot
from weightkeeper.supervisor.settings import is_here, project_options, state_option
from weightkeeper.supervisor.state import Applied, State
from weightkeeper.supervisor.stop import Stop


@click.command("plan")
@click.option("--json", "is_json", is_flag=True, help="One JSON list of actions.")
@click.option("--with", "candidates", multiple=True, metavar="PATH=CANDIDATE",
              help="Read PATH, a config or environment file of an engine, from CANDIDATE; to ask before it is saved."
              " Can be given several times.",
              )  # fmt: skip
@project_options
@state_option
def command(is_json: bool, candidates: tuple[str, ...], compose: Compose, state_dir: Path) -> None:
    """Say what would be done, and why, about what differs between the files and what is applied to the engines.

    Nothing is done. What is applied is what the supervisor wrote down in its state directory.
    """
    new = _with(project.read(_compose(compose)), candidates)
    written = State(state_dir, new.name).read()
    if not written:
        raise ConfigError(
            f"{state_dir} has no record of {new.name}; start the supervisor, it writes down what is applied"
        )
    old = _old(new, written)
    actions = plan(old, new, _pairs(old, new))
    tried = {name for name, one in written.items() if name in new.services and one.failed == new.services[name].key}
    if is_json:
        click.echo(msgspec.json.encode([_plain(action, action.service in tried) for action in actions]).decode())
        return
    for action in actions:
        click.echo(
            f"{action}{' (tried already, and not again until a file changes)' if action.service in tried else ''}"
        )
    if not actions:
        click.echo("nothing to do")


def _compose(compose: Compose) -> Compose:
    """The project as told, or of the container we run in."""
    connection = Connection(Stop())
    if is_here() and (container := place.own(connection)):
        directory = container.labels.get("com.docker.compose.project.working_dir")
        if directory:
            compose = replace(compose, directory=Path(directory))
    return place.here(compose, connection)


def _old(new: Snapshot, written: dict[str, Applied]) -> Snapshot:
    """As `new`, with the engines as they were written down."""
    services = {
        name: written[name].service(service) if name in written and service.is_engine else service
        for name, service in new.services.items()
    }
    return replace(new, services=services)


def _pairs(old: Snapshot, new: Snapshot) -> dict[str, Pair]:
    """What is in images that change; nothing is known where Docker does not answer, and the plan says so."""
    try:
        return images.pairs(old, new, Connection(Stop()))
    except DockerLostError:
        return {engine.name: Pair(Build(), Build()) for engine in new.engines}


def _with(snapshot: Snapshot, candidates: tuple[str, ...]) -> Snapshot:
    """The snapshot with other content in some files of engines.

    Raises:
        ConfigError: a path is no such file.
    """
    services = dict(snapshot.services)
    for candidate in candidates:
        name, _, source = candidate.partition("=")
        path = Path(name).absolute()
        if not source or path not in snapshot.config_files:
            known = ", ".join(sorted(str(each) for each in snapshot.config_files)) or "none"
            raise ConfigError(f"--with {candidate}: expected PATH=CANDIDATE with a file that an engine reads ({known})")
        for each in snapshot.engines:
            services[each.name] = _reading(services[each.name], path, Path(source))
    return replace(snapshot, services=services)


def _reading(service: Service, path: Path, source: Path) -> Service:
    """The service with the content of `source` in place of its file at `path`, where it has it."""
    config = service.config
    if config and config.path == path:
        config = project.read_config(path, source)
    env_files = (variables.read(path, source) if file.path == path else file for file in service.env_files)
    return replace(service, config=config, env_files=tuple(env_files))


def _plain(action: Action, is_tried: bool) -> dict[str, Any]:
    return {
        "service": action.service,
        "action": action.verb,
        "cause": action.cause,
        "load": action.keeper,
        "tried": is_tried,
        "changes": [
            {
                "name": change.name,
                "from": change.before,
                "to": change.after,
                "kind": change.effect.kind if change.effect else "container",
                "reason": change.effect.reason if change.effect else "part of the container's definition",
            }
            for change in action.changes
        ],
    }
