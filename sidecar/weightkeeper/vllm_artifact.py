"""All compiled code of a model as one file, which vLLM writes by itself with torch 2.12 and, if asked, with 2.10.

Without it a start unpickles the model's graph, splits it again and loads its pieces one after the other.
"""

from collections.abc import MutableMapping
from typing import Any

from vllm import envs
from vllm.utils.torch_utils import is_torch_equal_or_newer

from weightkeeper import vllm_conditions

NAME = "VLLM_USE_MEGA_AOT_ARTIFACT"
"""vLLM's variable. It is part of the key of its compile caches: with another value the first start compiles."""

FIRST_TORCH = "2.10.0"

_NEEDED = ("VLLM_USE_AOT_COMPILE", "VLLM_USE_STANDALONE_COMPILE")


def ask_for(environment: MutableMapping[str, str]) -> None:
    """Have vLLM use it where it can, unless the user has decided. Before vLLM reads its variables for good."""
    able = hasattr(envs, NAME) and is_torch_equal_or_newer(FIRST_TORCH) and not missing()
    if able and not getattr(envs, NAME):
        environment.setdefault(NAME, "1")


def why_not(config: Any) -> str:
    """Why this process does without; empty where it does not. Of vLLM's configuration."""
    if why := vllm_conditions.is_not_compiled(config):
        return why
    if not hasattr(envs, NAME):
        return "this vLLM has none"
    if getattr(envs, NAME):
        return ""
    return missing() or f"{NAME} is 0, or torch is older than {FIRST_TORCH}"


def missing() -> str:
    """What of vLLM's variables stands against it, in words."""
    return next((f"{name} is off" for name in _NEEDED if not getattr(envs, name, False)), "")
