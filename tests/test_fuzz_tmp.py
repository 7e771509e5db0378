"""The header parser against the format, against the safetensors library, and against hostile files."""

import json
import math
import os
from pathlib import Path

import pytest
from badinputs.broken import FILES, HEADERS, LFS, ONE, STRICTER, build, safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from weightkeeper import files
from weightkeeper.errors import CheckpointError
from weightkeeper.files import open_regular
from weightkeeper.safetensors_header import BITS, MAX_HEADER_BYTES, TensorInfo, read_header

STRICTER_CODES = {"header_json", "entry", "dtype"}
"""What a header may be refused for that the library accepts; see the module's docstring."""

quietly = settings(deadline=None, max_examples=4000)


def read(path: Path) -> tuple[TensorInfo, ...]:
    with open_regular(path) as (descriptor, stamp):
        return read_header(descriptor, stamp.size, path)


def ours(path: Path) -> tuple[list | None, set[str]]:
    """What the header describes, or the codes of its faults."""
    try:
        return sorted((t.name, t.dtype, list(t.shape)) for t in read(path)), set()
    except CheckpointError as error:
        return None, {fault.code for fault in error.faults}


def library(path: Path) -> list | None:
    """What the safetensors library says of the same file."""
    try:
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return sorted((name, s.get_dtype(), s.get_shape()) for name, s in slices.items())
    except SafetensorError:
        return None


