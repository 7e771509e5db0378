"""`weightkeeper doctor`: what it tries between real processes, what it says of each failure, and its exit codes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from weightkeeper.doctor_causes import cause, warnings
from weightkeeper.doctor_report import DeviceFile, Facts, Gpu, Report, SocketDirectory

HERE = Path(__file__).parent
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
STEPS = ["make", "export", "hand over", "map", "read", "refuse writes", "outlive", "clean up"]
GPU = Gpu(0, UUID, "NVIDIA H200", 150 << 30, "default", True, "off", "on")
FACTS = Facts(
    1000, "6.8.0", False, "docker", {}, 2 << 30, None, "580.1", "13.0", "", 0, {}, (GPU,),
    (DeviceFile("/dev/nvidia0", True),), SocketDirectory("/run/weightkeeper", True, ""),
)  # fmt: skip

without_driver = pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has an NVIDIA driver")


def environment(*before, **variables):
    paths = [*map(str, before), *(path for path in sys.path if path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def doctor(*arguments, prefix=(), **settings):
    """Exit code, stdout and stderr."""
    command = [*prefix, sys.executable, "-m", "weightkeeper.cli", "doctor", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)
    return result.returncode, result.stdout, result.stderr


def report(*arguments, **settings):
    """Exit code and the report."""
    settings.setdefault("env", environment())
    code, out, err = doctor("--json", *arguments, **settings)
    assert err == ""
    return code, msgspec.json.decode(out, type=Report)


def with_stand_in(*arguments, path=os.environ["PATH"], **trouble):
    """A report where `cuda.bindings` is the stand-in, with trouble as it says."""
    variables = environment(HERE / "cuda_standin", HERE, FAKE_CUDA=json.dumps(trouble), PATH=path)
    code, found = report(*arguments, env=variables)
    return code, found, next((kind for kind in found.kinds if kind.kind == "cuda-vmm"), None)


@pytest.fixture
def short_path():
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def orphans():
    """Processes of a trial whose doctor has ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            if parent == "1" and b"weightkeeper.doctor_" in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(name)
        except OSError:
            continue
    return found


@without_driver
def test_without_a_gpu_host_memory_is_what_counts():
    """All steps of it work here for real, with the write refused by the kernel; exit code 0."""
    code, found = report()
    assert (code, found.needed, found.works) == (0, "host", True)
    host = found.kinds[0]
    assert (host.kind, host.state, host.device, host.why) == ("host", "works", "", "")
    assert [(step.name, step.ok) for step in host.steps] == [(name, True) for name in STEPS]
    assert host.steps[5].detail == "the process ended by SIGSEGV (Segmentation fault)"
    assert orphans() == []


@without_driver
def test_a_missing_driver_is_named_with_its_remedy():
    """The library that is looked for, and how a container gets it."""
    pytest.importorskip("cuda.bindings.driver")
    _, found = report()
    (kind,) = [kind for kind in found.kinds if kind.kind == "cuda-vmm"]
    assert (kind.state, kind.code, kind.device) == ("does not", "no_driver", "")
    assert "libcuda.so.1" in kind.why
    assert "--gpus all" in kind.remedy
    assert "NVIDIA runtime" in kind.remedy
    assert (found.facts.cuda_version, found.facts.gpus) == ("", ())


def test_the_json_keeps_its_fields():
    """Scripts read these names; a new one may come, none may go."""
    _, out, _ = doctor("--json", env=environment())
    found = json.loads(out)
    assert list(found) == ["schema", "version", "works", "needed", "kinds", "warnings", "facts"]
    assert found["schema"] == 1
    assert [kind["kind"] for kind in found["kinds"]][::2] == ["host", "cuda-ipc"]
    assert found["kinds"][-1]["state"] == "not used"
    assert found["kinds"][-1]["why"] == "this version of weightkeeper does not use it"
    assert list(found["kinds"][0]) == ["kind", "device", "state", "code", "why", "remedy", "steps"]
    assert list(found["kinds"][0]["steps"][0]) == ["name", "ok", "detail", "milliseconds"]
    assert list(found["facts"]) == [
        "uid", "kernel", "wsl", "container", "namespaces", "shm_bytes", "memlock_bytes", "driver_version",
        "cuda_version", "cuda_error", "cuda_number", "visible", "gpus", "device_files", "socket_directory",
    ]  # fmt: skip


