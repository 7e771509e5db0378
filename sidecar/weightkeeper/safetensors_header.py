"""The header of a safetensors file: eight bytes of length, then JSON. Read within limits, without the data.

The checks are those of the safetensors library and of the format's text, whichever asks for more. Stricter than
the library (0.8) in what no known writer writes: a name given twice, a header that does not begin with `{`, fields
other than the three of the format, and an entry or dtype in another JSON form.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weightkeeper.errors import CheckpointError, Fault
from weightkeeper.files import read_at, refusal, require_content, shown, unique

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_UNSIGNED = 2**64 - 1

_FIELDS = {"dtype", "shape", "data_offsets"}

NAMED = 5
"""Tensors that a fault names; of the others it gives the number."""

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""The format's dtypes and the bits of one element."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    Attributes:
        dtype: the format's name, `BF16`.
        shape: elements in each dimension.
        offset: bytes from the end of the header to the first element.
        nbytes: of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _EntryError(Exception):
    def __init__(self, code: str, message: str):
        self.code = code
        super().__init__(message)


def read_header(descriptor: int, size: int, path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of an open file of `size` bytes, in the order of their data.

    Raises:
        CheckpointError: with every fault found in this file.
    """
    head = read_at(descriptor, min(size, 64))
    require_content(path, head)
    if size < 8:
        raise refusal(path, "cut", f"{size} bytes, too short for any safetensors file; fetch it again")
    nbytes = int.from_bytes(head[:8], "little")
    if nbytes > MAX_HEADER_BYTES:
        raise refusal(
            path,
            "header_too_large",
            f"its first 8 bytes announce a header of {nbytes} bytes, the format allows {MAX_HEADER_BYTES}; "
            f"it begins with {head[:32]!r}: is this a safetensors file?",
        )
    if 8 + nbytes > size:
        raise refusal(
            path,
            "header_past_file",
            f"a header of {nbytes} bytes in a file of {size}: cut short, fetch it again",
        )
    return parse_header(read_at(descriptor, nbytes, 8), size - 8 - nbytes, path)


def parse_header(raw: bytes, data_bytes: int, path: Path) -> tuple[TensorInfo, ...]:
    """The tensors that a header's JSON describes, in the order of their data; `data_bytes` follow the header.

    Raises:
        CheckpointError: with every fault found.
    """
    entries = _entries(raw, path)
    tensors: list[TensorInfo] = []
    problems: dict[str, list[str]] = {}
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(name, entry))
        except _EntryError as error:
            problems.setdefault(error.code, []).append(str(error))
    if len(tensors) == len(entries):
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.offset + tensor.nbytes))
        _cover(tensors, data_bytes, problems)
    if problems:
        faults = [Fault(shown(path), code, _sentence(texts)) for code, texts in problems.items()]
        raise CheckpointError(shown(path), faults)
    return tuple(tensors)


def _entries(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        if raw[:1] != b"{":
            raise ValueError(f"it begins with {raw[:16]!r} instead of '{{'")
        parse_int = _no_minus_zero if b"-0" in raw else None  # seldom, and dear
        entries = json.loads(raw.decode(), object_pairs_hook=unique, parse_int=parse_int, parse_constant=_not_a_number)
        metadata = entries.pop("__metadata__", None)
        if metadata is not None and not _is_text_to_text(metadata):
            raise ValueError("`__metadata__` is not a table of texts")
    except (ValueError, RecursionError) as error:
        raise refusal(path, "header_json", f"its header is broken: {shown(str(error))}; fetch it again") from error
    return entries


def _no_minus_zero(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no whole number")
    return int(text)


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _is_text_to_text(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) and _is_unicode(k + v) for k, v in value.items())


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no other reader could be asked for this name
        return False
    return True


def _tensor(name: str, entry: object) -> TensorInfo:
    if not _is_unicode(name) or not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _EntryError("entry", f"{_called(name)} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_unsigned(shape) or not _is_unsigned(offsets) or len(offsets) != 2:
        raise _EntryError("entry", f"{_called(name)} has a shape or offsets that are not whole numbers of 64 bits")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _EntryError("dtype", f"{_called(name)} has the unknown dtype '{shown(str(dtype)[:32])}'")
    begin, end = offsets
    if end < begin:
        raise _EntryError("descending", f"{_called(name)} ends at {end}, before its begin at {begin}")
    nbytes = _nbytes(dtype, shape)
    if nbytes != end - begin:
        asked = "more than 64 bits can count" if nbytes is None else f"{nbytes}"
        text = f"has {end - begin} bytes, its shape {_dimensions(shape)} in {dtype} takes {asked}"
        raise _EntryError("size", f"{_called(name)} {text}")
    return TensorInfo(name, dtype, tuple(shape), begin, end - begin)


def _called(name: str) -> str:
    return f"tensor '{shown(name, 200)}'"


def _is_unsigned(values: object) -> bool:
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110  half a million numbers are usual, and a generator takes twice as long
        if type(value) is not int or not 0 <= value <= MAX_UNSIGNED:
            return False
    return True


def _nbytes(dtype: str, shape: list[int]) -> int | float | None:
    """Bytes of a tensor, with a fraction where elements end inside a byte; None past 64 bits at any step."""
    bits = 1
    for factor in (*shape, BITS[dtype]):
        bits *= factor
        if bits > MAX_UNSIGNED:
            return None
    return bits // 8 if bits % 8 == 0 else bits / 8


def _dimensions(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"[{', '.join(map(str, shape[:8]))}, … {len(shape)} dimensions]"


def _cover(tensors: list[TensorInfo], data_bytes: int, problems: dict[str, list[str]]) -> None:
    """Every byte of the data belongs to exactly one tensor."""
    reached = 0
    for tensor in tensors:
        if tensor.offset < reached:
            text = f"{_called(tensor.name)} begins at {tensor.offset}, inside the tensor before it"
            problems.setdefault("overlap", []).append(text)
        elif tensor.offset > reached:
            text = f"{tensor.offset - reached} bytes before {_called(tensor.name)} belong to no tensor"
            problems.setdefault("hole", []).append(text)
        reached = max(reached, tensor.offset + tensor.nbytes)
    if reached > data_bytes:
        text = f"cut short: its tensors take {reached} bytes, {data_bytes} are there; fetch it again"
        problems.setdefault("cut", []).append(text)
    elif reached < data_bytes:
        text = f"{data_bytes - reached} bytes behind the last tensor belong to no tensor; fetch it again"
        problems.setdefault("surplus", []).append(text)


def _sentence(texts: list[str]) -> str:
    more = f"; and {len(texts) - NAMED} more like these" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more
