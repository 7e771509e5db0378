"""Which GPUs the CUDA driver shows this process, by ordinal and UUID. No context is made on any of them."""

import os
from dataclasses import dataclass

from weightkeeper.errors import MemoryKindError
from weightkeeper.memory.cuda_driver import bindings, call, gpu_uuid

_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Device:
    """One visible GPU.

    Attributes:
        ordinal: in this process, after CUDA_VISIBLE_DEVICES.
        uuid: as nvidia-smi writes it.
        nbytes: of its memory.
        compute_mode: `default`, `exclusive process` or `prohibited`.
        exports_descriptors: whether the driver says that its memory can be shared as file descriptors.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int
    compute_mode: str
    exports_descriptors: bool


def devices() -> list[Device]:
    """All of them, by ordinal.

    Raises:
        MemoryKindError: no driver, or it refused; no GPU at all is CUDA error 100.
    """
    api = bindings()
    attributes = api.CUdevice_attribute
    found = []
    for ordinal in range(int(call(api, "cuDeviceGetCount"))):
        device = call(api, "cuDeviceGet", ordinal)
        mode = api.CUcomputemode(int(_attribute(api, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device)))
        exports = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        found.append(
            Device(
                ordinal=ordinal,
                uuid=gpu_uuid(call(api, "cuDeviceGetUuid", device).bytes),
                name=bytes(call(api, "cuDeviceGetName", _NAME_BYTES, device)).split(b"\0")[0].decode(errors="replace"),
                nbytes=int(call(api, "cuDeviceTotalMem", device)),
                compute_mode=mode.name.removeprefix("CU_COMPUTEMODE_").lower().replace("_", " "),
                exports_descriptors=bool(_attribute(api, exports, device)),
            )
        )
    return found


def ordinal_of(uuid: str) -> int:
    """The ordinal in this process of the GPU with this UUID.

    Raises:
        MemoryKindError: it is not among those that are visible here; the message names them.
    """
    visible = devices()
    for device in visible:
        if _plain(device.uuid) == _plain(uuid):
            return device.ordinal
    names = ", ".join(device.uuid for device in visible) or "none"
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if limit is None else f", CUDA_VISIBLE_DEVICES is {limit!r}"
    raise MemoryKindError(
        f"{uuid} is not visible in this process (visible: {names}{why}); run this where that GPU is, "
        "in the container that loaded its weights, say"
    )


def _attribute(api: object, attribute: object, device: object) -> object:
    return call(api, "cuDeviceGetAttribute", attribute, device)


def _plain(uuid: str) -> str:
    """Without `GPU-` or `MIG-`: the driver gives the digits alone, also for a part of a GPU."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
