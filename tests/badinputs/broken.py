"""Broken checkpoints as data: the files, byte for byte, and exactly the faults that have to be named.

`build(case, folder)` writes a case. A value of `files` is the content of a file, or a function that makes
something else at a path. `faults` are pairs of the path inside the checkpoint ("" is the checkpoint) and code.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def one(name: bytes = b"a") -> bytes:
    """A sound file with one float."""
    return safetensors(b'{"%s":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' % name, b"\0\0\x80\x3f")


def index(*places: tuple[bytes, bytes]) -> bytes:
    return b'{"metadata":{},"weight_map":{%s}}' % b",".join(b'"%s":"%s"' % place for place in places)


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def folder(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    """Bound from inside its folder: the whole path may be too long for a socket."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


@dataclass(frozen=True)
class Case:
    name: str
    files: dict[str, bytes | Callable[[Path], None]]
    faults: list[tuple[str, str]]
    words: tuple[str, ...] = ()
    """All of these are in the message."""


def build(case: Case, directory: Path) -> None:
    for name, content in case.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)


ONE = "model.safetensors"
SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
F32 = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def alone(name: str, content: bytes | Callable[[Path], None], code: str, *words: str) -> Case:
    """A case of one weight file with one fault."""
    return Case(name, {ONE: content}, [(ONE, code)], words)


FILES = [
    alone("empty file", b"", "cut", "0 bytes"),
    alone("seven bytes", b"\0" * 7, "cut", "7 bytes, too short"),
    alone("git-lfs pointer", LFS, "lfs_pointer", "`git lfs pull`"),
    alone("error page", b"<!DOCTYPE html><html><body>404</body></html>", "header_too_large", "<!DOCTYPE html>"),
    alone("header over the limit", (100_000_001).to_bytes(8, "little") + b"{}", "header_too_large", "100000001"),
    alone("endless header", b"\xff" * 8 + b"{}", "header_too_large", "18446744073709551615"),
    alone("header past the file", (100).to_bytes(8, "little") + b"{}", "header_past_file", "100 bytes", "file of 10"),
    alone("cut in the header", one()[:20], "header_past_file", "cut short"),
    alone("cut in the data", one()[:-1], "cut", "take 4 bytes, 3 are there"),
    alone("bytes at the end", one() + b"!", "surplus", "1 bytes behind the last tensor"),
    alone("a folder", folder, "not_a_file", "a directory where a file should be"),
    alone("a FIFO", fifo, "not_a_file", "a FIFO where a file should be"),
    alone("a socket", unix_socket, "not_a_file", "a socket where a file should be"),
    alone("an endless device", link("/dev/zero"), "not_a_file", "a character device where a file should be"),
    alone("a link to itself", link(ONE), "link_loop"),
    alone("a dangling link", link("../blobs/4d7a"), "dangling_link", "/blobs/4d7a", "blobs:ro`", "`- HOST_FOLDER:"),
]