def test_the_table_says_what_works_and_what_is_needed():
    """For people; the last line is the verdict."""
    variables = environment(HERE / "cuda_standin", HERE)
    code, out, err = doctor("--socket-dir", "/run/weightkeeper", env=variables)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"GPU 0        NVIDIA Stand-in, {UUID}, 68.7 GB, compute mode default, MIG unknown" in out
    assert f"cuda-vmm     works      {UUID}" in lines
    assert "host         works      -" in lines
    assert "cuda-ipc     not used   -" in lines
    assert lines[-1] == "cuda-vmm is what this machine needs, and it works"


def test_gpu_memory_is_tried_the_same_way():
    """On every GPU that the driver shows; the write is refused with the driver's own error."""
    code, found, kind = with_stand_in()
    assert (code, found.needed, found.works) == (0, "cuda-vmm", True)
    assert (kind.state, kind.device) == ("works", UUID)
    assert [(step.name, step.ok) for step in kind.steps] == [(name, True) for name in STEPS]
    assert kind.steps[5].detail == f"cuMemcpyHtoD for 1 bytes failed on {UUID}: illegal_address (CUDA error 700)"
    (gpu,) = found.facts.gpus
    assert (gpu.uuid, gpu.compute_mode, gpu.exports_descriptors) == (UUID, "default", True)
    assert found.facts.cuda_version == "13.1"


@pytest.mark.parametrize(
    ("call", "number", "step", "code"),
    [
        ("cuDevicePrimaryCtxRetain", 46, "make", "compute_mode"),
        ("cuMemCreate", 2, "make", "no_room"),
        ("cuMemExportToShareableHandle", 801, "export", "refused"),
        ("cuMemImportFromShareableHandle", 800, "map", "permissions"),
    ],
)
def test_a_refused_call_stops_the_trial_and_has_a_cause(call, number, step, code):
    """Steps up to it are shown, none after it; exit code 1 although host memory works."""
    exit_code, found, kind = with_stand_in(fail={call: number})
    assert (exit_code, found.works) == (1, False)
    assert [kind.kind for kind in found.kinds if kind.state == "works"] == ["host"]
    assert (kind.state, kind.code) == ("does not", code)
    assert kind.why.startswith(f"{step}: {call}")
    assert f"(CUDA error {number})" in kind.why
    assert [each.name for each in kind.steps if not each.ok] == [step]
    assert kind.remedy != ""
    assert orphans() == []


def test_a_write_that_goes_through_is_a_failure():
    """Read-only has to mean it."""
    code, _, kind = with_stand_in(writable=True)
    assert (code, kind.state) == (1, "does not")
    assert kind.why == "refuse writes: a write into memory that is mapped read-only went through"


def test_a_driver_that_hangs_is_given_up():
    """After the time limit, with its process ended."""
    code, _, kind = with_stand_in("--timeout", "3", hang="cuMemImportFromShareableHandle")
    assert (code, kind.state, kind.code) == (1, "does not", "timeout")
    assert kind.why == "map: no answer to `map` within 3 s"
    assert orphans() == []


def test_a_process_that_is_killed_is_no_refused_write():
    """How it ended is said."""
    _, _, kind = with_stand_in(die="cuMemcpyHtoD")
    assert kind.why == "make: the process ended by SIGKILL (Killed)"
    assert kind.code == "refused"


def test_a_driver_without_a_gpu_needs_host_memory():
    """The driver's own error, and which settings give a GPU."""
    code, found, kind = with_stand_in(fail={"cuInit": 100})
    assert (code, found.needed) == (0, "host")
    assert (kind.code, kind.device) == ("no_gpu", "")
    assert "CUDA_VISIBLE_DEVICES" in kind.remedy


