"""Which files make up a checkpoint, and every reason to refuse one."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from badinputs.broken import CASES, INDEX, ONE, SHARD_1, SHARD_2, Case, build, index, link, one, safetensors

from weightkeeper import checkpoint as checkpoint_module
from weightkeeper import files as files_module
from weightkeeper import weight_set
from weightkeeper.checkpoint import MAX_FAULTS, open_checkpoint
from weightkeeper.errors import CheckpointError
from weightkeeper.weight_set import Ignored

SHARDS = {
    INDEX: index((b"a", SHARD_1.encode()), (b"b", SHARD_2.encode())),
    SHARD_1: one(b"a"),
    SHARD_2: one(b"b"),
}


def make(directory: Path, files: dict) -> Path:
    build(Case("", files, []), directory)
    return directory


def names(files) -> list[str]:
    return [file.name for file in files]


def refused(path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@contextmanager
def another_user():
    """What a container's uid 1000 sees; where the tests do not run as root, they are such a user already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(1000)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public():
    """A folder that every user can enter; pytest's own ones are private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_broken_checkpoints_are_refused_with_every_fault(case, tmp_path):
    """Each broken checkpoint is refused with exactly the faults it has, each at its path."""
    build(case, tmp_path)
    error = refused(tmp_path)
    found = [(fault.path, fault.code) for fault in error.faults]
    assert found == [(f"{tmp_path}/{path}" if path else str(tmp_path), code) for path, code in case.faults]
    for words in case.words:
        assert words in str(error)
    assert str(error).startswith(f"{tmp_path} cannot be served, {len(case.faults)} fault(s):\n")
    assert len(str(error).splitlines()) == len(case.faults) + 1


def test_shards_by_their_index(tmp_path):
    """An index and its shards are one checkpoint; sizes and counts are those of the files."""
    found = open_checkpoint(make(tmp_path, SHARDS))
    assert names(found.weight_files) == [SHARD_1, SHARD_2]
    assert names(found.config_files) == [INDEX]
    assert (found.tensor_count, found.nbytes) == (2, 8)
    assert found.total_bytes == sum(len(content) for content in SHARDS.values())
    assert found.weight_files[0].tensors[0].name == "a"
    assert (found.load_format, found.config_format, found.ignored) == ("safetensors", "hf", ())


@pytest.mark.parametrize("named", ["", ONE])
def test_a_single_file_by_its_folder_or_itself(named, tmp_path):
    """A single file is accepted by its folder and by its own path; `path` is what vLLM has to be given: the folder."""
    make(tmp_path, {ONE: one(), "config.json": b"{}"})
    found = open_checkpoint(tmp_path / named)
    assert names(found.weight_files) == [ONE]
    assert names(found.config_files) == ["config.json"]
    assert found.path == tmp_path


def test_one_file_of_many_is_refused(tmp_path):
    """A file cannot be named where vLLM, which loads folders, would load others too."""
    error = refused(make(tmp_path, SHARDS) / SHARD_1)
    assert [fault.code for fault in error.faults] == ["one_of_many"]
    assert "it would load 2 file(s); name the folder" in str(error)


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "no such file"), ("config.json", "neither a folder nor"), ("config.json/x", "no such file")],
)
def test_paths_that_are_no_checkpoint(name, words, tmp_path):
    """A path that leads nowhere or to something else is refused under its own name."""
    error = refused(make(tmp_path, {"config.json": b"{}"}) / name)
    assert error.path == str(tmp_path / name)
    assert words in str(error)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "\ud800"])
def test_impossible_paths(path):
    """A path that no file can have is refused like any other, with a message of printable lines."""
    error = refused(path)
    assert len(error.faults) == 1
    assert all(line.isprintable() for line in str(error).splitlines())


@pytest.mark.parametrize("name", ["[v2]", "model?", "model*"])
def test_paths_that_vllm_reads_as_patterns(name, tmp_path):
    """vLLM globs below the path: `model?` could load the folder `model2`, so such a path is refused."""
    (tmp_path / name).mkdir()
    error = refused(make(tmp_path / name, {ONE: one()}))
    assert [fault.code for fault in error.faults] == ["path_pattern"]


def test_g24_the_index_decides(tmp_path, caplog):
    """Beside an index other weights take no part, and each is named in one line."""
    caplog.set_level(logging.INFO)
    others = {
        "consolidated.safetensors": one(b"x"),
        "model.safetensors": b"not even a safetensors file",
        "original/consolidated.00.pth": b"",
        "pytorch_model.bin": b"",
        "model.fp16.safetensors.index.json": b"",
        "onnx/readme": b"",
        "._model.safetensors": b"",
    }
    found = open_checkpoint(make(tmp_path, SHARDS | others))
    assert names(found.weight_files) == [SHARD_1, SHARD_2]
    assert found.load_format == "safetensors"
    assert found.ignored == (
        Ignored("consolidated.safetensors", f"{INDEX} does not name it"),
        Ignored("model.fp16.safetensors.index.json", f"the index that counts is {INDEX}"),
        Ignored("model.safetensors", f"{INDEX} does not name it"),
        Ignored("pytorch_model.bin", "not safetensors"),
        Ignored("original/", "weights in sub-folders are not read"),
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"ignored {tmp_path}/{ignored.name}: {ignored.reason}" for ignored in found.ignored
    ]


def test_the_usual_index_wins_over_mistrals(tmp_path):
    """Where a repository has both formats complete, model.safetensors.index.json decides."""
    mistral = {
        "consolidated.safetensors.index.json": index((b"x", b"consolidated.safetensors")),
        "consolidated.safetensors": one(b"x"),
        "params.json": b"{}",
        "config.json": b"{}",
    }
    found = open_checkpoint(make(tmp_path, SHARDS | mistral))
    assert (found.load_format, found.config_format) == ("safetensors", "hf")
    assert names(found.config_files) == ["config.json", INDEX, "params.json"]


@pytest.mark.parametrize(
    "files",
    [
        {"consolidated.safetensors": one()},
        {"consolidated.00.safetensors": one(b"a"), "consolidated.01.safetensors": one(b"b")},
        {"consolidated-00001-of-00001.safetensors": one()},
        {
            "consolidated.safetensors.index.json": index((b"a", b"consolidated-1.safetensors")),
            "consolidated-1.safetensors": one(),
            "model.safetensors": one(),
        },
    ],
    ids=["one", "parts", "shards", "index"],
)
def test_mistral_format(files, tmp_path):
    """Consolidated files alone, or by their own index, are Mistral's format, config and all."""
    found = open_checkpoint(make(tmp_path, files | {"params.json": b"{}", "config.json": b"{}"}))
    assert (found.load_format, found.config_format) == ("mistral", "mistral")
    assert all(file.name.startswith("consolidated") for file in found.weight_files)


