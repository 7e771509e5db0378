"""What shapes the bytes of a model's weights, as flat text fields that two processes can compare.

A field is a name a person understands (`dtype`, `content of model-00001-of-00002.safetensors`) and a value as text.
Any difference means that the keeper's weights are not what the engine would load from disk.
"""

from collections.abc import Mapping

import msgspec
from blake3 import blake3

from weightkeeper.errors import Difference

CONTENT = "content of "
"""Prefix of the fields that hold BLAKE3 digests of files."""

ABSENT = "nothing"
"""How a field that one side does not have is shown."""

_SHOWN_DIGEST = 16
_SHOWN_VALUE = 120


def compose(digests: Mapping[str, str], conditions: Mapping[str, str]) -> dict[str, str]:
    """All fields of one rank's weights.

    Args:
        digests: file name inside the checkpoint → BLAKE3 of its content, in hex.
        conditions: every other field, as `conditions.conditions_of` gives them.
    """
    return {CONTENT + name: digest for name, digest in sorted(digests.items())} | dict(conditions)


def digest(fields: Mapping[str, str]) -> str:
    """Hex digest over all fields, equal only where all of them are."""
    return blake3(msgspec.json.encode(dict(fields), order="deterministic")).hexdigest()


def differences(keeper: Mapping[str, str], engine: Mapping[str, str]) -> list[Difference]:
    """The fields in which the two are not equal, contents of files first."""
    names = sorted(keeper.keys() | engine.keys(), key=lambda name: (not name.startswith(CONTENT), name))
    return [
        Difference(name, _shown(name, keeper.get(name)), _shown(name, engine.get(name)))
        for name in names
        if keeper.get(name) != engine.get(name)
    ]


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return ABSENT
    if name.startswith(CONTENT):
        return f"blake3 {value[:_SHOWN_DIGEST]}…"
    return value if len(value) <= _SHOWN_VALUE else f"{value[:_SHOWN_VALUE]}… ({len(value)} characters)"
