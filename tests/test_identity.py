"""Content identity: what is hashed, what a receipt proves, and every way in which a file can change."""

import logging
import mmap
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from badinputs.broken import INDEX, ONE, SHARD_1, SHARD_2, index, link, one, safetensors
from blake3 import blake3
from msgspec.structs import replace
from test_checkpoint import make

from weightkeeper import hashing, identity
from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.errors import CheckpointChangedError, CheckpointError
from weightkeeper.protocol import Receipt

FILES = {
    "config.json": b"{}",
    INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())),
    SHARD_1: one(b"a"),
    SHARD_2: one(b"b"),
}


@pytest.fixture(autouse=True)
def settled(request, monkeypatch):
    """Files count as old after 50 ms here, still longer than any kernel's clock step. `real_time` leaves 2 s."""
    if "real_time" not in request.fixturenames:
        monkeypatch.setattr(identity, "SETTLED_NS", 50_000_000)


@pytest.fixture
def real_time():
    """The time that users have."""


@pytest.fixture
def model(tmp_path) -> Path:
    return make(tmp_path / "model", FILES)


def other(content: bytes) -> bytes:
    """Other weights under the same header: the last byte differs."""
    return content[:-1] + bytes([content[-1] ^ 1])


def taken(model: Path) -> tuple[Receipt, ...]:
    receipts = identity.take(open_checkpoint(model))
    assert all(receipt.trusted for receipt in receipts)
    return receipts


def again(model: Path, known=()) -> identity.Digests:
    return identity.digests(open_checkpoint(model), known)


def changed(checkpoint, receipts) -> str:
    with pytest.raises(CheckpointChangedError) as caught:
        identity.check_unchanged(checkpoint, receipts)
    return str(caught.value)


def test_receipts_tell_what_the_files_are(model):
    """A receipt has the BLAKE3 of the file's bytes and what `stat` says, for weights, configs and index."""
    receipts = taken(model)
    assert [receipt.name for receipt in receipts] == [SHARD_1, SHARD_2, "config.json", INDEX]
    for receipt in receipts:
        status = (model / receipt.name).stat()
        assert receipt == Receipt(
            receipt.name,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            blake3(FILES[receipt.name]).hexdigest(),
        )


def test_an_unchanged_receipt_costs_no_read(model, monkeypatch):
    """With all receipts unchanged nothing is hashed, and no byte is read for it."""
    receipts = taken(model)
    checkpoint = open_checkpoint(model)
    monkeypatch.setattr(hashing.os, "readv", lambda *_: pytest.fail("a file was read"))
    found = identity.digests(checkpoint, receipts)
    assert found.hashed == ()
    assert found.by_name == {receipt.name: receipt.blake3 for receipt in receipts}


def test_without_receipts_everything_is_hashed(model):
    """No receipt, no short cut; the digests are the same."""
    found = again(model)
    assert found.hashed == (SHARD_1, SHARD_2, "config.json", INDEX)
    assert found.by_name == {receipt.name: receipt.blake3 for receipt in taken(model)}


def test_receipts_of_other_files_count_for_nothing(model):
    """A receipt counts only under its own name."""
    receipts = taken(model)
    renamed = [replace(receipt, name=f"x{receipt.name}") for receipt in receipts]
    assert len(again(model, renamed).hashed) == 4


def test_c01_same_headers_other_bytes(tmp_path):
    """Two fine-tunes with equal headers and one differing bit are different models."""
    base = make(tmp_path / "base", FILES)
    tuned = make(tmp_path / "tuned", FILES | {SHARD_2: other(FILES[SHARD_2])})
    assert (base / SHARD_2).stat().st_size == (tuned / SHARD_2).stat().st_size
    one_way, other_way = again(base).by_name, again(tuned).by_name
    assert {name for name in one_way if one_way[name] != other_way[name]} == {SHARD_2}


def test_c01_the_same_bytes_at_two_paths(tmp_path):
    """A copy of a model is the same model."""
    first, second = make(tmp_path / "a", FILES), make(tmp_path / "b" / "c", FILES)
    assert again(first).by_name == again(second).by_name


def test_c01_copied_over_in_place(model, tmp_path):
    """A fine-tune copied over its base keeps name, size and inode, and is hashed and found to differ."""
    receipts = taken(model)
    tuned = tmp_path / "tuned"
    tuned.write_bytes(other(FILES[SHARD_1]))
    inode = (model / SHARD_1).stat().st_ino
    shutil.copyfile(tuned, model / SHARD_1)
    assert (model / SHARD_1).stat().st_ino == inode
    found = again(model, receipts)
    assert found.hashed == (SHARD_1,)
    assert found.by_name[SHARD_1] == blake3(other(FILES[SHARD_1])).hexdigest()


