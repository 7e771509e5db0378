"""What to do about a change: two snapshots in, actions out. Pure; nothing here knows Docker."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from weightkeeper.supervisor import changes, provision
from weightkeeper.supervisor.builds import Pair
from weightkeeper.supervisor.changes import Change
from weightkeeper.supervisor.project import Service, Snapshot

USABLE = "can be used now; what the engine runs with is not known"

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Action:
    """What to do for one service, and why, in words.

    Attributes:
        changes: what is applied by it.
        keeper: service whose keeper has to load the new weights first; "" where the weights stay.
    """

    service: str
    cause: str
    changes: tuple[Change, ...] = ()
    keeper: str = ""
    verb: ClassVar[str]

    def __str__(self) -> str:
        return f"{f'load, then {self.verb}' if self.keeper else self.verb} {self.service}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Nothing(Action):
    """Keep it as it is, and say so: its file cannot be used, or it is not ours to touch."""

    verb = "keep"


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """Keep it as it is: the change would leave clients without an engine. It is planned again when it changes."""

    verb = "refuse"


@dataclass(frozen=True, slots=True)
class Reload(Action):
    """Have the launcher read its files again, check them and replace its server; the container stays."""

    verb = "reload"


@dataclass(frozen=True, slots=True)
class Restart(Action):
    """Restart the container as it is; the engine reads its files again."""

    verb = "restart"


@dataclass(frozen=True, slots=True)
class Recreate(Action):
    """Make another container; a restart would keep the old definition."""

    verb = "recreate"


def plan(old: Snapshot, new: Snapshot, pairs: Mapping[str, Pair] = MappingProxyType({})) -> list[Action]:
    """The smallest actions that apply `new` where `old` is applied; at most one for each service.

    Values are compared, not text: order, comments, quotes and line ends cause nothing.

    Args:
        pairs: service → the versions of its image and of its keeper, for each engine whose image changes.
    """
    actions: list[Action] = []
    for name in [*new.services, *(name for name in old.services if name not in new.services)]:
        actions += _plan(old.services.get(name), new.services.get(name), pairs.get(name))
    for section in new.shared:
        if changed := changes.names(old.shared.get(section) or {}, new.shared[section]):
            cause = f"{section} {' '.join(changed)} changed; apply it with `docker compose up -d`"
            actions.append(Nothing("the containers", cause))
    return actions


def applied(old: Snapshot, new: Snapshot, waiting: Collection[str] = ()) -> Snapshot:
    """`new` as far as its plan is carried out: what waits, and what cannot be used, stays as in `old`."""
    services = dict(new.services)
    for name, service in new.services.items():
        if name in waiting or service.fault:
            services[name] = old.services.get(name, service)
    return replace(new, services=services)


def _plan(old: Service | None, new: Service | None, pair: Pair | None) -> Iterator[Action]:
    if new is None:
        yield Nothing(old.name, f"no longer in the project; end it with `docker compose rm -sf {old.name}`")
        return
    by_hand = f"apply it with `docker compose up -d {new.name}`"
    if old is None:
        yield Nothing(new.name, f"new in the project; {by_hand}")
        return
    fields = tuple(changes.of_definition(old.definition, new.definition))
    if not (old.is_engine and new.is_engine):
        if fields:
            yield Nothing(new.name, f"{', '.join(map(str, fields))} changed, not supervised; {by_hand}")
    elif new.fault:
        yield Nothing(new.name, new.fault)
    else:
        yield from _of_engine(old, new, fields, pair)


def _of_engine(old: Service, new: Service, fields: tuple[Change, ...], pair: Pair | None) -> Iterator[Action]:
    options = tuple(changes.of_options(old.config, new.config))
    given = changes.of_variables(old, new)
    texts = [", ".join(map(str, fields))] if fields else []
    if options:
        texts.append(f"{new.config.path.name} {', '.join(map(str, options))}")
    elif new.config and (old.config is None or old.config.values is None):
        texts.append(f"{new.config.path.name} {USABLE}")
    texts += [f"{name} {', '.join(map(str, changed))}" for name, changed in given.items()]
    texts += [f"{file.path.name} {USABLE}" for file in old.env_files if file.values is None]
    if not texts:
        return
    cause = "; ".join(texts)
    read = tuple(change for changed in given.values() for change in changed)
    weights = provision.of_engine(new, options, read, pair if any(field.name == "image" for field in fields) else None)
    if reason := _out_of_reach(new, options) or weights.refusal:
        yield Refuse(new.name, f"{cause}: {reason}", fields + options + read)
        return
    kind = Recreate if fields else Reload if new.launcher else Restart
    yield kind(new.name, " ".join(filter(None, [cause, weights.note])), fields + options + read, weights.keeper)


def _out_of_reach(new: Service, options: tuple[Change, ...]) -> str:
    """Why clients would not reach a server with these options; "" where they would, as far as that can be seen."""
    published = [entry for entry in new.definition.get("ports") or () if isinstance(entry, Mapping)]
    changed = {change.name for change in options}
    values: Mapping[str, Any] = new.config.values if new.config and new.config.values else {}
    if not published:
        return ""
    targets = sorted({str(entry.get("target")) for entry in published})
    port = str(values.get("port", 8000))
    if "uds" in changed and values.get("uds"):
        return f"the container publishes port {' '.join(targets)}, a server on a Unix socket has none"
    if "port" in changed and port not in targets:
        return f"the container publishes port {' '.join(targets)}; change its `ports:` and health check, too"
    if "host" in changed and values.get("host") in LOOPBACK:
        return "published ports do not reach a server on the container's loopback address; use 0.0.0.0"
    return ""
