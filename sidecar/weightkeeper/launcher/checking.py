"""Asking the application whether it takes some arguments, in words that its user can act upon."""

import contextlib
import io
import logging
from types import ModuleType
from typing import Any

from weightkeeper.errors import WeightkeeperError


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
        return {"error": text}
    except (WeightkeeperError, ValueError) as error:
        return {"error": str(error) or type(error).__name__}
    except Exception as error:
        logging.getLogger(__name__).warning("the check of the arguments broke", exc_info=True)
        return {"error": f"{type(error).__name__}: {error}"}
    return {"ok": True}
