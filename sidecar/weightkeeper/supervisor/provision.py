"""Where an engine gets its weights from when it may need other ones than before. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from weightkeeper.supervisor import keepers, variables
from weightkeeper.supervisor.builds import Pair
from weightkeeper.supervisor.changes import Change
from weightkeeper.supervisor.options import EXTRA_CONFIG
from weightkeeper.supervisor.project import Service

FROM_DISK = "(other weights, which no keeper here loads: the engine reads them from disk)"
PUBLISHED = "(other weights: the engine loads them and publishes them)"


@dataclass(frozen=True, slots=True)
class Provision:
    """How an engine comes by its weights.

    Attributes:
        keeper: service whose keeper has to load them first; "" for none.
        note: what a person should know, for the cause; "" for nothing.
        refusal: why it could not start at all; "" where it could.
    """

    keeper: str = ""
    note: str = ""
    refusal: str = ""


def of_engine(new: Service, options: Iterable[Change], given: Iterable[Change], pair: Pair | None) -> Provision:
    """What becomes of the weights of an engine.

    Args:
        new: the engine as it is to become.
        options: of its config file, that change.
        given: variables of its environment files that change.
        pair: versions of its new image and of its keeper; None where the image stays.
    """
    values = new.config.values if new.config and new.config.values else {}
    if not keepers.uses_keeper(values):
        return Provision()
    shaping = {change.name for change in given if _is_shaping(change)}
    build, foreign = [*_other_build(new, pair)], [*_other_variables(new, shaping)]
    unknown = _unknown(new, pair)
    if not (any(map(_is_shaping, options)) or build or (shaping and (foreign or new.keeper is None))):
        return Provision(note=unknown)
    against = build + foreign
    if not against and new.keeper and new.keeper.config == new.config.path:
        return Provision(new.keeper.service, unknown)
    loader = keepers.loader_options(values)
    if loader.get("publish") is not True and loader.get("fallback") is False:
        return Provision(refusal=_refusal(new, against))
    shown = f"({'; '.join(against)})" if against else ""
    note = PUBLISHED if loader.get("publish") is True else FROM_DISK
    return Provision(note=" ".join(filter(None, [shown, note, unknown])))


def _is_shaping(change: Change) -> bool:
    return change.effect is not None and change.effect.kind == "weights"


def _unknown(new: Service, pair: Pair | None) -> str:
    if pair is None or new.keeper is None or pair.difference or pair.is_known:
        return ""
    return f"(not known whether {_image(new)} has the vLLM of {new.keeper.service})"


def _other_build(new: Service, pair: Pair | None) -> Iterable[str]:
    if pair and new.keeper and pair.difference:
        ours, theirs = pair.difference
        yield f"{_image(new)} has {ours}, the keeper of {new.keeper.service} {theirs}"


def _other_variables(new: Service, changed: Iterable[str]) -> Iterable[str]:
    """Where a variable that is in the engine's files, or was, shapes weights and is another one at the keeper."""
    if new.keeper is None:
        return
    read = variables.merged(new.env_files)
    ours = variables.of_definition(new.definition) | read
    names = {*variables.shaping(read), *changed}
    if others := sorted(name for name in names if ours.get(name) != new.keeper.variables.get(name)):
        yield f"the keeper of {new.keeper.service} differs in {' '.join(others)}"


def _refusal(new: Service, against: list[str]) -> str:
    where = "; ".join(against)
    if not where:
        where = f"the keeper of {new.keeper.service} reads another file" if new.keeper else "no keeper is in sight"
    text = f"other weights, {where}, and the engine may neither publish them nor read them from disk"
    return f"{text}; make them the same, or allow `publish` or `fallback` in {EXTRA_CONFIG}" if against else text


def _image(new: Service) -> str:
    return str(new.definition.get("image"))