def test_a_mistral_index_of_other_files(tmp_path):
    """vLLM looks only at consolidated*.safetensors by that index, so other names in it are refused."""
    files = {"consolidated.safetensors.index.json": index((b"a", b"other.safetensors"))}
    error = refused(make(tmp_path, files | {"consolidated.safetensors": one(b"b"), "other.safetensors": one()}))
    assert [fault.code for fault in error.faults] == ["index_path"]


def test_free_names_without_an_index_are_one_model(tmp_path):
    """vLLM loads every file where there is no index; distinct tensors in them are one model."""
    found = open_checkpoint(make(tmp_path, {"text.safetensors": one(b"a"), "vision.safetensors": one(b"b")}))
    assert names(found.weight_files) == ["text.safetensors", "vision.safetensors"]


def test_shards_may_count_from_zero(tmp_path):
    """Shards 0 and 1 of 2 are complete."""
    files = {"m-00000-of-00002.safetensors": one(b"a"), "m-00001-of-00002.safetensors": one(b"b")}
    assert open_checkpoint(make(tmp_path, files)).tensor_count == 2


def test_config_files(tmp_path):
    """What shapes the bytes or how they are read counts; a tokenizer or a chat template does not."""
    counted = [
        "config.json", "hf_quant_config.json", "modeling_x.py", "params.json", "quant_config.json",
        "quantization_config.json", "quantize_config.json", "sparse_linear.pt",
    ]  # fmt: skip
    others = ["tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"]
    make(tmp_path, {ONE: one()} | dict.fromkeys(counted + others, b"{}"))
    assert names(open_checkpoint(tmp_path).config_files) == counted


