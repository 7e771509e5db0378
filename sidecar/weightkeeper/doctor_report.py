"""What the doctor finds, as data. Its JSON form is a promise to scripts: fields are added, never renamed."""

from typing import Literal

import msgspec

SCHEMA = 1
"""Of the JSON; grows when a field changes its meaning."""

Flag = Literal["on", "off", "unknown"]
Namespace = Literal["initial", "own", "unknown"]


class Gpu(msgspec.Struct, frozen=True):
    """One GPU that the driver shows here. `mig` and `persistence` come from NVML or nvidia-smi."""

    ordinal: int
    uuid: str
    name: str
    nbytes: int
    compute_mode: str
    exports_descriptors: bool
    mig: Flag
    persistence: Flag


class DeviceFile(msgspec.Struct, frozen=True):
    """`usable`: this user may read and write it."""

    path: str
    usable: bool


class SocketDirectory(msgspec.Struct, frozen=True):
    """`message` says why it is not usable, or that a keeper has to make it first."""

    path: str
    usable: bool
    message: str


class Facts(msgspec.Struct, frozen=True):
    """What was found without trying anything.

    Attributes:
        driver_version: of the NVIDIA kernel module; empty where none is loaded.
        cuda_version: that the driver's library speaks; empty where it cannot be used.
        cuda_error: why the driver cannot be used, or why it shows no GPU; empty where it does.
        cuda_number: of that error, where the driver gave it.
        visible: CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES, where they are set.
        container: `docker`, `podman`, `kubernetes`, `other` or `none`.
        namespaces: name → whether it is the machine's initial one.
        shm_bytes: size of /dev/shm; 0 where there is none.
        memlock_bytes: how much memory may be locked; None without a limit.
    """

    uid: int
    kernel: str
    wsl: bool
    container: str
    namespaces: dict[str, Namespace]
    shm_bytes: int
    memlock_bytes: int | None
    driver_version: str
    cuda_version: str
    cuda_error: str
    cuda_number: int
    visible: dict[str, str]
    gpus: tuple[Gpu, ...]
    device_files: tuple[DeviceFile, ...]
    socket_directory: SocketDirectory


class Step(msgspec.Struct, frozen=True):
    """One thing that was tried: make, export, hand over, map, read, refuse writes, outlive, clean up.

    `detail` is the error, or how a write was refused.
    """

    name: str
    ok: bool
    detail: str
    milliseconds: float


class Kind(msgspec.Struct, frozen=True):
    """One kind of memory on one device.

    Attributes:
        device: the GPU's UUID; empty for host memory and where there is no GPU.
        state: `not used` for a kind that this version leaves alone.
        code: of the cause, empty where it works.
        why: it does not work, for people.
        remedy: what to do about it.
        steps: in the order in which they were tried; after a failed one nothing is tried.
    """

    kind: str
    device: str
    state: Literal["works", "does not", "not used"]
    code: str = ""
    why: str = ""
    remedy: str = ""
    steps: tuple[Step, ...] = ()


class Risk(msgspec.Struct, frozen=True):
    """A warning: it stops nothing now, and may later or elsewhere."""

    code: str
    message: str
    remedy: str


class Report(msgspec.Struct, frozen=True):
    """Everything.

    Attributes:
        needed: the kind that this machine needs: `cuda-vmm` where a GPU is visible.
        works: whether that kind works, on every GPU that is visible.
    """

    schema: int
    version: str
    works: bool
    needed: str
    kinds: tuple[Kind, ...]
    warnings: tuple[Risk, ...]
    facts: Facts
