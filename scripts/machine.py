"""What a script's result was measured on: the recovery benchmark's facts, as plain values for JSON."""

from typing import Any

import msgspec

from weightkeeper.recovery import machine
from weightkeeper.recovery.subject import Machine


def facts() -> dict[str, Any]:
    """Processor, memory, versions and GPUs; nothing that names the machine or its user."""
    return msgspec.to_builtins(machine.facts())


def said(found: dict[str, Any]) -> str:
    """The facts in one line, for people."""
    return machine.said(msgspec.convert(found, Machine))
