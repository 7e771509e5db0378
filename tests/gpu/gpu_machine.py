"""Where the tests on a GPU run: the GPU, or why they cannot run here. Imported before everything else of theirs."""

import importlib.metadata
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "scripts")]

from weightkeeper.recovery import gpu  # noqa: E402

REHEARSING = os.environ.get("WEIGHTKEEPER_REHEARSE") == "1"
GPUS = [] if REHEARSING else gpu.Gpu.visible()
GPU = next(iter(GPUS), None)
"""The one that a program here computes on, unless it takes several."""


def _why_not() -> str:
    if REHEARSING:
        return ""
    if GPU is None:
        return "no GPU here"
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "no vLLM here: put one for CUDA on PYTHONPATH, or name its directory in WEIGHTKEEPER_SITE"
    return f"vLLM {version} is for the CPU: run `make test-gpu`" if "cpu" in version else ""


WHY_NOT = _why_not()
"""Why these tests cannot run here; empty where they can."""

if not WHY_NOT and not REHEARSING:
    os.environ["WEIGHTKEEPER_TEST_DEVICE"] = "cuda"  # read by the engines of the CPU's tests, which these build upon


def wait_until_free(level: int, seconds: float = 60.0) -> int:
    """Wait until at most `level` bytes (and some slack) are in use on the GPU; the bytes then, or when time is over."""
    return gpu.wait_until_free([GPU], level, seconds)
