"""compose/ as Compose reads it; needs its command line, no engine."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compose_project import ROOT

if shutil.which("docker") is None:
    pytest.skip("needs the docker command", allow_module_level=True)

COMPOSE = ROOT / "compose"


def config(*files: str, **environment: str) -> dict[str, Any]:
    """The resolved project, of given files and nothing but the given variables."""
    command = ["docker", "compose", "--env-file", os.devnull, "--project-directory", str(COMPOSE)]
    for file in files:
        command += ["-f", str(COMPOSE / file)]
    given = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PWD": str(COMPOSE)} | environment
    done = subprocess.run(
        [*command, "config", "--format", "json"], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_project_resolves_without_any_setting():
    """`docker compose up` in compose/ works by itself once the images are built."""
    services = config("compose.yaml")["services"]
    assert set(services) == {"sidecar", "engine", "supervisor"}
    model = next(mount for mount in services["sidecar"]["volumes"] if mount["target"] == "/model")
    assert model["source"] == str(ROOT / ".work" / "models" / "SmolLM2-135M-Instruct")
    assert services["engine"]["ports"][0] | {"mode": "ingress"} == {
        "host_ip": "127.0.0.1", "target": 8000, "published": "8000", "protocol": "tcp", "mode": "ingress",
    }  # fmt: skip


def test_only_the_engine_may_be_restarted():
    """The label is on the engine alone; the sidecar is outside the supervisor's reach by that."""
    services = config("compose.yaml")["services"]
    assert {name for name, service in services.items() if "weightkeeper.supervise" in service.get("labels", {})} == {
        "engine"
    }


def test_watched_files_are_mounted_as_directories():
    """G20: no bind mount names a single file of the project, and model and configuration cannot be written."""
    services = config("compose.yaml", PROJECT_DIR=str(COMPOSE))["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount["type"] == "bind"]
    assert mounts
    for mount in mounts:
        if mount["target"] == "/var/run/docker.sock":
            continue
        assert not Path(mount["source"]).is_file()
        assert mount["read_only"] is True
    supervisor = {mount["source"]: mount["target"] for mount in services["supervisor"]["volumes"]}
    assert supervisor[str(COMPOSE)] == str(COMPOSE)


def test_gpu_file_reserves_one_gpu_and_keeps_everything_else():
    """With compose.gpu.yaml: the GPU, the host's IPC namespace, the official image as a base; else as on the CPU."""
    cpu = config("compose.yaml")["services"]
    gpu = config("compose.yaml", "compose.gpu.yaml", GPU="GPU-af7b61d8")["services"]
    assert gpu["supervisor"] == cpu["supervisor"]
    for name in ("sidecar", "engine"):
        service = gpu[name]
        assert service["deploy"]["resources"]["reservations"]["devices"] == [
            {"capabilities": ["gpu"], "driver": "nvidia", "device_ids": ["GPU-af7b61d8"]}
        ]
        assert service["ipc"] == "host" and "shm_size" not in service
        assert re.fullmatch(r"vllm/vllm-openai:v0\.\d+\.\d+", service["build"]["args"]["BASE_IMAGE"])
        assert service["command"][-1] == "/config/engine.gpu.yaml"
        assert (COMPOSE / "engine.gpu.yaml").exists()
        same = set(cpu[name]) - {"build", "command", "environment", "shm_size"}
        assert {key: service[key] for key in same} == {key: cpu[name][key] for key in same}
    assert gpu["engine"]["environment"] == cpu["engine"]["environment"] | {"VLLM_USE_MEGA_AOT_ARTIFACT": "1"}
    assert gpu["sidecar"].get("environment") == cpu["sidecar"].get("environment")


def test_isolated_file_gives_each_container_its_own_ipc_namespace():
    """With compose.isolated.yaml behind it: Docker's default isolation; the GPU and all else as before."""
    gpu = config("compose.yaml", "compose.gpu.yaml")["services"]
    isolated = config("compose.yaml", "compose.gpu.yaml", "compose.isolated.yaml")["services"]
    assert isolated["supervisor"] == gpu["supervisor"]
    for name in ("sidecar", "engine"):
        assert (gpu[name]["ipc"], isolated[name]["ipc"]) == ("host", "private")
        assert int(isolated[name]["shm_size"]) >= 512 << 20
        assert not {"pid", "network_mode", "uts", "privileged"} & set(isolated[name])
        same = set(gpu[name]) - {"ipc"}
        assert {key: isolated[name][key] for key in same} == {key: gpu[name][key] for key in same}


def test_every_variable_is_documented():
    """.env.example names each variable that a compose file reads."""
    text = "".join((COMPOSE / file).read_text() for file in ("compose.yaml", "compose.gpu.yaml"))
    read = set(re.findall(r"\$\{?([A-Z_]+)", text)) - {"PWD"}
    documented = set(re.findall(r"^#?([A-Z_]+)=", (COMPOSE / ".env.example").read_text(), re.M))
    assert read <= documented