def test_c01_a_few_bytes_and_the_old_time_put_back(model):
    """Patched in place with size and modification time as before: the change time still tells."""
    receipts = taken(model)
    status = (model / SHARD_1).stat()
    with (model / SHARD_1).open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(other(FILES[SHARD_1])[-1:])
    os.utime(model / SHARD_1, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (model / SHARD_1).stat().st_mtime_ns == status.st_mtime_ns
    found = again(model, receipts)
    assert found.hashed == (SHARD_1,)
    assert found.by_name[SHARD_1] == blake3(other(FILES[SHARD_1])).hexdigest()


def test_c01_through_a_hugging_face_cache(tmp_path):
    """Behind the links of a cache both a new target and new bytes in the old blob are seen; blob names say nothing."""
    content = one()
    blobs = make(tmp_path / "models--o--n" / "blobs", {"4d7a": content, "55aa": other(content)})
    snapshot = make(tmp_path / "models--o--n" / "snapshots" / "rev", {ONE: link("../../blobs/4d7a")})
    receipts = taken(snapshot)
    assert again(snapshot, receipts).hashed == ()
    (snapshot / ONE).unlink()
    (snapshot / ONE).symlink_to("../../blobs/55aa")
    assert again(snapshot, receipts).by_name == {ONE: blake3(other(content)).hexdigest()}
    (snapshot / ONE).unlink()
    (snapshot / ONE).symlink_to("../../blobs/4d7a")
    assert again(snapshot, receipts).hashed == ()
    (blobs / "4d7a").write_bytes(other(content))
    assert again(snapshot, receipts).by_name == {ONE: blake3(other(content)).hexdigest()}


def test_a_program_that_goes_on_writing_through_a_mapping(model):
    """A store into a page that was dirty before the hash shows in the file's times, because `take` flushes it."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", model], capture_output=True, text=True, check=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("tmpfs never shows stores through a mapping in a file's times")
    with (model / SHARD_1).open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapping:
        mapping[-1] ^= 1
        receipts = taken(model)
        mapping[-1] ^= 1
        found = again(model, receipts)
    assert found.hashed == (SHARD_1,)
    assert found.by_name[SHARD_1] == blake3(FILES[SHARD_1]).hexdigest() != receipts[0].blake3


@pytest.mark.usefixtures("real_time")
def test_a_young_file_is_waited_for(model):
    """A file changed a moment ago is hashed when its change is 2 s old, and its receipt is trusted."""
    receipts = taken(model)
    youngest = max(max(receipt.mtime_ns, receipt.ctime_ns) for receipt in receipts)
    assert time.time_ns() - youngest >= 2_000_000_000


@pytest.mark.usefixtures("real_time")
def test_a_file_of_the_future_is_not_waited_for_and_not_trusted(model, caplog, monkeypatch):
    """Where the clock cannot tell, the receipt is not trusted: one line says so, and every later start hashes."""
    for name in FILES:
        os.utime(model / name, (0, time.time() + 3600))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited for {seconds} s"))
    receipts = identity.take(open_checkpoint(model))
    assert [receipt.trusted for receipt in receipts] == [False] * 4
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"{model / receipt.name}: changed too lately, or in the future by this clock: starts will hash it",
        )
        for receipt in receipts
    ]
    assert len(again(model, receipts).hashed) == 4


def test_a_receipt_that_is_not_trusted_is_proven_by_content(model):
    """With equal stamps that prove nothing, `check_unchanged` hashes, and finds content that changed."""
    checkpoint = open_checkpoint(model)
    receipts = identity.take(checkpoint)
    doubtful = [replace(receipt, trusted=False) for receipt in receipts]
    identity.check_unchanged(checkpoint, doubtful)
    doubtful[0] = replace(doubtful[0], blake3="00" * 32)
    message = f"{model / SHARD_1}: its content changed, although its times are equal"
    assert changed(checkpoint, doubtful).endswith(message)


def touch(path: Path) -> None:
    os.utime(path)


def grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"!")


def supplant(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    new.replace(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (touch, "its modification time changed, its change time changed"),
        (grow, "bytes, its modification time changed"),
        (supplant, "another file is in its place (inode"),
        (Path.unlink, "it is gone"),
        (lambda path: path.chmod(0o640), "its change time changed"),
    ],
    ids=["touched", "grown", "replaced", "gone", "chmod"],
)
@pytest.mark.parametrize("name", [SHARD_2, "config.json"])
def test_changes_since_the_receipts(name, change, words, model):
    """Whatever happens to a file after it was hashed is found, and named with the file."""
    checkpoint = open_checkpoint(model)
    receipts = identity.take(checkpoint)
    identity.check_unchanged(checkpoint, receipts)
    change(model / name)
    message = changed(checkpoint, receipts)
    (line,) = [line for line in message.splitlines() if str(model / name) in line]
    assert words in line
    assert len(message.splitlines()) == 2


def test_every_changed_file_is_named(model):
    """All that changed is in one message, and what has no receipt too."""
    checkpoint = open_checkpoint(model)
    receipts = identity.take(checkpoint)
    for name in (SHARD_1, SHARD_2):
        grow(model / name)
    message = changed(checkpoint, receipts[:-1])
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == [
        f"  - {model / name}" for name in (SHARD_1, SHARD_2, INDEX)
    ]
    assert message.endswith(": it was not there when the content was hashed")


@pytest.mark.parametrize("name", ["hf_quant_config.json", "consolidated.safetensors"])
def test_files_that_appeared(name, tmp_path):
    """A file that vLLM would read and that was not there when the rest was hashed is a change."""
    model = make(tmp_path, {ONE: one(), "config.json": b"{}"})
    checkpoint = open_checkpoint(model)
    receipts = identity.take(checkpoint)
    make(model, {"tokenizer.json": b"{}"})
    identity.check_unchanged(checkpoint, receipts)
    make(model, {name: one(b"x")})
    assert f"{model / name}: it appeared since the checkpoint was opened" in changed(checkpoint, receipts)


@pytest.mark.parametrize("read", [identity.take, lambda checkpoint: identity.digests(checkpoint, ())])
def test_a_change_between_opening_and_hashing(read, model):
    """What is hashed is what was opened: header and content are of one moment."""
    checkpoint = open_checkpoint(model)
    supplant(model / SHARD_1)
    with pytest.raises(CheckpointChangedError, match="another file is in its place"):
        read(checkpoint)


def test_changes_are_found_before_anything_is_read(model, monkeypatch):
    """Before a byte is hashed every file is looked at, and all that changed are named together."""
    checkpoint = open_checkpoint(model)
    grow(model / SHARD_1)
    grow(model / SHARD_2)
    monkeypatch.setattr(hashing.os, "readv", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(CheckpointChangedError) as caught:
        identity.digests(checkpoint, ())
    assert str(model / SHARD_1) in str(caught.value)
    assert str(model / SHARD_2) in str(caught.value)


def large(path: Path, nbytes: int = 64 * 1024 * 1024) -> Path:
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
    make(path, {ONE: safetensors(header)})
    os.truncate(path / ONE, 8 + len(header) + nbytes)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 100), "to 100 bytes"),
        (grow, "its size went from"),
        (lambda path: path.write_bytes(path.read_bytes()), "its change time changed"),
        (Path.unlink, "it is gone"),
        (supplant, "another file is in its place"),
    ],
    ids=["cut", "grown", "written", "gone", "replaced"],
)
def test_a_change_while_hashing(change, words, tmp_path, monkeypatch):
    """A file that is cut, written, grown, removed or replaced in the middle is found, and nothing crashes."""
    model = large(tmp_path / "model")
    checkpoint = open_checkpoint(model)
    real, reads = os.readv, []

    def readv(*arguments):
        reads.append(arguments)
        if len(reads) == 3:
            change(model / ONE)
        return real(*arguments)

    monkeypatch.setattr(hashing.os, "readv", readv)
    with pytest.raises(CheckpointChangedError) as caught:
        identity.take(checkpoint)
    assert f"{model / ONE}: " in str(caught.value)
    assert words in str(caught.value)


def test_an_unreadable_file_after_opening(model, monkeypatch):
    """A disk that fails while hashing is a fault of the file, and ends all other reading."""
    checkpoint = open_checkpoint(model)

    def readv(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashing.os, "readv", readv)
    with pytest.raises(CheckpointError, match="reading failed: Input/output error"):
        identity.digests(checkpoint, ())


def test_large_files_in_pieces(tmp_path):
    """A file of many pieces and a last short one has the digest of its bytes, whatever the number of threads."""
    model = large(tmp_path, 3 * hashing.CHUNK_BYTES + 12_345)
    with (model / ONE).open("r+b") as stream:
        stream.seek(hashing.CHUNK_BYTES)
        stream.write(os.urandom(hashing.CHUNK_BYTES))
    assert again(model).by_name == {ONE: blake3((model / ONE).read_bytes()).hexdigest()}


def test_progress(tmp_path):
    """Progress is told in the caller's thread, never falls, and ends with everything done."""
    checkpoint = open_checkpoint(large(tmp_path))
    told = []
    identity.digests(checkpoint, (), lambda *each: told.append((threading.current_thread(), *each)))
    assert {(thread, stage, total) for thread, stage, _, total in told} == {
        (threading.main_thread(), "hashing", checkpoint.total_bytes)
    }
    done = [done for _, _, done, _ in told]
    assert done == sorted(done)
    assert done[-1] == checkpoint.total_bytes


def test_an_error_in_progress_ends_the_hashing(tmp_path):
    """Where nobody listens any more the error goes to the caller, and no thread goes on with the terabyte."""

    def lost(*_):
        raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError):
        identity.digests(open_checkpoint(large(tmp_path, 2**40)), (), lost)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hashing")]


def test_no_descriptor_is_left_open(model):
    """Neither success nor failure leaks a descriptor."""
    before = set(os.listdir("/proc/self/fd"))
    taken(model)
    checkpoint = open_checkpoint(model)
    grow(model / SHARD_1)
    with pytest.raises(CheckpointChangedError):
        identity.take(checkpoint)
    with pytest.raises(CheckpointError):
        open_checkpoint(model)
    assert set(os.listdir("/proc/self/fd")) == before
