"""Why a kind of memory does not work, and the remedy; and what works now but is a risk."""

from collections.abc import Iterator
from dataclasses import dataclass

from weightkeeper.doctor_report import Facts, Gpu, Risk
from weightkeeper.quantities import bytes_text

SMALL_SHM_BYTES = 1 << 30
"""vLLM's workers pass messages through /dev/shm; Docker's default of 64 MB is too little for several of them."""


@dataclass(frozen=True, slots=True)
class Cause:
    code: str
    remedy: str


_NO_GPU = Cause(
    "no_gpu",
    "give this container a GPU: `--gpus all`, or NVIDIA_VISIBLE_DEVICES under the NVIDIA runtime; "
    "and look at CUDA_VISIBLE_DEVICES",
)
_NO_DRIVER = Cause(
    "no_driver",
    "start the container with `--gpus all` or under the NVIDIA runtime, which brings libcuda.so.1; "
    "on a machine without a container, install the NVIDIA driver",
)
_NO_BINDINGS = Cause("no_bindings", "install the package cuda-bindings; images that have torch for CUDA have it")
_DRIVER = Cause(
    "driver",
    "the driver's library and its kernel module do not fit or the module is not healthy: look at `nvidia-smi` and "
    "`dmesg` on the machine, update the driver, and mount no libcuda.so.1 of your own",
)
_WSL = Cause("wsl", "CUDA under WSL does not share memory between processes this way; use Linux on the machine itself")
_MIG = Cause("mig", "give sidecar and engines the same MIG instance, or turn MIG off (`nvidia-smi -mig 0`)")
_COMPUTE_MODE = Cause("compute_mode", "let several processes use the GPU: `nvidia-smi -c DEFAULT` on the machine")
_PERMISSIONS = Cause(
    "permissions",
    "let this user read and write /dev/nvidia* (`--gpus` does; with `--device`, list /dev/nvidiactl and "
    "/dev/nvidia-uvm too), and let the seccomp profile pass memfd_create and SCM_RIGHTS",
)
_NO_ROOM = Cause("no_room", "end other programs that use this memory, or raise the container's memory limit")
_TIMEOUT = Cause("timeout", "look at `nvidia-smi` and `dmesg` on the machine; try again with a longer --timeout")
_REFUSED = Cause(
    "refused", "update the driver; if that does not help, report the output of `weightkeeper doctor --json`"
)

_NUMBERS = {
    2: _NO_ROOM,  # out of memory
    3: _DRIVER,  # not initialized
    34: _DRIVER,  # stub library
    35: _DRIVER,  # insufficient driver
    46: _COMPUTE_MODE,  # device unavailable
    100: _NO_GPU,  # no device
    101: _NO_GPU,  # invalid device
    304: _PERMISSIONS,  # operating system call failed
    800: _PERMISSIONS,  # not permitted
    802: _DRIVER,  # system not ready: no fabric manager
    803: _DRIVER,  # system driver mismatch
    804: _DRIVER,  # compatibility not supported on device
    999: _DRIVER,  # unknown
}
"""CUresult → cause, where the driver's number decides it."""

_WORDS = {
    "No module named": _NO_BINDINGS,
    "import of cuda": _NO_BINDINGS,
    "libcuda.so": _NO_DRIVER,
    "shows no GPU": _NO_GPU,
    "did not answer": _TIMEOUT,
    "no answer": _TIMEOUT,
    "available": _NO_ROOM,
    "Operation not permitted": _PERMISSIONS,
    "Permission denied": _PERMISSIONS,
    "Function not implemented": _PERMISSIONS,
}


def cause(message: str, number: int, facts: Facts, gpu: Gpu | None) -> Cause:
    """Of a failure.

    Args:
        message: what was said.
        number: of the CUDA error, 0 where it was none.
        gpu: on which it was tried; None for host memory, or where there is none.
    """
    if gpu is not None or number:
        if facts.wsl:
            return _WSL
        if gpu is not None and gpu.mig == "on" and number not in (2, 46):
            return _MIG
        if gpu is not None and gpu.compute_mode != "default" and number in (0, 46, 101):
            return _COMPUTE_MODE
        if any(not file.usable for file in facts.device_files) and number in (100, 101, 304, 800, 999):
            return _PERMISSIONS
    found = (each for words, each in _WORDS.items() if words in message)
    return _NUMBERS.get(number) or next(found, _REFUSED)


def warnings(facts: Facts) -> Iterator[Risk]:
    """What does not stop anything now."""
    for gpu in facts.gpus:
        yield from _of_gpu(gpu)
    if not facts.gpus and (facts.driver_version or facts.device_files):
        text = f"an NVIDIA driver is loaded on this machine, but no GPU can be used here: {facts.cuda_error}"
        yield Risk("gpu_out_of_reach", text, cause(facts.cuda_error, facts.cuda_number, facts, None).remedy)
    for file in facts.device_files:
        if not file.usable:
            text = f"{file.path} cannot be read and written by uid {facts.uid}"
            yield Risk("device_file", text, _PERMISSIONS.remedy)
    if not facts.socket_directory.usable:
        remedy = "mount the socket volume, or choose another directory with --socket-dir"
        yield Risk("socket_directory", facts.socket_directory.message, remedy)
    if facts.shm_bytes < SMALL_SHM_BYTES:
        text = f"there are {bytes_text(facts.shm_bytes)} in /dev/shm; engines with several workers need more"
        yield Risk("small_shm", text, "set `shm_size: 2gb` or `ipc: host` for the engine")


def _of_gpu(gpu: Gpu) -> Iterator[Risk]:
    if gpu.persistence == "off":
        text = f"persistence mode is off on {gpu.uuid}: with no process on the GPU the driver unloads and reloads"
        yield Risk("persistence_off", text, "`nvidia-smi -pm 1` on the machine, or run nvidia-persistenced")
    if gpu.mig == "on":
        text = f"MIG is on: only processes on the same instance of {gpu.uuid} can share memory"
        yield Risk("mig", text, _MIG.remedy)
    if gpu.compute_mode != "default":
        text = f"the compute mode of {gpu.uuid} is {gpu.compute_mode}"
        yield Risk("compute_mode", text, _COMPUTE_MODE.remedy)
