"""`weightkeeper inspect`: what a checkpoint holds, or every reason why it cannot be served."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from weightkeeper import fingerprint, identity
from weightkeeper.checkpoint import Checkpoint, open_checkpoint
from weightkeeper.errors import CheckpointError
from weightkeeper.files import shown

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@click.command(name="inspect")
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Everything, each tensor included, as one JSON object.")
@click.option("--identity/--no-identity", "identify", default=True, help="Read the files in full and hash them.")
def command(path: str, as_json: bool, identify: bool) -> None:
    """Show the files, tensors, bytes and identity of the checkpoint at PATH.

    Exits with 1 where the checkpoint cannot be served, and lists every fault.
    """
    try:
        checkpoint = open_checkpoint(path)
        found = identity.digests(checkpoint, (), _progress if sys.stderr.isatty() else None) if identify else None
    except CheckpointError as error:
        if not as_json:
            raise
        click.echo(_json({"path": error.path, "faults": error.faults}))
        sys.exit(1)
    by_name = found.by_name if found else {}
    if as_json:
        click.echo(_json(_everything(checkpoint, by_name)))
    else:
        click.echo("\n".join(_text(checkpoint, by_name)))


def _progress(stage: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{stage} {done / 1e9:.2f} of {total / 1e9:.2f} GB{end}")
    sys.stderr.flush()


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _everything(checkpoint: Checkpoint, by_name: dict[str, str]) -> dict[str, Any]:
    def plain(file: Any) -> dict[str, Any]:
        return {
            "name": file.name,
            "path": shown(file.path),
            "size": file.size,
            "blake3": by_name.get(file.name),
        }

    return {
        "path": shown(checkpoint.path),
        "load_format": checkpoint.load_format,
        "config_format": checkpoint.config_format,
        "tensor_count": checkpoint.tensor_count,
        "tensor_bytes": checkpoint.nbytes,
        "total_bytes": checkpoint.total_bytes,
        "identity": fingerprint.digest(by_name) if by_name else None,
        "ties": checkpoint.ties,
        "weight_files": [plain(file) | {"tensors": file.tensors} for file in checkpoint.weight_files],
        "config_files": [plain(file) for file in checkpoint.config_files],
        "ignored": [{"name": shown(i.name), "reason": i.reason} for i in checkpoint.ignored],
        "faults": [],
    }


def _text(checkpoint: Checkpoint, by_name: dict[str, str]) -> Iterator[str]:
    yield shown(checkpoint.path)
    yield f"  load format  {checkpoint.load_format}"
    yield f"  tensors      {checkpoint.tensor_count}, {checkpoint.nbytes:,} bytes"
    yield f"  files        {len(checkpoint.files)}, {checkpoint.total_bytes:,} bytes"
    yield f"  ties         {_ties(checkpoint)}"
    yield f"  identity     {f'blake3 {fingerprint.digest(by_name)}' if by_name else 'not taken'}"
    yield ""
    yield f"{'bytes':>15}  {'tensors':>7}  {'blake3':16}  file"
    tensors = {file.name: str(len(file.tensors)) for file in checkpoint.weight_files}
    for file in checkpoint.files:
        digest = by_name.get(file.name, "")[:16]
        yield f"{file.size:>15,}  {tensors.get(file.name, ''):>7}  {digest:16}  {shown(file.name)}"
    for ignored in checkpoint.ignored:
        yield f"{'':>15}  {'ignored':>7}  {'':16}  {shown(ignored.name)}: {ignored.reason}"
    yield ""
    yield f"{'count':>7}  {'dtype':11}  {'shape':20}  tensor"
    for (name, dtype, shape), count in _groups(checkpoint).items():
        yield f"{count:>7}  {dtype:11}  {shape!s:20}  {shown(name)}"


def _groups(checkpoint: Checkpoint) -> Counter[tuple[str, str, list[int]]]:
    """Tensors that differ only in numbers of their names, a layer's or an expert's, as one."""
    return Counter(
        (_NUMBER.sub("*", tensor.name), tensor.dtype, str(list(tensor.shape)))
        for file in checkpoint.weight_files
        for tensor in file.tensors
    )


def _ties(checkpoint: Checkpoint) -> str:
    declared = {
        True: "config ties head and embeddings",
        False: "config has them apart",
        None: "config is silent",
    }
    heads = ", ".join(shown(name) for name in checkpoint.ties.heads[:3])
    return f"{declared[checkpoint.ties.declared]}; {heads or 'no head'} in the files"
