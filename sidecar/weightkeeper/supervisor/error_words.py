"""The lines of a vLLM server's log that say why it ended, or why it read its weights from disk."""

import re
from collections.abc import Iterable, Sequence

from weightkeeper.quantities import printable

MAX_CHARACTERS = 300

FALLBACK = "weightkeeper: fallback to disk, "

_PREFIX = re.compile(r"^(?:\([^()]*\) ?)?(?:([A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?(?: +\| )?")
"""Of vLLM's log lines: `(EngineCore pid=7) ERROR 11-30 04:12:12 [core.py:900] `, and an exception group's: `  | `."""

_ERROR = re.compile(r"^(?:(?:\w+\.)*\w*(?:Error|Exception|error)|Fatal Python error): .*\S")
"""The last line of a traceback; some classes are spelt small, like `struct.error`. Or what Python says of a crash."""

_VALIDATION = re.compile(r": \d+ validation errors? for \S+$")
"""Pydantic's first line; what is wrong stands below, `field` and `  reason [type=…]`, or the reason alone."""

_NO_END = frozenset({"DEBUG", "INFO", "WARNING"})
"""Levels at which vLLM logs what it goes on after."""

_IGNORED = re.compile(r"^Exception ignored (?:in|while)")
"""Before the traceback of an error in what Python takes apart at its end."""

_BARE = re.compile(r"^(?:(?:\w+\.)*(?:\w+(?:Error|Exception)|KeyboardInterrupt)|(?:\w+\.)+error)\s*$")
"""The same of an error that has no words."""

_ELSEWHERE = re.compile(r"(?:see|check) (?:the )?(?:root cause|error|stack trace)", re.IGNORECASE)
"""Of errors that say only that another process has one."""


def error_in(lines: Sequence[str]) -> str:
    """The error in these lines of a log that says most of what went wrong; "" where there is none.

    It is the last one with words of its own; else the first one without words, as what it cancels comes after it; else
    one that points to another.
    """
    found, most, is_ignored = "", 0, False
    for place, line in enumerate(lines):
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :].rstrip()
        if prefix[1] in _NO_END:
            continue
        is_ignored = is_ignored or _IGNORED.match(text) is not None
        says = 2 if _BARE.match(text) else 0 if not _ERROR.match(text) else 1 if _ELSEWHERE.search(text) else 3
        if is_ignored and says:
            is_ignored = False
        elif says > most or says == most == 3:
            reason = _reason(lines[place + 1 :]) if _VALIDATION.search(text) else []
            found, most = ": ".join([text, *reason]), says
    return printable(found, MAX_CHARACTERS)


def fallback_in(lines: Iterable[str]) -> str:
    """Why weights were read from disk, by the first such line of our loader; "" where there is none."""
    texts = (_PREFIX.sub("", line, count=1) for line in lines)
    found = next((text for text in texts if text.startswith(FALLBACK)), "")
    return printable(found.removeprefix(FALLBACK).strip(), MAX_CHARACTERS)


def _reason(lines: Sequence[str]) -> list[str]:
    """What a pydantic error says first, in these lines that come after its own."""
    found = []
    for line in lines[:2]:
        text = _PREFIX.sub("", line, count=1)
        found.append(text.strip().partition(" [type=")[0])
        if text.startswith("  "):
            break
    return found