def test_modes_of_the_gpu_come_from_nvidia_smi_where_nvml_is_missing(tmp_path):
    """MIG and persistence mode, each with its warning."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{UUID}, Enabled, Disabled, 580.65.06'\n")
    smi.chmod(0o755)
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')\n")
    variables = environment(tmp_path, HERE / "cuda_standin", HERE, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    _, found = report(env=variables)
    (gpu,) = found.facts.gpus
    assert (gpu.mig, gpu.persistence, found.facts.driver_version) == ("on", "off", "580.65.06")
    assert [warning.code for warning in found.warnings if UUID in warning.message] == ["persistence_off", "mig"]


def test_namespaces_of_its_own_are_seen():
    """The doctor looks where it is started, not at the machine."""
    prefix = ("unshare", "--ipc", "--uts")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    _, found = report(prefix=prefix)
    assert (found.facts.namespaces["ipc"], found.facts.namespaces["uts"]) == ("own", "own")
    assert found.kinds[0].state == "works"


def test_the_socket_directory_is_looked_at_and_not_touched(short_path):
    """Not there yet is fine, open to others is not, too long a path is not; nothing is made or changed."""
    new, open_to_all, long = short_path / "new", short_path / "open", short_path / ("x" * 100)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    _, found = report("--socket-dir", str(new))
    assert found.facts.socket_directory == SocketDirectory(str(new), True, "not there yet; a keeper makes it")
    assert not new.exists()
    _, found = report("--socket-dir", str(open_to_all))
    assert not found.facts.socket_directory.usable
    assert "can be written by other users (mode 0777)" in found.facts.socket_directory.message
    assert "socket_directory" in [warning.code for warning in found.warnings]
    assert open_to_all.stat().st_mode & 0o777 == 0o777
    _, found = report("--socket-dir", str(long))
    assert "bytes shorter" in found.facts.socket_directory.message


@pytest.mark.parametrize(
    ("changes", "gpu", "number", "code"),
    [
        ({"wsl": True}, GPU, 801, "wsl"),
        ({}, msgspec.structs.replace(GPU, mig="on"), 801, "mig"),
        ({}, msgspec.structs.replace(GPU, mig="on"), 2, "no_room"),
        ({}, msgspec.structs.replace(GPU, compute_mode="exclusive process"), 46, "compute_mode"),
        ({"device_files": (DeviceFile("/dev/nvidiactl", False),)}, None, 100, "permissions"),
        ({}, None, 100, "no_gpu"),
        ({}, None, 803, "driver"),
        ({}, GPU, 801, "refused"),
    ],
)
def test_the_same_error_has_different_causes_in_different_places(changes, gpu, number, code):
    """WSL, MIG, compute mode and device files explain more than the driver's number."""
    assert cause("refused", number, msgspec.structs.replace(FACTS, **changes), gpu).code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("the CUDA driver cannot be used: No module named 'cuda'; is libcuda.so.1 in this container?", "no_bindings"),
        ("the CUDA driver cannot be used: Failed to dlopen libcuda.so.1; is libcuda.so.1 in this …?", "no_driver"),
        ("the CUDA driver did not answer within 30 s", "timeout"),
        ("4096 bytes of shared memory wanted, 10 available (the machine's available memory)", "no_room"),
    ],
)
def test_errors_without_a_number_have_a_cause_by_their_words(message, code):
    """Our own messages and the system's."""
    assert cause(message, 0, FACTS, None).code == code


def test_what_works_can_still_be_a_risk():
    """Each warning has a remedy; a machine in order has none."""
    assert list(warnings(FACTS)) == []
    facts = msgspec.structs.replace(FACTS, shm_bytes=64 << 20, gpus=(), cuda_error="no device", cuda_number=100)
    found = list(warnings(facts))
    assert [warning.code for warning in found] == ["gpu_out_of_reach", "small_shm"]
    assert all(warning.remedy for warning in found)
