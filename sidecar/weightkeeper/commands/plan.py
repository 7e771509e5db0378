"""`weightkeeper plan`: what the supervisor would do about the files of now, without doing it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from weightkeeper.errors import ConfigError
from weightkeeper.supervisor import place, project
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.connection import Connection
from weightkeeper.supervisor.plan import Action, plan
from weightkeeper.supervisor.project import Snapshot
from weightkeeper.supervisor.settings import is_here, project_options, state_option
from weightkeeper.supervisor.state import Applied, State
from weightkeeper.supervisor.stop import Stop


@click.command("plan")
@click.option("--json", "is_json", is_flag=True, help="One JSON list of actions.")
@click.option("--with", "candidates", multiple=True, metavar="PATH=CANDIDATE",
              help="Read the config file PATH from CANDIDATE; to ask before it is saved. Can be given several times.",
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
    actions = plan(_old(new, written), new)
    tried = {name for name, one in written.items() if one.failed == new.services[name].key} if written else set()
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


def _with(snapshot: Snapshot, candidates: tuple[str, ...]) -> Snapshot:
    """The snapshot with other content in some config files.

    Raises:
        ConfigError: a path is no engine's config file.
    """
    services = dict(snapshot.services)
    for candidate in candidates:
        path, _, source = candidate.partition("=")
        found = [each for each in snapshot.engines if each.config and each.config.path == Path(path).absolute()]
        if not source or not found:
            known = ", ".join(sorted(str(each) for each in snapshot.config_files)) or "none"
            raise ConfigError(f"--with {candidate}: expected PATH=CANDIDATE with an engine's config file ({known})")
        for each in found:
            services[each.name] = replace(each, config=project.read_config(each.config.path, Path(source)))
    return replace(snapshot, services=services)


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
