"""What can be said of this machine, this container and its GPUs before anything is tried."""

import json
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from weightkeeper.doctor_report import DeviceFile, Facts, Gpu, Namespace, SocketDirectory
from weightkeeper.errors import WeightkeeperError
from weightkeeper.quantities import printable
from weightkeeper.sockets import allowed_uids, check_owner, control_path, engine_path

INITIAL = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF, "uts": 0xEFFFFFFE, "user": 0xEFFFFFFD}
"""Namespace → inode of the machine's first one, fixed by the kernel (include/linux/proc_ns.h)."""

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_GROUPS = {"docker": "docker", "kubepods": "kubernetes", "libpod": "podman", "containerd": "other"}
_OVERLAY_ROOT = re.compile(r"^\S+ \S+ \S+ \S+ / .* - overlay ", re.MULTILINE)


def collect(socket_dir: str, seconds: float) -> Facts:
    """All facts.

    Args:
        seconds: for the driver to say what it has.
    """
    found = _probed(seconds)
    unlimited, memlock = resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        uid=os.geteuid(),
        kernel=platform.release(),
        wsl="microsoft" in _text("/proc/version").lower(),
        container=_container(),
        namespaces={name: _namespace(name) for name in ("pid", "ipc", "net", "mnt", "uts", "user")},
        shm_bytes=_size("/dev/shm"),  # noqa: S108  its size is asked, nothing is written
        memlock_bytes=None if memlock == unlimited else memlock,
        driver_version=found["driver_version"] or _module_version(),
        cuda_version=found["cuda_version"],
        cuda_error=found["error"],
        cuda_number=found["number"],
        visible={name: os.environ[name] for name in _VISIBLE if name in os.environ},
        gpus=tuple(Gpu(**gpu) for gpu in found["gpus"]),
        device_files=tuple(
            DeviceFile(str(path), os.access(path, os.R_OK | os.W_OK))
            for path in sorted(Path("/dev").glob("nvidia*"))
            if path.is_char_device()
        ),
        socket_directory=_socket_directory(socket_dir, found["gpus"][0]["uuid"] if found["gpus"] else "cpu-0"),
    )


def _probed(seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "weightkeeper.doctor_probe"]
    error = f"the CUDA driver did not answer within {seconds:g} s"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        return json.loads(result.stdout)
    except ValueError:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        error = f"asking the CUDA driver failed: {printable(last, 400)}"
    except subprocess.TimeoutExpired:
        pass
    return {"cuda_version": "", "error": error, "number": 0, "driver_version": "", "gpus": []}


def _module_version() -> str:
    found = re.search(r"Kernel Module\D*?\s(\d[\d.]+)", _text("/proc/driver/nvidia/version"))
    return found[1] if found else ""


def _container() -> str:
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    groups = _text("/proc/self/cgroup")
    without = "other" if _OVERLAY_ROOT.search(_text("/proc/self/mountinfo")) else "none"
    return next((name for word, name in _GROUPS.items() if word in groups), without)


def _namespace(name: str) -> Namespace:
    """The kernel numbers only some first namespaces; the others can be compared with those of the first process."""
    try:
        ours = os.stat(f"/proc/self/ns/{name}").st_ino
        if name in INITIAL:
            return "initial" if ours == INITIAL[name] else "own"
        if os.stat("/proc/self/ns/pid").st_ino != INITIAL["pid"]:
            return "unknown"  # process 1 here is not the machine's
        return "initial" if ours == os.stat(f"/proc/1/ns/{name}").st_ino else "own"
    except OSError:
        return "unknown"


def _socket_directory(path: str, device: str) -> SocketDirectory:
    """Whether a keeper could serve this device there, and an engine trust it; nothing is made or changed."""
    try:
        engine_path(path, device)
        check_owner(control_path(path), allowed_uids())
        return SocketDirectory(path, True, "")
    except FileNotFoundError:
        pass
    except WeightkeeperError as error:
        return SocketDirectory(path, False, str(error))
    parent = Path(path).absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        return SocketDirectory(path, False, f"uid {os.geteuid()} cannot write to {parent}; make {path} for this user")
    return SocketDirectory(path, True, "" if os.path.isdir(path) else "not there yet; a keeper makes it")


def _size(path: str) -> int:
    try:
        state = os.statvfs(path)
    except OSError:
        return 0
    return state.f_blocks * state.f_frsize


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
