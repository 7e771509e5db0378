"""The sidecar's image on its own: whose directories it works in, and what it says where it cannot (G11, G25)."""

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose_project import docker, inspect, until

pytestmark = pytest.mark.docker

IMAGE = "weightkeeper-sidecar:local"
SERVE = ("weightkeeper", "serve", "--socket-dir", "/run/weightkeeper")


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a container and a volume, of which nothing is left afterwards."""
    chosen = f"wktest-{uuid.uuid4().hex[:8]}"
    yield chosen
    docker("rm", "-f", "-v", chosen, check=False)
    docker("volume", "rm", "-f", chosen, check=False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A container in the foreground, as locked down as in compose.yaml, with its output."""
    locked = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--tmpfs", "/tmp")
    return subprocess.run(
        ["docker", "run", "--rm", *locked, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_fresh_named_volume_belongs_to_the_service_user(name: str):
    """G11: with user 1000:1000 and a new volume the keeper answers, since the image owns the path."""
    docker("run", "-d", "--name", name, "--user", "1000:1000", "-v", f"{name}:/run/weightkeeper", IMAGE, *SERVE)
    until("it is healthy", lambda: inspect(name)["State"]["Health"]["Status"] == "healthy")
    told = json.loads(docker("exec", name, "weightkeeper", "status", "--json"))
    assert told["state"] == "empty"
    assert docker("exec", name, "stat", "-c", "%u:%g %a", "/run/weightkeeper") == "1000:1000 700\n"


def test_volume_of_root_is_refused_in_the_first_line(tmp_path: Path):
    """G11: a bind mount made by root gives path, owner, our uid and the remedy, before anything else."""
    if os.getuid():
        pytest.skip("needs root, to make a directory of root's")
    tmp_path.chmod(0o755)
    done = run("--user", "1000:1000", "-v", f"{tmp_path}:/run/weightkeeper", IMAGE, *SERVE)
    first = done.stderr.splitlines()[0]
    assert done.returncode == 1
    assert first.startswith("weightkeeper: /run/weightkeeper")
    for part in ("uid 0", "uid 1000", "chown"):
        assert part in first
    assert list(tmp_path.iterdir()) == []


def test_faulty_checkpoint_makes_the_service_unhealthy_with_the_list(name: str, tmp_path: Path):
    """G25: every fault is in the log and in the health check; the keeper goes on and waits for a change."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    pointer, missing = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"weight_map": {"a.weight": pointer, "b.weight": missing}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / pointer).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1000\n")
    (tmp_path / "engine.yaml").write_text("model: /model\nload-format: weightkeeper\n")
    for path in (tmp_path, model, *model.iterdir(), tmp_path / "engine.yaml"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    mounts = ("-v", f"{tmp_path}:/config:ro", "-v", f"{model}:/model:ro")
    docker("run", "-d", "--name", name, *mounts, IMAGE, *SERVE, "--config", "/config/engine.yaml")
    until("it is unhealthy", lambda: inspect(name)["State"]["Health"]["Status"] == "unhealthy", 90)
    why = inspect(name)["State"]["Health"]["Log"][-1]["Output"]
    told = json.loads(docker("exec", name, "weightkeeper", "status", "--json"))
    assert told["state"] == "failed" and inspect(name)["RestartCount"] == 0
    for text in (why, told["failure"]):
        assert "git lfs pull" in text and missing in text


def test_links_of_a_cache_snapshot_lead_to_the_blobs_beside_the_model(tmp_path: Path):
    """A snapshot's files are links to ../../blobs; mounted as compose.yaml does it, the checkpoint is whole."""
    snapshot, blobs = tmp_path / "snapshots" / "0123abcd", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    header = json.dumps({"a.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    contents = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(4),
    }
    for number, (file, content) in enumerate(contents.items()):
        (blobs / f"{number:040x}").write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{number:040x}")
    for directory in (tmp_path, snapshot.parent, snapshot, blobs):
        directory.chmod(0o755)
    mounts = ("-v", f"{snapshot}:/model:ro", "-v", f"{blobs}:/blobs:ro")
    done = run(*mounts, IMAGE, "weightkeeper", "inspect", "--json", "--no-identity", "/model")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensor_bytes"] == 4
    alone = run(*mounts[:2], IMAGE, "weightkeeper", "inspect", "/model")
    assert alone.returncode == 1 and ":/blobs:ro" in alone.stderr


@pytest.mark.parametrize("service", ["sidecar", "engine", "supervisor"])
def test_images_give_signals_and_exit_codes_to_the_program(service: str):
    """The entrypoints exec: what is run is process 1 itself, and its exit code is the container's."""
    image = f"weightkeeper-{service}:local"
    done = run(image, "sh", "-c", "cat /proc/1/comm; id -u; exit 7")
    assert (done.stdout, done.returncode) == ("sh\n1000\n", 7)
    assert inspect(image)["Config"]["User"] == "1000:1000"
