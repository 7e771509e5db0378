"""scripts/env, which turns what a user gives `make up` into compose/.env; needs no Docker."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory in place of compose/."""
    made = tmp_path / "compose"
    made.mkdir()
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What looks like the directory of a checkpoint."""
    made = tmp_path / "models" / "a model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    return made


def env(project: Path, cwd: Path = ROOT, **given: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "WEIGHTKEEPER_COMPOSE_DIR": str(project)} | given
    return subprocess.run(
        [str(ROOT / "scripts" / "env")], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def written(project: Path) -> dict[str, str]:
    lines = (project / ".env").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: value.strip("'") for name, value in pairs}


def test_settings_are_kept_for_the_next_time(project: Path, model: Path):
    """What was given once is in .env afterwards; a second run without it changes nothing, not even the file's times."""
    assert env(project, MODEL=str(model), PORT="8123").returncode == 0
    values = written(project)
    assert values["MODEL"] == values["MODEL_BLOBS"] == str(model)
    assert values["PORT"] == "8123" and values["PROJECT_DIR"] == str(project)
    before = (project / ".env").stat()
    assert env(project).returncode == 0
    assert (project / ".env").stat() == before


def test_lines_of_the_user_stay(project: Path, model: Path):
    """Comments, other variables and a port of the user's own are left alone; the file can be read by the supervisor."""
    (project / ".env").write_text("# ours\nHTTPS_PROXY=http://proxy:3128\nPORT=9000\n")
    (project / ".env").chmod(0o600)
    assert env(project, MODEL=str(model)).returncode == 0
    assert (project / ".env").read_text().startswith("# ours\nHTTPS_PROXY=http://proxy:3128\nPORT=9000\n")
    assert written(project)["PORT"] == "9000"
    assert (project / ".env").stat().st_mode & 0o777 == 0o644


def test_relative_path_is_made_absolute(project: Path, model: Path):
    """MODEL=../x means what it means in the shell of the caller."""
    assert env(project, cwd=model.parent, MODEL="a model").returncode == 0
    assert written(project)["MODEL"] == str(model)


def test_snapshot_of_a_cache_brings_its_blobs(project: Path, tmp_path: Path):
    """The links of a Hugging Face snapshot lead to ../../blobs, which is mounted beside the model."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00d").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    assert env(project, MODEL=str(snapshot)).returncode == 0
    assert written(project)["MODEL_BLOBS"] == str(repository / "blobs")
    refused = env(project, MODEL=str(repository))
    assert refused.returncode == 1 and str(snapshot) in refused.stderr


def test_default_model_follows_the_checkout(project: Path):
    """Without MODEL, or with an empty one, it is the default model of this checkout, wherever that lay before."""
    (project / ".env").write_text("MODEL='/old/place/.work/models/SmolLM2-135M-Instruct'\n")
    assert env(project).returncode == 0
    default = str(ROOT / ".work" / "models" / "SmolLM2-135M-Instruct")
    assert written(project)["MODEL"] == default
    (project / ".env").write_text("MODEL='/gone'\n")
    assert env(project, MODEL="").returncode == 0
    assert written(project)["MODEL"] == default


@pytest.mark.parametrize(
    ("listed", "files"), [("GPU 0: NVIDIA H200 (UUID: GPU-af7b61d8)", True), ("No devices found", False)]
)
def test_gpu_brings_its_compose_file(project: Path, model: Path, tmp_path: Path, listed: str, files: bool):
    """Where nvidia-smi lists a GPU, compose.gpu.yaml takes part; a choice already in .env stays."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    assert env(project, MODEL=str(model), PATH=path).returncode == 0
    assert written(project)["COMPOSE_FILE"] == ("compose.yaml:compose.gpu.yaml" if files else "compose.yaml")
    (project / ".env").write_text("COMPOSE_FILE=compose.yaml:mine.yaml\n")
    assert env(project, MODEL=str(model), PATH=path).returncode == 0
    assert written(project)["COMPOSE_FILE"] == "compose.yaml:mine.yaml"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "is no directory on this machine"),
        ("models/a model/config.json", "is a file; name the directory it lies in"),
        ("models", "has no config.json"),
    ],
)
def test_unusable_model_is_refused_before_anything_is_written(
    project: Path, model: Path, tmp_path: Path, path: str, why: str
):
    """The path is named, in plain words, and .env stays as it was."""
    assert model.exists()
    refused = env(project, MODEL=str(tmp_path / path))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"weightkeeper: MODEL={tmp_path / path} ") and why in refused.stderr
    assert list(project.iterdir()) == []


def test_directory_that_cannot_be_read_is_refused():
    """An unreadable path is said as such, with the command that shows why."""
    if shutil.which("setpriv") is None or os.getuid():
        pytest.skip("needs root and setpriv, to become another user")
    if any(not parent.stat().st_mode & 0o001 for parent in ROOT.parents):
        pytest.skip(f"another user cannot enter {ROOT}")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o777)
        model = Path(place) / "model"
        model.mkdir(mode=0o700)
        refused = subprocess.run(
            ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", str(ROOT / "scripts" / "env")],
            env={"PATH": os.environ["PATH"], "WEIGHTKEEPER_COMPOSE_DIR": place, "MODEL": str(model)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert refused.returncode == 1
    assert f"MODEL={model} cannot be read by uid 12345: ls -ld {model}" in refused.stderr
