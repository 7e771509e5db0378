"""What a change of one of vLLM's options asks for: a table with a row, and a reason in it, for each option of 0.32.

The rows are data, in `weights`, `container` and `reload`. What has no row counts as `weights`, which is always right
and sometimes slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightkeeper.supervisor.options.container import CONTAINER
from weightkeeper.supervisor.options.loader import LOADER_KEYS
from weightkeeper.supervisor.options.reload import RELOAD
from weightkeeper.supervisor.options.weights import WEIGHTS

Kind = Literal["reload", "weights", "container"]
"""A new server on the same weights; other weights, which are loaded first; and what the container's definition says too
(published ports, health check), so that a new server alone may be out of reach."""

ALIASES = {
    "asc": "api-server-count", "q": "quantization", "pp": "pipeline-parallel-size", "n": "nnodes", "r": "node-rank",
    "tp": "tensor-parallel-size", "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size",
    "dp": "data-parallel-size", "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local", "dpa": "data-parallel-address", "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend", "dph": "data-parallel-hybrid-lb", "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb", "ep": "enable-expert-parallel", "sc": "speculative-config",
    "cc": "compilation-config", "dc": "diffusion-config", "ac": "attention-config",
    "device-memory-utilization": "gpu-memory-utilization",
}  # fmt: skip
"""vLLM's other names for options."""

EXTRA_CONFIG = "model-loader-extra-config"


@dataclass(frozen=True, slots=True)
class Effect:
    """Of a change of one option."""

    kind: Kind
    reason: str


UNKNOWN = Effect("weights", "no option that is known here, so it may shape the weights")

ROWS: dict[str, Effect] = {
    name: Effect(kind, reason)
    for kind, rows in (("reload", RELOAD), ("weights", WEIGHTS), ("container", CONTAINER))
    for name, reason in rows.items()
}
"""Option → what its change asks for."""


def effect(option: str, before: Any = None, after: Any = None) -> Effect:
    """What a change of an option asks for; `no-X` and `X.part` count as `X`.

    Args:
        option: as the config file names it, with dashes.
        before: its value; it counts only for our own loader's options, some of which shape no weights.
        after: likewise.
    """
    name, _, part = option.partition(".")
    name = ALIASES.get(name, name)
    if name == EXTRA_CONFIG:
        return _of_loader({part: after} if part else _changed(before, after))
    return ROWS.get(name) or ROWS.get(name.removeprefix("no-")) or UNKNOWN


def shaping(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a config file that shape weights, and of our own loader's those that do."""
    found = {name: value for name, value in values.items() if effect(name, None, value).kind == "weights"}
    extra = found.get(EXTRA_CONFIG)
    if isinstance(extra, dict):
        found[EXTRA_CONFIG] = {key: value for key, value in extra.items() if key not in LOADER_KEYS}
    return found


def _of_loader(changed: Mapping[str, Any] | None) -> Effect:
    if changed is not None and changed and all(key in LOADER_KEYS for key in changed):
        return Effect("reload", "; ".join(dict.fromkeys(LOADER_KEYS[key] for key in sorted(changed))))
    return ROWS[EXTRA_CONFIG]


def _changed(before: Any, after: Any) -> dict[str, Any] | None:
    """The keys whose values differ; None where one of both is no mapping."""
    before, after = (value if isinstance(value, dict) else None if value else {} for value in (before, after))
    if before is None or after is None:
        return None
    return {key: after.get(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
