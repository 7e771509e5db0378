"""The versions that an image has, as far as its labels say so. Weights of one are not those of another. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

VLLM_LABEL = "weightkeeper.vllm"
TORCH_LABEL = "weightkeeper.torch"
"""On the images of keepers and engines; the Dockerfile sets them, and compares them with what is installed."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is installed in an image.

    Attributes:
        vllm: version; "" where it is not known.
        torch: likewise.
    """

    vllm: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine that is to be made from another image, and the keeper that holds its weights."""

    engine: Build
    keeper: Build

    @property
    def difference(self) -> tuple[str, str] | None:
        """What the engine has and what the keeper has, in words, where the two are known to differ."""
        for name in ("vllm", "torch"):
            ours, theirs = getattr(self.engine, name), getattr(self.keeper, name)
            if ours and theirs and ours != theirs:
                shown = {"vllm": "vLLM"}.get(name, name)
                return f"{shown} {ours}", f"{shown} {theirs}"
        return None

    @property
    def is_known(self) -> bool:
        return bool(self.engine.vllm and self.keeper.vllm)


def of_labels(labels: Mapping[str, str] | None) -> Build:
    """What the labels of an image, or of a container made from it, say."""
    labels = labels or {}
    return Build(labels.get(VLLM_LABEL, ""), labels.get(TORCH_LABEL, ""))