HEADERS = [
    alone("no header", safetensors(b""), "header_json", "begins with b''"),
    alone("no JSON", safetensors(b"{nonsense}"), "header_json"),
    alone("no object", safetensors(b"[1, 2]"), "header_json", "begins with b'[1, 2]'"),
    alone("a blank first", safetensors(b' {"a":%s}' % F32, b"1234"), "header_json"),
    alone("half an object", safetensors(b'{"a":%s' % F32, b"1234"), "header_json"),
    alone("two objects", safetensors(b'{"a":%s}{}' % F32, b"1234"), "header_json"),
    alone("zero bytes for padding", safetensors(b'{"a":%s}\0\0' % F32, b"1234"), "header_json"),
    alone("not UTF-8", safetensors(b'{"\xff":%s}' % F32, b"1234"), "header_json"),
    alone("UTF-16", safetensors('{"a":1}'.encode("utf-16")), "header_json"),
    alone("a byte order mark", safetensors(b'\xef\xbb\xbf{"a":%s}' % F32, b"1234"), "header_json"),
    alone("a line break in a name", safetensors(b'{"a\n":%s}' % F32, b"1234"), "header_json"),
    alone("half a surrogate pair", safetensors(rb'{"\ud800":%s}' % F32, b"1234"), "entry"),
    alone("a million brackets", safetensors(b'{"a":' + b"[" * 1_000_000), "header_json"),
    alone("NaN", safetensors(b'{"a":NaN}'), "header_json", "NaN is not JSON"),
    alone("a name twice", safetensors(b'{"a":%s,"a":%s}' % (F32, F32), b"1234"), "header_json", "'a' is given twice"),
    alone("metadata of numbers", safetensors(b'{"__metadata__":{"x":1}}'), "header_json", "`__metadata__`"),
    alone("metadata in a list", safetensors(b'{"__metadata__":["x"]}'), "header_json", "`__metadata__`"),
    alone("metadata twice", safetensors(b'{"__metadata__":{},"__metadata__":{}}'), "header_json", "twice"),
    alone("an entry of the wrong kind", safetensors(b'{"a":7}'), "entry", "tensor 'a'"),
    alone("an entry as a list", safetensors(b'{"a":["F32",[1],[0,4]]}', b"1234"), "entry"),
    alone("no shape", safetensors(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', b"1234"), "entry"),
    alone("a field more", safetensors(b'{"a":%s,"x":1}}' % F32[:-1], b"1234"), "entry"),
    alone("a field twice", safetensors(b'{"a":%s,"shape":[1]}}' % F32[:-1], b"1234"), "header_json", "'shape'"),
    alone("a negative shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[-1]"), b"1234"), "entry"),
    alone("a fraction in a shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[1.0]"), b"1234"), "entry"),
    alone("minus zero in a shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[-0]"), b"1234"), "header_json"),
    alone("true in a shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[true]"), b"1234"), "entry"),
    alone("65 bits in a shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[0,%d]" % 2**64)), "entry"),
    alone("5,000 digits", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[%s]" % (b"9" * 5000))), "header_json"),
    alone("three offsets", safetensors(b'{"a":%s}' % F32.replace(b",4]", b",4,4]"), b"1234"), "entry"),
    alone("an unknown dtype", safetensors(b'{"a":%s}' % F32.replace(b"F32", b"F33"), b"1234"), "dtype", "'F33'"),
    alone("torch's dtype", safetensors(b'{"a":%s}' % F32.replace(b"F32", b"float32"), b"1234"), "dtype", "'float32'"),
    alone("a dtype as an object", safetensors(b'{"a":%s}' % F32.replace(b'"F32"', b'{"F32":null}'), b"1234"), "dtype"),
    alone("less than its shape", safetensors(b'{"a":%s}' % F32.replace(b"[1]", b"[2]"), b"1234"), "size", "[2] in F32"),
    alone("half a byte", safetensors(b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"12"), "size", "1.5"),
    alone(
        "a shape past 64 bits",
        safetensors(b'{"a":{"dtype":"F32","shape":[%d,4,0],"data_offsets":[0,0]}}' % 2**63),
        "size",
        "more than 64 bits can count",
    ),
    alone(
        "a size past 64 bits",
        safetensors(b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,0]}}' % 2**62),
        "size",
        "more than 64 bits can count",
    ),
    alone("descending offsets", safetensors(b'{"a":%s}' % F32.replace(b"0,4", b"4,0"), b"1234"), "descending", "4"),
    alone(
        "a hole at the start", safetensors(b'{"a":%s}' % F32.replace(b"0,4", b"4,8"), b"12345678"), "hole", "4 bytes"
    ),
    alone(
        "a hole between",
        safetensors(b'{"a":%s,"b":%s}' % (F32, F32.replace(b"0,4", b"5,9")), b"123456789"),
        "hole",
        "1 bytes before tensor 'b'",
    ),
    alone(
        "an overlap",
        safetensors(b'{"a":%s,"b":%s}' % (F32, F32.replace(b"0,4", b"2,6")), b"123456"),
        "overlap",
        "'b' begins at 2",
    ),
    alone("the same bytes twice", safetensors(b'{"a":%s,"b":%s}' % (F32, F32), b"1234"), "overlap"),
    Case(
        "several faults in one header",
        {ONE: safetensors(b'{"a":%s,"b":%s}' % (F32.replace(b"F32", b"X"), F32.replace(b"[1]", b"[2]")), b"1234")},
        [(ONE, "dtype"), (ONE, "size")],
    ),
    Case(
        "more faults than anybody reads",
        {ONE: safetensors(b"{%s}" % b",".join(b'"%d":1' % n for n in range(1000)))},
        [(ONE, "entry")],
        ("and 995 more like these",),
    ),
]