def test_dense_modules_of_embedding_models(tmp_path):
    """Weights in folders that modules.json names are read by vLLM, so they count; paths out of the folder do not."""
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../x"}, {"path": 7}, "y"]
    make(
        tmp_path,
        {
            ONE: one(),
            "modules.json": json.dumps(modules).encode(),
            "1_Pooling/config.json": b"{}",
            "2_Dense/config.json": b"{}",
            "2_Dense/model.safetensors": one(),
            "3_Dense/model.safetensors": one(),
        },
    )
    found = open_checkpoint(tmp_path)
    assert names(found.config_files) == [
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json",
    ]  # fmt: skip
    assert names(found.ignored) == ["3_Dense/"]


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        (b'{"tie_word_embeddings": true}', True),
        (b'{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}', False),
        (b'{"text_config": {"tie_word_embeddings": true}}', True),
        (b'{"text_config": 7, "x": NaN}', None),
        (b'{"tie_word_embeddings": "yes"}', None),
        (None, None),
    ],
)
def test_ties(config, declared, tmp_path):
    """Ties are what config.json declares, beside the heads that are in the files all the same."""
    files = {ONE: one(b"lm_head.weight")} | ({} if config is None else {"config.json": config})
    ties = open_checkpoint(make(tmp_path, files)).ties
    assert (ties.declared, ties.heads) == (declared, ("lm_head.weight",))


def test_hugging_face_cache(tmp_path):
    """A snapshot whose files are links to blobs is accepted; `path` of a file is where its bytes are."""
    blobs = make(tmp_path / "models--o--n" / "blobs", {"4d7a": one(), "55aa": b"{}"})
    links = {ONE: link("../../blobs/4d7a"), "config.json": link("../../blobs/55aa")}
    found = open_checkpoint(make(tmp_path / "models--o--n" / "snapshots" / "rev", links))
    assert [file.path for file in found.files] == [blobs / "4d7a", blobs / "55aa"]


def test_a_snapshot_mounted_without_its_blobs(tmp_path):
    """Each dangling link is named with where it leads and the volume line that cures it."""
    links = {ONE: link("../../blobs/4d7a"), "config.json": link("../../blobs/55aa")}
    error = refused(make(tmp_path / "a" / "b" / "model", links))
    assert [fault.code for fault in error.faults] == ["dangling_link", "dangling_link"]
    blobs = tmp_path / "a" / "blobs"
    assert error.faults[0].message == (
        f"{tmp_path}/a/b/model/{ONE} leads to {blobs}/4d7a, which does not exist here; in a container, mount the "
        f"host's folder with 4d7a too, under `volumes:`: `- HOST_FOLDER:{blobs}:ro`"
    )


def test_a_folder_that_is_a_dangling_link(tmp_path):
    """A dangling link in place of the folder is named as such."""
    (tmp_path / "model").symlink_to("gone")
    assert [fault.code for fault in refused(tmp_path / "model").faults] == ["dangling_link"]
    assert [fault.code for fault in refused(tmp_path / "model" / ONE).faults] == ["dangling_link"]


def test_an_unreadable_file(public):
    """A file without permission is named with its owner, mode, our uid and the remedy."""
    (make(public, {ONE: one()}) / ONE).chmod(0o000)
    with another_user():
        error = refused(public)
        uid, gid = os.geteuid(), os.getegid()
    status = (public / ONE).stat()
    assert error.faults[0].code == "unreadable"
    assert error.faults[0].message == (
        f"{public}/{ONE} belongs to uid {status.st_uid}, gid {status.st_gid}, mode 0000, and this is uid {uid}, "
        f"gid {gid}; `chmod a+rX {public}/{ONE}`, or run as its owner"
    )


@pytest.mark.parametrize("mode", [0o600, 0o000])
def test_an_unreadable_folder(mode, public):
    """Where a folder shuts the way, the folder is named, not the file behind it."""
    shut = public / "shut"
    make(shut / "model", {ONE: one()})
    shut.chmod(mode)
    try:
        with another_user():
            error = refused(shut / "model")
    finally:
        shut.chmod(0o755)
    assert [fault.code for fault in error.faults] == ["unreadable"]
    assert error.faults[0].message.startswith(f"{shut} belongs to uid")


