"""What the CUDA driver and NVML say of the GPUs, as JSON on stdout. A process of its own: a driver can hang or crash.

python -m weightkeeper.doctor_probe
"""

import json
import subprocess
from typing import Any

from weightkeeper import nvml
from weightkeeper.errors import MemoryKindError
from weightkeeper.memory.cuda_devices import devices
from weightkeeper.memory.cuda_driver import bindings, call

SMI_SECONDS = 10
_SMI = ("nvidia-smi", "--query-gpu=uuid,mig.mode.current,persistence_mode,driver_version", "--format=csv,noheader")


def probe() -> dict[str, Any]:
    """`cuda_version`, `error`, `number`, `driver_version`, and `gpus` with `mig` and `persistence` where known."""
    found: dict[str, Any] = {"cuda_version": "", "error": "", "number": 0, "driver_version": "", "gpus": []}
    try:
        version = int(call(bindings(), "cuDriverGetVersion"))
        found["cuda_version"] = f"{version // 1000}.{version % 1000 // 10}"
        found["gpus"] = [{name: getattr(each, name) for name in each.__slots__} for each in devices()]
        if not found["gpus"]:
            found["error"] = "the CUDA driver shows no GPU here"
    except MemoryKindError as error:
        found |= {"error": str(error), "number": getattr(error, "number", 0)}
    modes = _nvml() or _smi() if found["gpus"] else {}
    for gpu in found["gpus"]:
        mode = modes.get(gpu["uuid"], {})
        found["driver_version"] = mode.get("driver_version", found["driver_version"])
        gpu |= {"mig": mode.get("mig", "unknown"), "persistence": mode.get("persistence", "unknown")}
    return found


def _nvml() -> dict[str, dict[str, str]]:
    """UUID → modes, from NVML; empty where its package is not installed or it refuses."""
    library = nvml.bindings()
    if library is None:
        return {}
    found = {}
    try:
        driver = nvml.text(library.nvmlSystemGetDriverVersion())
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            found[nvml.text(library.nvmlDeviceGetUUID(handle))] = {
                "mig": _flag(library, lambda handle=handle: library.nvmlDeviceGetMigMode(handle)[0]),
                "persistence": _flag(library, lambda handle=handle: library.nvmlDeviceGetPersistenceMode(handle)),
                "driver_version": driver,
            }
    except library.NVMLError:
        return {}
    return found


def _flag(library: Any, ask: Any) -> str:
    try:
        return "on" if ask() else "off"
    except library.NVMLError_NotSupported:
        return "off"
    except library.NVMLError:
        return "unknown"


def _smi() -> dict[str, dict[str, str]]:
    """UUID → modes, from nvidia-smi; empty where it is not installed or fails."""
    try:
        result = subprocess.run(_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return {}
    words = {"Enabled": "on", "Disabled": "off", "[N/A]": "off"}
    found = {}
    for line in result.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            mig, persistence = (words.get(field, "unknown") for field in fields[1:3])
            found[fields[0]] = {"mig": mig, "persistence": persistence, "driver_version": fields[3]}
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
