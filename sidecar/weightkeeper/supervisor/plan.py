"""What to do about a change: two snapshots in, actions out. Pure; nothing here knows Docker."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weightkeeper.supervisor import weights
from weightkeeper.supervisor.project import ConfigFile, Service, Snapshot

NOT_IN_CONTAINER = ("build", "depends_on", "develop", "profiles", "pull_policy", "scale")
"""Fields of a service for which Compose makes no other container (its own service hash leaves them out)."""

SECRET = re.compile(r"(^|-)(api-key|token|secret|password)$")
"""Options whose values are not written into a log."""

MAX_VALUE_CHARACTERS = 80
"""Of one value in a cause; a JSON mapping may be a screen long."""


@dataclass(frozen=True, slots=True)
class Action:
    """What to do for one service, and why, in words."""

    service: str
    cause: str
    verb: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.verb} {self.service}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Nothing(Action):
    """Keep it as it is, and say so: its file cannot be used, or it is not ours to touch."""

    verb = "keep"


@dataclass(frozen=True, slots=True)
class Restart(Action):
    """Restart the container as it is; the engine reads its config file again."""

    verb = "restart"


@dataclass(frozen=True, slots=True)
class Recreate(Action):
    """Make another container; a restart would keep the old definition."""

    verb = "recreate"


def plan(old: Snapshot, new: Snapshot) -> list[Action]:
    """The smallest actions that apply `new` where `old` is applied; at most one for each service.

    Values are compared, not text: order, comments, quotes and line ends cause nothing.
    """
    actions: list[Action] = []
    for name in [*new.services, *(name for name in old.services if name not in new.services)]:
        actions += _plan(old.services.get(name), new.services.get(name))
    for section in new.shared:
        if changed := _changed_names(old.shared.get(section) or {}, new.shared[section]):
            cause = f"{section} {' '.join(changed)} changed; apply it with `docker compose up -d`"
            actions.append(Nothing("the containers", cause))
    return actions


def applied(old: Snapshot, new: Snapshot, waiting: Collection[str] = ()) -> Snapshot:
    """`new` as far as its plan is carried out: what waits, and what cannot be used, stays as in `old`."""
    services = dict(new.services)
    for name, service in new.services.items():
        if name in waiting or (service.config and service.config.fault):
            services[name] = old.services.get(name, service)
    return replace(new, services=services)


def same(one: Any, other: Any) -> bool:
    """Whether two values are one to vLLM: 1, 1.0 and true are three."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def _plan(old: Service | None, new: Service | None) -> Iterator[Action]:
    if new is None:
        yield Nothing(old.name, f"no longer in the project; end it with `docker compose rm -sf {old.name}`")
        return
    by_hand = f"apply it with `docker compose up -d {new.name}`"
    if old is None:
        yield Nothing(new.name, f"new in the project; {by_hand}")
        return
    fields = list(_fields(old.definition, new.definition))
    if not (old.is_engine and new.is_engine):
        if fields:
            yield Nothing(new.name, f"{', '.join(fields)} changed, not supervised; {by_hand}")
    elif new.config and new.config.fault:
        yield Nothing(new.name, new.config.fault)
    else:
        options = _options(old.config, new.config)
        if fields:
            yield Recreate(new.name, "; ".join(filter(None, [", ".join(fields), options])))
        elif options:
            yield Restart(new.name, options)


def _fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Fields of a definition that differ. Only plain ones with their values: environments hold secrets."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if name in NOT_IN_CONTAINER or same(before, after):
            continue
        if all(isinstance(value, dict | None) for value in (before, after)):
            yield " ".join([name, *_changed_names(before or {}, after or {})])
        elif isinstance(before, dict | list) or isinstance(after, dict | list):
            yield name
        else:
            yield f"{name} {_shown(name, before)} → {_shown(name, after)}"


def _options(old: ConfigFile | None, new: ConfigFile | None) -> str:
    """The options that differ between two config files, with both values; empty when none does."""
    if new is None or new.values is None:
        return ""
    if old is None or old.values is None:
        return f"{new.path.name} can be used now; what the engine runs with is not known"
    unset = object()
    changes, notes = [], []
    for option in [*new.values, *(option for option in old.values if option not in new.values)]:
        before, after = old.values.get(option, unset), new.values.get(option, unset)
        if not same(before, after):
            texts = ["(unset)" if value is unset else _shown(option, value) for value in (before, after)]
            changes.append(f"{option} {' → '.join(texts)}")
            notes += [weights.NOTE] if weights.shapes(option) and not notes else []
    return " ".join([f"{new.path.name} {', '.join(changes)}", *notes]) if changes else ""


def _changed_names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if not same(old.get(name), new.get(name))]


def _shown(name: str, value: Any) -> str:
    if SECRET.search(name):
        return "(hidden)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split()) if text.strip() else repr(text)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"
