"""A checkpoint: what is in it, found without torch and without reading tensors, or every reason to refuse it."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weightkeeper.errors import CheckpointError, Fault
from weightkeeper.files import Stamp, open_regular, read_json, refusal, shown
from weightkeeper.safetensors_header import NAMED, TensorInfo, read_header
from weightkeeper.weight_set import CONVERT, Ignored, LoadFormat, WeightSet, choose

logger = logging.getLogger(__name__)

MAX_FAULTS = 100
"""Faults that one error lists; of the others it gives the number."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint.

    Attributes:
        name: path inside the checkpoint.
        path: where the bytes are, all links resolved.
        stamp: of the file when it was looked at.
    """

    name: str
    path: Path
    stamp: Stamp

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stamp.size


@dataclass(frozen=True, slots=True)
class WeightFile(File):
    """`tensors` are in the order of their data."""

    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class Ties:
    """What config and files say about an output head that shares the embeddings' weights.

    Attributes:
        declared: `tie_word_embeddings` of config.json; None where it is silent and the model class decides.
        heads: tensors of an output head that are in the files all the same.
    """

    declared: bool | None
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        path: the directory, as the user named it: what vLLM has to be given.
        load_format: vLLM's `--load-format` that reads exactly `weight_files`; its `auto` may choose others.
        config_format: vLLM's `--config-format` to go with it.
        config_files: beside the weights, shaping them or how they are read; the index is one.
        ignored: weights that are there and take no part.
    """

    path: Path
    load_format: LoadFormat
    config_format: Literal["hf", "mistral"]
    weight_files: tuple[WeightFile, ...]
    config_files: tuple[File, ...]
    ties: Ties
    ignored: tuple[Ignored, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """Everything that counts for the identity."""
        return (*self.weight_files, *self.config_files)

    @property
    def tensor_count(self) -> int:
        return sum(len(file.tensors) for file in self.weight_files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.nbytes for file in self.weight_files for tensor in file.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files: what there is to hash."""
        return sum(file.size for file in self.files)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Look at a checkpoint: a directory of safetensors files, or the one file of such a directory.

    Source of the choice between several sets of weights: vLLM's `DefaultModelLoader`.

    Raises:
        CheckpointError: with every fault found.
    """
    if not os.fspath(path):
        raise refusal("(empty path)", "missing", "no path is given; name the folder that holds the model")
    try:
        directory, only = _directory(Path(path))
        chosen = choose(directory)
    except CheckpointError as error:
        raise CheckpointError(shown(path), error.faults) from error
    faults = list(chosen.faults)
    weights = tuple(file for name in chosen.weights if (file := _look(directory, name, faults, weight=True)))
    configs = tuple(file for name in chosen.configs if (file := _look(directory, name, faults)))
    config = _config(directory, configs, faults)
    if only and chosen.weights and chosen.weights != (only,):
        message = f"vLLM loads whole folders, and of {shown(directory)} it would load {len(chosen.weights)} file(s)"
        faults.append(Fault(shown(path), "one_of_many", f"{message}; name the folder, or put this file into its own"))
    faults += _contents(directory, chosen, weights)
    if faults := list(dict.fromkeys(faults)):
        raise CheckpointError(shown(path), _first(shown(path), faults))
    for ignored in chosen.ignored:
        logger.info("ignored %s/%s: %s", shown(directory), shown(ignored.name), ignored.reason)
    return Checkpoint(
        path=directory,
        load_format=chosen.load_format,
        config_format=_config_format(chosen),
        weight_files=weights,
        config_files=configs,
        ties=_ties(config, weights),
        ignored=chosen.ignored,
    )


def _directory(path: Path) -> tuple[Path, str | None]:
    """The directory to look at, and the one file in it that the user named."""
    if os.path.isdir(path) or not os.path.exists(path):
        return path, None  # what is not there is explained where it is opened
    if path.suffix != ".safetensors":
        raise refusal(path, "not_safetensors", f"neither a folder nor a .safetensors file; {CONVERT}")
    return path.parent, path.name


def _look(directory: Path, name: str, faults: list[Fault], weight: bool = False) -> File | None:
    path = directory / name
    try:
        with open_regular(path) as (descriptor, stamp):
            real = Path(os.path.realpath(path))
            if weight:
                return WeightFile(name, real, stamp, read_header(descriptor, stamp.size, path))
            return File(name, real, stamp)
    except CheckpointError as error:
        faults += error.faults
        return None


def _config(directory: Path, configs: Iterable[File], faults: list[Fault]) -> dict[str, Any]:
    if not any(file.name == "config.json" for file in configs):
        return {}
    try:
        return read_json(directory / "config.json")
    except CheckpointError as error:
        faults += error.faults
        return {}


def _config_format(chosen: WeightSet) -> Literal["hf", "mistral"]:
    ours, other = ("params.json", "config.json")
    if ours in chosen.configs and (chosen.load_format == "mistral" or other not in chosen.configs):
        return "mistral"
    return "hf"


def _ties(config: dict[str, Any], weights: Iterable[WeightFile]) -> Ties:
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    declared = config.get("tie_word_embeddings", inner)
    names = (tensor.name for file in weights for tensor in file.tensors)
    heads = tuple(name for name in names if "lm_head" in name.split(".") or name == "output.weight")
    return Ties(declared if isinstance(declared, bool) else None, heads)


def _contents(directory: Path, chosen: WeightSet, weights: tuple[WeightFile, ...]) -> list[Fault]:
    """Faults between files: a tensor in two of them, or in another one than the index says."""
    owners: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for file in weights:
        for tensor in file.tensors:
            owner = owners.setdefault(tensor.name, file.name)
            if owner != file.name:
                twice.setdefault((owner, file.name), []).append(tensor.name)
    faults = []
    if all(fault.code != "two_sets" for fault in chosen.faults):
        for (first, second), names in twice.items():
            message = f"{_some(names)} also in {shown(first)}; keep one file, or fetch a matching index"
            faults.append(Fault(shown(directory / second), "duplicate_tensor", message))
    held = {file.name: {tensor.name for tensor in file.tensors} for file in weights}
    astray: dict[str, list[str]] = {}
    for name, file_name in (chosen.index or {}).items():
        if file_name in held and name not in held[file_name]:
            astray.setdefault(file_name, []).append(f"{name} (in {owners[name]})" if name in owners else name)
    for file_name, names in astray.items():
        message = f"the index puts {_some(names)} here, the file has none; fetch shards and index of one revision"
        faults.append(Fault(shown(directory / file_name), "index_mismatch", message))
    if weights and not owners and not faults and not chosen.faults:
        faults.append(Fault(shown(directory), "no_tensors", "its files hold no tensor at all; fetch them again"))
    return faults


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    named = ", ".join(shown(name, 200) for name in names[:NAMED])
    return f"{len(names)} tensor(s): {named}{more}"


def _first(path: str, faults: list[Fault]) -> list[Fault]:
    if len(faults) <= MAX_FAULTS:
        return faults
    more = Fault(path, "more", f"{len(faults) - MAX_FAULTS} more faults that are not listed")
    return [*faults[:MAX_FAULTS], more]
