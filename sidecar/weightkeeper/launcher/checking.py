"""Asking the application whether it takes some arguments, in words that its user can act upon."""

import contextlib
import io
import logging
from types import ModuleType
from typing import Any

from weightkeeper.errors import WeightkeeperError

MAX_REASON_BYTES = 4096
"""Of a reason; a message may quote a whole configuration."""


def cut(text: str) -> str:
    """A reason of at most MAX_REASON_BYTES of UTF-8."""
    raw = text.encode(errors="replace")
    if len(raw) <= MAX_REASON_BYTES:
        return raw.decode()
    return raw[: MAX_REASON_BYTES - len("…".encode())].decode(errors="ignore") + "…"


def check(application: ModuleType, arguments: list[str]) -> dict[str, Any]:
    """Whether the application takes these arguments."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            application.check(arguments)
    except SystemExit as error:
        if error.code in (None, 0):
            return {"ok": True}
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        text = error.code if isinstance(error.code, str) else lines[-1].strip() if lines else f"exit code {error.code}"
        return {"error": cut(text)}
    except (WeightkeeperError, ValueError) as error:
        return {"error": cut(str(error)) or type(error).__name__}
    except Exception as error:
        logging.getLogger(__name__).warning("the check of the arguments broke", exc_info=True)
        return {"error": cut(f"{type(error).__name__}: {error}")}
    return {"ok": True}
