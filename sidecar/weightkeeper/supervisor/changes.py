"""What differs between two moments of one service, as names and values that may be shown. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightkeeper.supervisor import options, variables
from weightkeeper.supervisor.options import Effect
from weightkeeper.supervisor.project import ConfigFile, Service

NOT_IN_CONTAINER = ("build", "depends_on", "develop", "profiles", "pull_policy", "scale")
"""Fields of a service for which Compose makes no other container (its own service hash leaves them out)."""

SECRET = re.compile(r"(^|-)(api-key|token|secret|password)$")
"""Options whose values are not written into a log."""

SECRET_VARIABLE = re.compile("TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
"""Likewise, of environment variables, anywhere in the name."""

SECRET_VALUE = re.compile(r"://[^/\s]*@")
"""An address with a password in it, whatever the variable is called."""

MAX_VALUE_CHARACTERS = 80
"""Of one value in a cause; a JSON mapping may be a screen long."""

UNSET = "(unset)"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs.

    Attributes:
        name: of an option, or of a field of the definition.
        before: for people; "" where no value is to be shown.
        after: likewise.
        effect: of the change of an option or a variable.
        is_secret: no value may be shown; that it changed is all there is to say.
    """

    name: str
    before: str = ""
    after: str = ""
    effect: Effect | None = None
    is_secret: bool = False

    def __str__(self) -> str:
        if self.is_secret:
            return f"{self.name} changed"
        return f"{self.name} {self.before} → {self.after}" if self.before else self.name


def same(one: Any, other: Any) -> bool:
    """Whether two values are one to vLLM: 1, 1.0 and true are three."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def of_definition(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Fields of a definition that differ. Only plain ones with their values: environments hold secrets."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if name in NOT_IN_CONTAINER or same(before, after):
            continue
        if all(isinstance(value, dict | None) for value in (before, after)):
            yield Change(" ".join([name, *names(before or {}, after or {})]))
        elif isinstance(before, dict | list) or isinstance(after, dict | list):
            yield Change(name)
        else:
            yield Change(name, shown(name, before), shown(name, after))


def of_options(old: ConfigFile | None, new: ConfigFile | None) -> Iterator[Change]:
    """Options that differ between two config files that can be used."""
    if old is None or new is None or old.values is None or new.values is None:
        return
    unset = object()
    for option in [*new.values, *(option for option in old.values if option not in new.values)]:
        before, after = old.values.get(option, unset), new.values.get(option, unset)
        if not same(before, after):
            texts = [UNSET if value is unset else shown(option, value) for value in (before, after)]
            effect = options.effect(option, *(None if value is unset else value for value in (before, after)))
            yield Change(option, *texts, effect)


def of_variables(old: Service, new: Service) -> dict[str, list[Change]]:
    """Name of a launcher's environment file → the variables in it that have another value for the server now.

    A file goes over the container's own environment, so that a name that leaves it may keep its value.
    """
    if any(file.values is None for file in (*old.env_files, *new.env_files)):
        return {}
    before, after = (variables.of_definition(one.definition) | variables.merged(one.env_files) for one in (old, new))
    found: dict[str, list[Change]] = {}
    said_in = {name: file.path.name for one in (old, new) for file in one.env_files for name in file.values}
    for name, file in said_in.items():
        if before.get(name) != after.get(name):
            found.setdefault(file, []).append(_variable(name, before.get(name), after.get(name)))
    return found


def _variable(name: str, before: str | None, after: str | None) -> Change:
    effect = variables.effect(name)
    if SECRET_VARIABLE.search(name) or any(SECRET_VALUE.search(value or "") for value in (before, after)):
        return Change(name, effect=effect, is_secret=True)
    return Change(name, *(UNSET if value is None else shown(name, value) for value in (before, after)), effect)


def names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ."""
    return [name for name in sorted(old.keys() | new.keys()) if not same(old.get(name), new.get(name))]


def shown(name: str, value: Any) -> str:
    """A value for one log line."""
    if SECRET.search(name):
        return "(hidden)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split()) if text.strip() else repr(text)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"
