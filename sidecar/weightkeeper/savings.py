"""What of an engine's start can be saved: the names, which of them the user wants, and what became of each."""

from collections.abc import Iterable, Mapping

from weightkeeper.errors import ConfigError

SWITCH = "WEIGHTKEEPER_SAVINGS"
"""Variable with what to save: `all`, `none`, `default`, or names with commas between.

`default` is `all` on one GPU with a vLLM of `COMPARED`, and `none` else. Where it is not set, it is `default` in
servers of our launcher and `none` elsewhere.
"""

DEFAULT = "default"

COMPARED = ("0.30",)
"""Versions of vLLM with which tokens on a GPU were those of a start without savings: tests/gpu/test_gpu_savings.py."""

FROZEN_HEAP = "frozen-heap"
"""What the imports made is not looked at again by each of vLLM's garbage collections."""

BULK_CAPTURE = "bulk-capture"
"""torch empties its caches and waits for the GPU once around all graphs, not once for each of some thousand."""

ONE_WARM_UP = "one-warm-up"
"""The second of the two modes in which a size is captured does without a warm-up of its own."""

DEFERRED_GRAPHS = "deferred-graphs"
"""Piecewise graphs are captured while the server is idle; until then their code runs without a graph."""

LATE_INDUCTOR = "late-inductor"
"""What only a later recompilation needs is made ready while the server is idle."""

KV_SIZE = "kv-size"
"""The size of the KV cache is that of the last good start, so that memory is not measured again."""

ALL = (FROZEN_HEAP, BULK_CAPTURE, ONE_WARM_UP, DEFERRED_GRAPHS, LATE_INDUCTOR, KV_SIZE)


def wanted(environment: Mapping[str, str], vllm: str) -> tuple[str, ...]:
    """The savings that the user wants, in the order of `ALL`.

    Args:
        vllm: its version.

    Raises:
        ConfigError: a name that there is not.
    """
    text = _text(environment)
    if text in ("", "none") or (text == DEFAULT and not is_compared(vllm)):
        return ()
    if text in ("all", DEFAULT):
        return ALL
    names = {name.strip() for name in text.split(",")} - {""}
    if unknown := sorted(names - set(ALL)):
        raise ConfigError(
            f"{SWITCH}: there is no saving {', '.join(unknown)}; there are {', '.join(ALL)}, all, none, default"
        )
    return tuple(name for name in ALL if name in names)


def is_compared(vllm: str) -> bool:
    """Whether savings are made by default with this version of vLLM."""
    return ".".join(vllm.split(".")[:2]) in COMPARED


def is_default(environment: Mapping[str, str]) -> bool:
    """Whether the user has left it to us what to save."""
    return _text(environment) in ("", DEFAULT)


def _text(environment: Mapping[str, str]) -> str:
    return environment.get(SWITCH, "").strip().lower()


class Account:
    """What became of each saving that is wanted. As text, one line for the log."""

    def __init__(self, names: Iterable[str]):
        self._names = tuple(names)
        self._applied: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    def wants(self, name: str) -> bool:
        """Whether it is wanted and nothing has spoken against it so far."""
        return name in self._names and name not in self._skipped

    def apply(self, name: str, how: str = "") -> None:
        """It is in effect."""
        if self.wants(name):
            self._applied[name] = how

    def skip(self, name: str, why: str) -> None:
        """It is not; the first cause stays."""
        self._applied.pop(name, None)
        self._skipped.setdefault(name, why)

    def __str__(self) -> str:
        applied = [_with(name, self._applied[name]) for name in self._names if name in self._applied]
        left = [_with(name, self._skipped[name]) for name in self._names if name in self._skipped]
        text = f"savings of this start: {', '.join(applied) or 'none'}"
        return f"{text}; not: {', '.join(left)}" if left else text


def _with(name: str, text: str) -> str:
    return f"{name} ({text})" if text else name