@st.composite
def headers(draw) -> tuple[dict, int]:
    """A valid header, and the bytes of data behind it. Entries are in any order."""
    entries, offset = {}, 0
    for name in draw(st.lists(st.text(st.characters(codec="utf-8")), max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        if math.prod(shape) * BITS[dtype] % 8:
            shape.append(4)
        nbytes = math.prod(shape) * BITS[dtype] // 8
        if name != "__metadata__":
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
    if draw(st.booleans()):
        text = st.text(st.characters(codec="utf-8"), max_size=5)
        entries["__metadata__"] = draw(st.none() | st.dictionaries(text, text, max_size=3))
    return dict(draw(st.permutations(sorted(entries.items(), key=lambda item: item[0])))), offset


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """One path for all examples of a property."""
    return tmp_path_factory.mktemp("header") / ONE


@quietly
@given(valid=headers(), blanks=st.integers(0, 9), ascii_only=st.booleans())
def test_valid_headers_are_read_as_written(file, valid, blanks, ascii_only):
    """Any valid header gives back its tensors in the order of their data, and what the library finds."""
    header, data_bytes = valid
    raw = json.dumps(header, ensure_ascii=ascii_only).encode() + b" " * blanks
    file.write_bytes(safetensors(raw, bytes(data_bytes)))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = read(file)
    assert {t.name: (t.dtype, list(t.shape), t.offset, t.offset + t.nbytes) for t in found} == {
        name: (entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in entries.items()
    }
    assert [t.offset for t in found] == sorted(t.offset for t in found)
    assert sorted((t.name, t.dtype, list(t.shape)) for t in found) == library(file)


def compare_with_the_library(path: Path) -> None:
    """What the library refuses is refused; what both accept is the same; ours is stricter in known ways only."""
    found, codes = ours(path)
    theirs = library(path)
    if found is not None:
        assert found == theirs
    elif theirs is not None:
        assert codes <= STRICTER_CODES


@quietly
@given(valid=headers(), data=st.data())
def test_damaged_bytes(file, valid, data):
    """Bytes changed, put in or taken out anywhere never crash the parser, and it agrees with the library."""
    header, data_bytes = valid
    raw = bytearray(safetensors(json.dumps(header).encode(), bytes(data_bytes)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        removed = data.draw(st.integers(0, 3))
        raw[at : at + removed] = data.draw(st.binary(max_size=3))
    file.write_bytes(raw)
    compare_with_the_library(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.sampled_from([*BITS, "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=6,
)


@quietly
@given(valid=headers(), data=st.data())
def test_damaged_meaning(file, valid, data):
    """JSON that is well-formed and wrong, a number, dtype or field changed: the same."""
    header, data_bytes = valid
    if not header:
        return
    name = data.draw(st.sampled_from(sorted(header)))
    entry = header[name]
    if isinstance(entry, dict) and data.draw(st.booleans()):
        field = data.draw(st.sampled_from([*entry, "x"]))
        entry[field] = data.draw(JSON | st.lists(st.integers(0, 40), max_size=3))
    else:
        header[name] = data.draw(JSON)
    file.write_bytes(safetensors(json.dumps(header).encode(), bytes(data_bytes + data.draw(st.integers(-1, 1)) % 99)))
    compare_with_the_library(file)


@pytest.mark.parametrize("case", FILES + HEADERS, ids=lambda case: case.name)
def test_the_library_refuses_the_broken_files_too(case, tmp_path):
    """The table's files are broken in the library's eyes as well, but for those listed as stricter."""
    build(case, tmp_path)
    if not (tmp_path / ONE).is_file():
        return
    assert (library(tmp_path / ONE) is not None) == (case.name in STRICTER)


def test_files_written_by_the_library(tmp_path):
    """What the library writes is read back: names, dtypes, shapes, bytes."""
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    tensors = {"w": numpy.ones((3, 5), numpy.float16), "s": numpy.array(2.0), "e": numpy.empty((0, 7), numpy.int8)}
    save_file(tensors, tmp_path / ONE, metadata={"format": "np"})
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in read(tmp_path / ONE)} == {
        "w": ("F16", (3, 5), 30),
        "s": ("F64", (), 8),
        "e": ("I8", (0, 7), 0),
    }


def test_the_data_is_never_read(tmp_path, monkeypatch):
    """Of a file whose data are a terabyte of nothing, only the header's bytes are read, and few before them."""
    nbytes = 2**40
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
    (tmp_path / ONE).write_bytes(safetensors(header))
    os.truncate(tmp_path / ONE, 8 + len(header) + nbytes)
    reads = []
    real = os.pread
    monkeypatch.setattr(files.os, "pread", lambda d, n, at: reads.append((at, n)) or real(d, n, at))
    assert read(tmp_path / ONE)[0].nbytes == nbytes
    assert reads == [(0, 64), (8, len(header))]


@pytest.mark.parametrize("announced", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_announced_length_is_not_believed(announced, tmp_path, monkeypatch):
    """A header over the format's limit is refused before a byte of it is read, though the file is long enough."""
    (tmp_path / ONE).write_bytes(announced.to_bytes(8, "little"))
    os.truncate(tmp_path / ONE, 2**40)
    reads = []
    real = os.pread
    monkeypatch.setattr(files.os, "pread", lambda d, n, at: reads.append(n) or real(d, n, at))
    assert ours(tmp_path / ONE) == (None, {"header_too_large"})
    assert reads == [64]


def test_a_hundred_thousand_tensors(tmp_path):
    """A header of 100,000 tensors is read whole."""
    entries = {
        f"model.layers.{n}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(100_000)
    }
    (tmp_path / ONE).write_bytes(safetensors(json.dumps(entries).encode(), bytes(100_000)))
    found = read(tmp_path / ONE)
    assert len(found) == 100_000
    assert found[-1] == TensorInfo("model.layers.99999.weight", "U8", (1,), 99_999, 1)


HOSTILE = {
    "a name twice at the end of many": b"{%s,%s}" % (b",".join(b'"%d":1' % n for n in range(200_000)), b'"199999":1'),
    "a shape of a million dimensions": b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}'
    % b",".join([b"18446744073709551615"] * 1_000_000),
    "numbers of many digits": b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}'
    % b",".join([b"9" * 4000] * 1_000),
    "a name of ten million letters": b'{"%s":1}' % (b"x" * 10_000_000),
    "objects in objects": b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_headers_made_to_cost_time(header, tmp_path):
    """Headers that cost a careless parser minutes or its stack are refused, with a message that can be read."""
    (tmp_path / ONE).write_bytes(safetensors(header))
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / ONE)
    assert len(str(caught.value)) < 10_000


def test_a_pointer_is_told_from_a_header(tmp_path):
    """A git-lfs pointer is named as one, whatever number its first 8 bytes are."""
    (tmp_path / ONE).write_bytes(LFS)
    assert ours(tmp_path / ONE) == (None, {"lfs_pointer"})
