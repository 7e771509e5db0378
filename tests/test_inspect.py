"""The `weightkeeper inspect` command, as a user runs it."""

import json
import os
import pty
import subprocess
import sys

import pytest
from badinputs.broken import INDEX, LFS, ONE, SHARD_1, SHARD_2, index, one, safetensors
from blake3 import blake3
from test_checkpoint import make

from weightkeeper import fingerprint

LAYERS = safetensors(
    b"{"
    b'"model.layers.0.w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
    b'"model.layers.11.w":{"dtype":"BF16","shape":[2,3],"data_offsets":[12,24]},'
    b'"model.norm":{"dtype":"F32","shape":[],"data_offsets":[24,28]}'
    b"}",
    bytes(28),
)


def inspect(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "weightkeeper.cli", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_files_tensors_ties_and_identity(tmp_path):
    """One page: sizes, ties, identity, each file, and tensors grouped over their layers."""
    make(tmp_path, {ONE: LAYERS, "config.json": b'{"tie_word_embeddings": true}', "old.bin": b""})
    result = inspect(tmp_path)
    digests = {ONE: blake3(LAYERS).hexdigest(), "config.json": blake3(b'{"tie_word_embeddings": true}').hexdigest()}
    size = len(LAYERS)
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [
            f"{tmp_path}",
            "  load format  safetensors",
            "  tensors      3, 28 bytes",
            f"  files        2, {size + 29} bytes",
            "  ties         config ties head and embeddings; no head in the files",
            f"  identity     blake3 {fingerprint.digest(digests)}",
            "",
            "          bytes  tensors  blake3            file",
            f"            {size}        3  {digests[ONE][:16]}  {ONE}",
            f"             29           {digests['config.json'][:16]}  config.json",
            f"                 ignored  {'':16}  old.bin: not safetensors",
            "",
            "  count  dtype        shape                 tensor",
            "      2  BF16         [2, 3]                model.layers.*.w",
            "      1  F32          []                    model.norm",
        ],
    )


def test_json_has_every_tensor(tmp_path):
    """`--json` is one object with all that is known, each tensor included."""
    make(tmp_path, {ONE: LAYERS})
    result = inspect(tmp_path, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0
    assert found == {
        "path": str(tmp_path),
        "load_format": "safetensors",
        "config_format": "hf",
        "tensor_count": 3,
        "tensor_bytes": 28,
        "total_bytes": len(LAYERS),
        "identity": fingerprint.digest({ONE: blake3(LAYERS).hexdigest()}),
        "ties": {"declared": None, "heads": []},
        "weight_files": [
            {
                "name": ONE,
                "path": str(tmp_path / ONE),
                "size": len(LAYERS),
                "blake3": blake3(LAYERS).hexdigest(),
                "tensors": [
                    {"name": "model.layers.0.w", "dtype": "BF16", "shape": [2, 3], "offset": 0, "nbytes": 12},
                    {"name": "model.layers.11.w", "dtype": "BF16", "shape": [2, 3], "offset": 12, "nbytes": 12},
                    {"name": "model.norm", "dtype": "F32", "shape": [], "offset": 24, "nbytes": 4},
                ],
            }
        ],
        "config_files": [],
        "ignored": [],
        "faults": [],
    }


def test_a_quick_look_reads_no_data(tmp_path):
    """`--no-identity` looks at 8 TB of weights without reading them."""
    nbytes = 8 * 10**12
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
    make(tmp_path, {ONE: safetensors(header)})
    os.truncate(tmp_path / ONE, 8 + len(header) + nbytes)
    result = inspect(tmp_path, "--no-identity")
    assert result.returncode == 0
    assert "  tensors      1, 8,000,000,000,000 bytes\n" in result.stdout
    assert "  identity     not taken\n" in result.stdout


BROKEN = {INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())), SHARD_1: LFS}


def test_every_fault_and_exit_1(tmp_path):
    """A checkpoint that cannot be served: every fault on stderr, nothing on stdout, exit 1."""
    result = inspect(make(tmp_path, BROKEN))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        f"weightkeeper: {tmp_path} cannot be served, 2 fault(s):",
        f"  - {tmp_path}/{SHARD_1}: a git-lfs pointer, not the file itself; run `git lfs pull` in the clone",
        f"  - {tmp_path}/{SHARD_2}: no such file or directory; fetch it, or mount the folder that holds it",
    ]


def test_every_fault_as_json(tmp_path):
    """With `--json` the faults are data, and the exit code is 1 all the same."""
    result = inspect(make(tmp_path, BROKEN), "--json")
    found = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (1, "")
    assert found["path"] == str(tmp_path)
    assert [(fault["path"], fault["code"]) for fault in found["faults"]] == [
        (f"{tmp_path}/{SHARD_1}", "lfs_pointer"),
        (f"{tmp_path}/{SHARD_2}", "missing"),
    ]


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("--nonsense", "a")])
def test_wrong_usage_is_exit_2(arguments):
    """No path, two paths or an unknown option: exit 2 and the usage on stderr."""
    result = inspect(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


def test_progress_on_a_terminal_only(tmp_path):
    """The bytes hashed are told on stderr where that is a terminal, and nowhere else."""
    make(tmp_path, {ONE: one()})
    assert inspect(tmp_path).stderr == ""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "weightkeeper.cli", "inspect", str(tmp_path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, timeout=60)
    told = os.read(leader, 10_000)
    os.close(follower)
    os.close(leader)
    assert result.returncode == 0
    assert told == b"\rhashing 0.00 of 0.00 GB\r\n"


def test_names_that_no_terminal_should_see(tmp_path):
    """Names of tensors and files from outside are printed as escapes, in text and in JSON."""
    header = rb'{"a\n\u001b[2J":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    folder = os.fsencode(tmp_path) + b"/m\xff\x1b"
    os.mkdir(folder)
    make(type(tmp_path)(os.fsdecode(folder)), {ONE: safetensors(header, b"1234"), "x\x1b\udcff.bin": b""})
    text, data = inspect(os.fsdecode(folder)), inspect(os.fsdecode(folder), "--json")
    assert (text.returncode, data.returncode) == (0, 0)
    assert "\x1b" not in text.stdout + text.stderr
    assert r"a\n\x1b[2J" in text.stdout
    assert json.loads(data.stdout)["ignored"] == [{"name": r"x\x1b\udcff.bin", "reason": "not safetensors"}]


def test_a_look_needs_neither_torch_nor_numpy():
    """The command's imports are small, so that it answers at once."""
    script = "import sys, weightkeeper.commands.inspect as _; print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
