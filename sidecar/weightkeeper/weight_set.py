"""Which files of a directory make up its model, decided from names and the index as vLLM's loaders do."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightkeeper.errors import CheckpointError, Fault
from weightkeeper.files import explain, read_json, refusal, shown

LoadFormat = Literal["safetensors", "mistral"]

INDEXES: dict[LoadFormat, str] = {
    "safetensors": "model.safetensors.index.json",
    "mistral": "consolidated.safetensors.index.json",
}
"""The index that each of vLLM's load formats reads."""

CONFIGS = ("config.json", "params.json", "modules.json", "sparse_linear.pt", "colbert_linear.pt")
"""Beside the weights: the model's config in either format, and what some embedding models add."""

CONFIG_ENDS = ("quantize_config.json", "quant_config.json", "quantization_config.json", ".py")
"""vLLM finds quantization configs by the end of the name; Python files are the model's own code."""

MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""What vLLM reads in a folder that `modules.json` names (dense layers of embedding models)."""

OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

CONVERT = (
    "only safetensors can be served, convert with transformers: "
    "`AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)`"
)

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors", re.ASCII)
_PART = re.compile(r"consolidated\.\d+\.safetensors", re.ASCII)
_FOLDER = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Ignored:
    """Weights that are there and take no part. `reason` is for people."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The files that make up a model, by name.

    Attributes:
        load_format: vLLM's name for the loader that reads exactly these weights.
        weights: names of the weight files.
        configs: names of the files that shape the weights or how they are read, the index among them.
        index: tensor → file, where there is an index.
        faults: what is wrong with the choice; the files themselves have not been looked at.
    """

    load_format: LoadFormat
    weights: tuple[str, ...]
    configs: tuple[str, ...]
    index: Mapping[str, str] | None
    ignored: tuple[Ignored, ...]
    faults: tuple[Fault, ...]


def choose(directory: Path) -> WeightSet:
    """The files of a directory that vLLM loads when it is told to use `load_format`.

    Raises:
        CheckpointError: the directory cannot be read, or there are no safetensors weights in it.
    """
    if set("*?[") & set(os.fspath(directory)):
        message = "vLLM takes `*`, `?` and `[` in a path as a pattern and may load another folder; rename it"
        raise refusal(directory, "path_pattern", message)
    names, folders = _list(directory)
    found = [name for name in names if name.endswith(".safetensors")]
    if not found and not any(index in names for index in INDEXES.values()):
        raise _no_weights(directory, names, folders)
    faults: list[Fault] = []
    load_format = _load_format(names, found)
    configs = {name for name in names if name in CONFIGS or name.endswith(CONFIG_ENDS)}
    index, weights = None, found
    if INDEXES[load_format] in names:
        configs.add(INDEXES[load_format])
        index = _read_index(directory / INDEXES[load_format], load_format, faults)
        weights = sorted(set(index.values()))
    else:
        faults += _one_set(directory, found)
    if "modules.json" in names:
        configs.update(_module_files(directory, faults))
    for name in (*weights, *sorted(configs)):
        if not name.isprintable():
            message = "its name has invisible or broken characters; rename it"
            faults.append(Fault(shown(directory / name), "name", message))
    ignored = _ignored(set(names) - set(weights) - configs, folders, configs, INDEXES[load_format])
    return WeightSet(load_format, tuple(weights), tuple(sorted(configs)), index, ignored, tuple(faults))


def _list(directory: Path) -> tuple[list[str], list[str]]:
    """Names in a directory, and those of its folders that hold weights. Hidden ones are nobody's weights."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except (OSError, ValueError) as error:
        raise explain(directory, error) from error
    return names, [name for name in names if _holds(directory / name, (".safetensors", *OTHER_FORMATS))]


def _holds(folder: Path, ends: tuple[str, ...]) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(ends) for entry in entries)
    except OSError:  # no folder, or one that nobody here can look into
        return False


def _load_format(names: list[str], found: list[str]) -> LoadFormat:
    if INDEXES["safetensors"] in names:
        return "safetensors"
    if any(name.startswith("consolidated") for name in found) or not found:
        return "mistral"
    return "safetensors"