def test_files_that_vanish_while_they_are_read(tmp_path, monkeypatch):
    """A file that goes between listing and reading is a fault, not a crash."""
    make(tmp_path, SHARDS | {"config.json": b"{}"})

    def choose_then_lose(directory):
        chosen = weight_set.choose(directory)
        shutil.rmtree(directory)
        return chosen

    monkeypatch.setattr(checkpoint_module, "choose", choose_then_lose)
    error = refused(tmp_path)
    assert [fault.code for fault in error.faults] == ["missing"] * 4


@pytest.mark.timeout(60)
def test_a_file_that_turns_into_a_fifo(tmp_path, monkeypatch):
    """A FIFO put in a file's place between looking and opening does not hang the reader."""
    path = make(tmp_path, {ONE: one()}) / ONE
    real = os.stat

    def stat_then_swap(each, **options):
        status = real(each, **options)
        if each == path and stat.S_ISREG(status.st_mode):
            path.unlink()
            os.mkfifo(path)
        return status

    monkeypatch.setattr(files_module.os, "stat", stat_then_swap)
    assert [fault.code for fault in refused(tmp_path).faults] == ["not_a_file"]


def test_the_list_of_faults_has_an_end(tmp_path):
    """An index that names a thousand missing shards gives a message that can be read, and the true number."""
    places = [(b"t%d" % n, b"s%d.safetensors" % n) for n in range(1000)]
    error = refused(make(tmp_path, {INDEX: index(*places)}))
    assert len(error.faults) == MAX_FAULTS + 1
    assert error.faults[-1].message == "900 more faults that are not listed"


def test_names_of_tensors_cannot_forge_lines(tmp_path):
    """Control characters in a tensor's name are shown as escapes."""
    bad = safetensors(rb'{"x\n  - all is well\u001b[2J":{"dtype":"?","shape":[],"data_offsets":[0,0]}}')
    message = str(refused(make(tmp_path, {ONE: bad})))
    assert len(message.splitlines()) == 2
    assert r"x\n  - all is well\x1b[2J" in message


LAYOUTS = {
    "shards": SHARDS,
    "single": {ONE: one()},
    "extras": SHARDS | {"consolidated.safetensors": one(), ONE: one(), "original/consolidated.1.safetensors": one()},
    "free names": {"x.safetensors": one(b"a"), "y.safetensors": one(b"b"), ".z.safetensors": one(b"c")},
    "mistral": {"consolidated.safetensors": one(), "params.json": b"{}"},
    "mistral index": {
        "consolidated.safetensors.index.json": index((b"a", b"consolidated-1.safetensors")),
        "consolidated-1.safetensors": one(),
        "consolidated-2.safetensors": one(),
        "model.safetensors": one(),
    },
    "foreign index": {"model.fp16.safetensors.index.json": index((b"a", b"x")), "model.fp16.safetensors": one()},
    "pytorch beside": {ONE: one(), "pytorch_model.bin": b"x", "sparse_linear.pt": b"x"},
}


CHOICE_OF_VLLM = """
import json, sys
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
for line in sys.stdin:
    path, load_format = json.loads(line)
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    _, files, use_safetensors, _ = loader._prepare_weights(path, None, None, True, None)
    print("choice", json.dumps([sorted(files), use_safetensors]))
"""


@pytest.mark.vllm
def test_vllm_loads_exactly_these_files(tmp_path):
    """vLLM's own loader, told to use `load_format`, chooses the very files that are identified here."""
    found = [open_checkpoint(make(tmp_path / name.replace(" ", "-"), files)) for name, files in LAYOUTS.items()]
    lines = "\n".join(json.dumps([str(checkpoint.path), checkpoint.load_format]) for checkpoint in found)
    result = subprocess.run(
        [sys.executable, "-c", CHOICE_OF_VLLM], input=lines, capture_output=True, text=True, check=True, timeout=240
    )
    choices = [json.loads(line[len("choice ") :]) for line in result.stdout.splitlines() if line.startswith("choice ")]
    assert choices == [[[str(c.path / file.name) for file in c.weight_files], True] for c in found]