SETS = [
    Case("an empty folder", {}, [("", "no_weights")], ("no safetensors weights here",)),
    Case("only PyTorch weights", {"pytorch_model.bin": b"x"}, [("", "not_safetensors")], ("save_pretrained",)),
    Case("only GGUF", {"m.gguf": b"x", "n.gguf": b"x"}, [("", "not_safetensors")], ("m.gguf and 1 more",)),
    Case("weights one level down", {"original/" + ONE: one()}, [("", "no_weights")], ("name that folder",)),
    Case("a cache folder", {"snapshots/r/" + ONE: one()}, [("", "no_weights")], ("name a folder in its snapshots/",)),
    Case(
        "a missing shard by the index",
        {INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())), SHARD_1: one()},
        [(SHARD_2, "missing")],
    ),
    Case(
        "every fault of several shards",
        {INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())), SHARD_1: one()[:-1], SHARD_2: LFS},
        [(SHARD_1, "cut"), (SHARD_2, "lfs_pointer")],
    ),
    Case(
        "a missing shard without an index",
        {SHARD_1: one()},
        [("model-*-of-*.safetensors", "missing_shard")],
        ("1 of 2 shards are missing, the first is number 2",),
    ),
    Case("a billion shards", {"m-1-of-999999999.safetensors": one()}, [("m-*-of-*.safetensors", "missing_shard")]),
    Case("no shard at all", {INDEX: index((b"a", SHARD_1.encode()))}, [(SHARD_1, "missing")]),
    Case(
        "an index that leads outside",
        {
            INDEX: index((b"a", b"../x.safetensors"), (b"b", b"/etc/y.safetensors"), (b"c", b"s/z.safetensors")),
            "s/z.safetensors": one(b"c"),
        },
        [(INDEX, "index_path"), (INDEX, "index_path"), (INDEX, "index_path")],
        ("'../x.safetensors': outside", "'/etc/y.safetensors': outside", "'s/z.safetensors': in a sub-folder"),
    ),
    Case("an index of PyTorch files", {INDEX: index((b"a", b"p.bin"))}, [(INDEX, "index_path")], ("p.bin",)),
    Case("an index that is a pointer", {INDEX: LFS, ONE: one()}, [(INDEX, "lfs_pointer")]),
    Case("an index of nothing", {INDEX: b'{"weight_map":{}}', ONE: one()}, [(INDEX, "index")]),
    Case("an index without a map", {INDEX: b"{}", ONE: one()}, [(INDEX, "index")]),
    Case("an index of numbers", {INDEX: b'{"weight_map":{"a":1}}', ONE: one()}, [(INDEX, "index")]),
    Case("an index that is a list", {INDEX: b"[]", ONE: one()}, [(INDEX, "json")], ("found a list",)),
    Case("half an index", {INDEX: b'{"weight_map":', ONE: one()}, [(INDEX, "json")]),
    Case("a tensor twice in the index", {INDEX: index((b"a", b"x"), (b"a", b"y"))}, [(INDEX, "json")], ("twice",)),
    Case("a dangling index", {INDEX: link("gone"), ONE: one()}, [(INDEX, "dangling_link")]),
    Case(
        "a tensor in two shards",
        {INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())), SHARD_1: one(), SHARD_2: one()},
        [(SHARD_2, "duplicate_tensor"), (SHARD_2, "index_mismatch")],
        (f"1 tensor(s): a also in {SHARD_1}",),
    ),
    Case(
        "shards of another order than the index",
        {
            INDEX: index((b"a", SHARD_2.encode()), (b"b", SHARD_1.encode())),
            SHARD_1: one(b"a"),
            SHARD_2: one(b"b"),
        },
        [(SHARD_2, "index_mismatch"), (SHARD_1, "index_mismatch")],
        (f"a (in {SHARD_1})", f"b (in {SHARD_2})"),
    ),
    Case(
        "two complete sets",
        {ONE: one(), "consolidated.safetensors": one(b"x")},
        [("", "two_sets")],
        ("consolidated.safetensors, model.safetensors; move all but one away",),
    ),
    Case(
        "shards and a whole file",
        {ONE: one(), SHARD_1: one(b"a"), SHARD_2: one(b"b")},
        [("", "two_sets")],
        ("model-*-of-00002.safetensors, model.safetensors",),
    ),
    Case(
        "two sets of shards",
        {"m-1-of-1.safetensors": one(), "n-1-of-1.safetensors": one(b"b")},
        [("", "two_sets")],
        ("m-*-of-1.safetensors, n-*-of-1.safetensors",),
    ),
    Case(
        "consolidated beside any other name",
        {"consolidated.safetensors": one(), "vision.safetensors": one(b"b")},
        [("", "two_sets")],
    ),
    Case(
        "copies under free names",
        {"x.safetensors": one(), "y.safetensors": one()},
        [("y.safetensors", "duplicate_tensor")],
    ),
    Case("a broken config", {ONE: one(), "config.json": b"{"}, [("config.json", "json")]),
    Case("a config that is a pointer", {ONE: one(), "config.json": LFS}, [("config.json", "lfs_pointer")]),
    Case("a config that is a FIFO", {ONE: one(), "config.json": fifo}, [("config.json", "not_a_file")]),
    Case("nothing in the files", {ONE: safetensors(b"{}")}, [("", "no_tensors")]),
    Case(
        "a name that breaks lines",
        {"x\n\x1b[2J.safetensors": one()},
        [(r"x\n\x1b[2J.safetensors", "name")],
        (r"x\n\x1b[2J.safetensors: its name has invisible",),
    ),
]  # fmt: skip

CASES = FILES + HEADERS + SETS

STRICTER = {
    "a blank first", "a name twice", "an entry as a list", "a field more", "a dtype as an object",
}  # fmt: skip
"""Cases of FILES and HEADERS that the safetensors library 0.8 accepts and weightkeeper refuses."""