def _read_index(path: Path, load_format: LoadFormat, faults: list[Fault]) -> dict[str, str]:
    """Tensor → file name; what is wrong with the index or leads elsewhere goes to `faults`."""
    try:
        table = read_json(path, once=True).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise refusal(path, "index", "its `weight_map` is no table of tensor → file name; fetch the index again")
    except CheckpointError as error:
        faults += error.faults
        return {}
    wrong = {name: reason for name in set(table.values()) if (reason := _index_reason(name, load_format))}
    faults += [Fault(shown(path), "index_path", f"names '{shown(name)}': {wrong[name]}") for name in sorted(wrong)]
    return {tensor: name for tensor, name in table.items() if name not in wrong}


def _index_reason(name: str, load_format: LoadFormat) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        return "outside the checkpoint's directory; every shard has to lie beside the index"
    if "/" in name:
        return "in a sub-folder, where vLLM does not look; every shard has to lie beside the index"
    if not name.endswith(".safetensors") or name.startswith(".") or "\0" in name:
        return f"no safetensors file; {CONVERT}"
    if load_format == "mistral" and not name.startswith("consolidated"):
        return f"vLLM reads only consolidated*.safetensors by this index; rename it to {INDEXES['safetensors']}"
    return ""


def _one_set(directory: Path, found: list[str]) -> list[Fault]:
    """Without an index every file is loaded, so there must not be two models, nor a part of one."""
    shards: dict[tuple[str, int], set[int]] = {}
    sets: dict[str, None] = {}
    others = []
    for name in found:
        if match := _SHARD.fullmatch(name):
            sets[f"{match['stem']}-*-of-{match['total']}.safetensors"] = None
            shards.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
        elif _PART.fullmatch(name):
            sets["consolidated.*.safetensors"] = None
        elif name == "model.safetensors" or name.startswith("consolidated"):
            sets[name] = None
        else:
            others.append(name)
    if any(name.startswith("consolidated") for name in sets):
        sets |= dict.fromkeys(others)  # vLLM would take the consolidated file and leave these
    faults = []
    if len(sets) > 1:
        which = ", ".join(map(shown, sets))
        message = f"{len(sets)} sets of weights and no {INDEXES['safetensors']}: {which}; move all but one away"
        faults.append(Fault(shown(directory), "two_sets", message))
    for (stem, total), numbers in shards.items():
        wanted = range(total) if 0 in numbers else range(1, total + 1)
        missing = total - sum(number in wanted for number in numbers)
        if missing:
            gap = next(number for number in wanted if number not in numbers)
            message = f"{missing} of {total} shards are missing, the first is number {gap}; fetch them"
            faults.append(Fault(shown(directory / f"{stem}-*-of-*.safetensors"), "missing_shard", message))
    return faults


def _module_files(directory: Path, faults: list[Fault]) -> list[str]:
    """Files in the folders that a sentence-transformers `modules.json` names."""
    try:
        content = read_json(directory / "modules.json", top=(dict, list))
    except CheckpointError as error:
        faults += error.faults
        return []
    modules = content.get("modules") if isinstance(content, dict) else content
    paths = [module.get("path") for module in modules or () if isinstance(module, dict)]
    folders = {path for path in paths if isinstance(path, str) and _FOLDER.fullmatch(path)}
    return [f"{f}/{name}" for f in folders for name in MODULE_FILES if os.path.lexists(directory / f / name)]


def _ignored(names: set[str], folders: list[str], configs: set[str], index: str) -> tuple[Ignored, ...]:
    found = []
    for name in sorted(names):
        if name.endswith(".safetensors"):
            found.append(Ignored(name, f"{index} does not name it"))
        elif name.endswith(".safetensors.index.json"):
            found.append(Ignored(name, f"the index that counts is {index}"))
        elif name.endswith(OTHER_FORMATS):
            found.append(Ignored(name, "not safetensors"))
    for folder in folders:
        if not any(config.startswith(f"{folder}/") for config in configs):
            found.append(Ignored(f"{folder}/", "weights in sub-folders are not read"))
    return tuple(found)


def _no_weights(directory: Path, names: list[str], folders: list[str]) -> CheckpointError:
    others = [name for name in names if name.endswith(OTHER_FORMATS)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return refusal(directory, "not_safetensors", f"weights in another format: {shown(others[0])}{more}; {CONVERT}")
    hint = "fetch the model's *.safetensors files"
    if "snapshots" in names:
        hint = "this is a Hugging Face cache folder, name a folder in its snapshots/"
    elif inner := [name for name in folders if _holds(directory / name, (".safetensors",))]:
        hint = f"there are weights in {shown(inner[0])}/, name that folder"
    return refusal(directory, "no_weights", f"no safetensors weights here; {hint}")
