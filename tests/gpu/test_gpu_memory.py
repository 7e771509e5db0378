"""The rules of test_cuda_vmm on a real GPU; and doctor, digests and verify there."""

import gc
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))

from keepers import KeeperProcess, wait_for  # noqa: E402

from weightkeeper.capture import pack  # noqa: E402
from weightkeeper.digest import digest  # noqa: E402
from weightkeeper.doctor_report import Report  # noqa: E402
from weightkeeper.errors import MemoryKindError  # noqa: E402
from weightkeeper.memory import cuda_devices, cuda_driver, cuda_vmm  # noqa: E402
from weightkeeper.memory.cuda_vmm import CudaMemory  # noqa: E402
from weightkeeper.memory.sameness import is_same  # noqa: E402
from weightkeeper.restore import bind  # noqa: E402
from weightkeeper.tensors import bytes_of  # noqa: E402

pytestmark = pytest.mark.gpu

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])}
LOADER = f"{shlex.quote(sys.executable)} {shlex.quote(str(TESTS / 'digesting_loader.py'))}"
STEPS = ["make", "export", "hand over", "map", "read", "refuse writes", "outlive", "clean up"]
MODEL_BYTES = 64 * 100 * 4 + 300 * 100 * 4 + 300 * 4 + 2000 * 4


@pytest.fixture(scope="module")
def visible():
    """The GPUs; no CUDA call is made before the first test that needs one."""
    try:
        found = cuda_devices.devices()
    except MemoryKindError as error:
        pytest.skip(f"no GPU here: {error}")
    if not found or not torch.cuda.is_available():
        pytest.skip(f"no GPU for torch {torch.__version__} here; the driver shows {len(found)}")
    return found


@pytest.fixture
def driver(visible, monkeypatch):
    """The first GPU, with torch's context current and segments of 8 MiB."""
    torch.cuda.set_device(0)
    torch.empty(1, device="cuda:0")
    found = cuda_driver.open_driver(0)
    monkeypatch.setattr(cuda_vmm, "SEGMENT_BYTES", 4 * found.granularity)
    return found


def counted(nbytes: int) -> torch.Tensor:
    """Bytes that count up."""
    return (torch.arange(nbytes, dtype=torch.int64, device="cuda:0") & 255).to(torch.uint8)


def filled(driver, nbytes: int):
    """A sealed arena whose first `nbytes` bytes count up, and its descriptors."""
    arena = CudaMemory(driver).create(nbytes)
    arena.back(nbytes)
    whole = bytes_of(arena.region)
    whole[:nbytes] = counted(nbytes)
    del whole
    arena.seal()
    return arena, arena.export()


def close(descriptors) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run(*arguments: str, timeout: float = 120):
    """Exit code, stdout and stderr of the program."""
    command = [sys.executable, "-m", "weightkeeper.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout)
    return result.returncode, result.stdout, result.stderr


def test_an_arena_is_segments_behind_one_another(driver):
    """One contiguous range over several allocations, all but the last of full size."""
    unit = driver.granularity
    nbytes = 9 * unit + 1
    arena, descriptors = filled(driver, nbytes)
    assert arena.sizes == (4 * unit, 4 * unit, 2 * unit)
    whole = bytes_of(CudaMemory(driver).map(descriptors, arena.sizes))
    assert whole.numel() == 10 * unit
    assert torch.equal(whole[:nbytes], counted(nbytes))
    close(descriptors)
    arena.close()


def test_memory_outlives_its_maker(driver):
    """A descriptor keeps the bytes when the arena is closed; then a mapping does when the descriptor is."""
    arena, descriptors = filled(driver, 100)
    arena.close()
    whole = bytes_of(CudaMemory(driver).map(descriptors, arena.sizes))
    close(descriptors)
    assert int(whole[99]) == 99


def test_copies_of_a_descriptor_are_known_as_the_same_memory(driver):
    """By the open file, which the driver makes one of for each export; other memory of the same GPU is other memory."""
    unit = driver.granularity
    (one, descriptors), (other, others) = filled(driver, 9 * unit), filled(driver, 9 * unit)
    copies = [os.dup(each) for each in descriptors]
    assert len(copies) == 3
    assert is_same("cuda-vmm", descriptors, copies)
    assert not is_same("cuda-vmm", descriptors, others)
    assert not is_same("cuda-vmm", descriptors, copies[::-1])
    close([*descriptors, *others, *copies])
    one.close()
    other.close()


def test_nothing_is_left_after_closing(driver):
    """GPU memory and descriptors, over many cycles."""

    def cycle() -> None:
        arena, descriptors = filled(driver, 20 * driver.granularity)
        region = CudaMemory(driver).map(descriptors, arena.sizes)
        region.close()
        arena.close()
        close(descriptors)

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(0)
        return free, len(os.listdir("/proc/self/fd"))

    cycle()
    free, open_before = used()
    for _ in range(50):
        cycle()
    free_after, open_after = used()
    assert open_after == open_before
    assert free - free_after < 20 * driver.granularity  # one leaked cycle would be this much


def test_segments_are_made_only_as_they_are_needed(driver):
    """So that what is packed can be freed before the next one is allocated."""
    asked = []
    arena = CudaMemory(driver, before_allocation=lambda: asked.append(1)).create(10 * driver.granularity)
    assert asked == []
    arena.back(1)
    assert len(asked) == 1
    arena.back(4 * driver.granularity)
    assert len(asked) == 1
    arena.back(10 * driver.granularity)
    assert len(asked) == 3
    arena.close()


def test_too_little_memory_says_how_much_was_wanted(driver, visible, monkeypatch):
    """The driver's own refusal, with the bytes and the device."""
    wanted = 2 * visible[0].nbytes // driver.granularity * driver.granularity
    monkeypatch.setattr(cuda_vmm, "SEGMENT_BYTES", wanted)
    arena = CudaMemory(driver).create(wanted)
    with pytest.raises(MemoryKindError, match=rf"cuMemCreate for {wanted} bytes failed on {driver.uuid}"):
        arena.back(1)
    arena.close()


def test_a_descriptor_of_gpu_memory_passes_the_keepers_check(driver):
    """And a file does not."""
    arena, descriptors = filled(driver, 100)
    cuda_vmm.check_descriptor(descriptors[0], arena.sizes[0])
    with open(__file__) as file, pytest.raises(MemoryKindError, match="is a file"):
        cuda_vmm.check_descriptor(file.fileno(), arena.sizes[0])
    close(descriptors)
    arena.close()


def test_a_foreign_descriptor_is_refused_by_the_driver(driver):
    """What the keeper cannot see, the driver does; nothing stays mapped."""
    with (
        open("/dev/null") as file,
        pytest.raises(MemoryKindError, match="cuMemImportFromShareableHandle failed on GPU-"),
    ):
        CudaMemory(driver).map([file.fileno()], [driver.granularity])


def test_a_model_goes_through_gpu_memory_and_comes_back(driver):
    """Pack, seal, export, map, bind, and compute on it."""
    model = nn.Linear(3000, 1000).cuda().requires_grad_(False)
    inputs = torch.ones(2, 3000, device="cuda:0")
    expected, weight = model(inputs), model.weight.clone()
    layout, arena = pack(model, CudaMemory(driver), {})
    arena.seal()
    descriptors = arena.export()
    region = CudaMemory(driver).map(descriptors, arena.sizes)
    with torch.device("meta"):
        again = nn.Linear(3000, 1000)
    bind(again, layout, bytes_of(region), share=True)
    assert region.address <= again.weight.data_ptr() < region.address + region.nbytes
    assert torch.equal(again.weight, weight)
    assert torch.equal(again(inputs), expected)
    close(descriptors)
    arena.close()


def test_a_write_through_a_mapping_ends_the_writer_alone(driver):
    """An illegal memory access there; here the same memory is still right."""
    arena, descriptors = filled(driver, 1 << 20)
    script = """
        import sys
        import torch
        from weightkeeper.memory import cuda_vmm
        from weightkeeper.tensors import bytes_of
        torch.empty(1, device="cuda:0")
        sizes = [int(size) for size in sys.argv[2:]]
        whole = bytes_of(cuda_vmm.open_device(0).map([int(sys.argv[1])], sizes))
        print("read", int(whole[7]), flush=True)
        whole.fill_(1)
        torch.cuda.synchronize()
        print("written", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(descriptors[0]), str(arena.sizes[0])]
    result = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, pass_fds=descriptors[:1], timeout=120
    )
    assert result.stdout == "read 7\n"
    assert result.returncode != 0
    assert "illegal memory access" in result.stderr
    whole = bytes_of(CudaMemory(driver).map(descriptors, arena.sizes))
    assert torch.equal(whole[: 1 << 20], counted(1 << 20))
    close(descriptors)
    arena.close()


def test_plain_copies_reach_the_device_and_come_back(driver):
    """What the doctor uses in place of torch."""
    arena = CudaMemory(driver).create(1)
    arena.back(1)
    driver.write(arena.region.address, b"weights")
    assert driver.read(arena.region.address, 7) == b"weights"
    arena.close()


@pytest.mark.parametrize("nbytes", [1, (256 << 10) - 1, 256 << 10, (8 << 20) + 5, (64 << 20) + 13])
def test_a_digest_is_the_same_on_both_sides(visible, nbytes):
    """Integer arithmetic has one result; the extra memory is bounded whatever the size."""
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
    digest(data[:1])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = digest(data)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert found == digest(data.cpu())
    data[nbytes // 2] ^= 1
    assert digest(data) != found


def test_the_speed_of_a_digest_is_told(visible, record_property, capsys):
    """A number for people; nothing depends on it."""
    data = torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0").fill_(7)
    digest(data[: 64 << 20])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    found = digest(data)
    end.record()
    torch.cuda.synchronize()
    speed = data.numel() / start.elapsed_time(end) / 1e6
    record_property("digest_gb_per_s", round(speed, 1))
    with capsys.disabled():
        print(f"\ndigest: {speed:.0f} GB/s on {torch.cuda.get_device_name(0)}")
    assert found != digest(data[:-1])


def test_devices_are_found_by_their_uuid(visible):
    """As vLLM and nvidia-smi write it, whatever CUDA_VISIBLE_DEVICES says."""
    for device in visible:
        assert cuda_devices.ordinal_of(device.uuid) == device.ordinal
        assert f"GPU-{torch.cuda.get_device_properties(device.ordinal).uuid}" == device.uuid
    with pytest.raises(MemoryKindError, match=rf"is not visible in this process \(visible: {visible[0].uuid}"):
        cuda_devices.ordinal_of("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")


def test_the_doctor_finds_gpu_memory_working(visible):
    """Every step on every visible GPU, in processes without torch; exit code 0."""
    code, out, err = run("doctor", "--json")
    found = msgspec.json.decode(out, type=Report)
    assert (code, err, found.needed, found.works) == (0, "", "cuda-vmm", True), out
    kinds = {kind.device: kind for kind in found.kinds if kind.kind == "cuda-vmm"}
    assert list(kinds) == [gpu.uuid for gpu in found.facts.gpus] == [device.uuid for device in visible]
    for kind in kinds.values():
        assert [(step.name, step.ok) for step in kind.steps] == [(name, True) for name in STEPS]
        assert kind.steps[5].detail != ""
    assert found.facts.cuda_version != ""
    code, out, _ = run("doctor")
    assert (code, out.splitlines()[-1]) == (0, "cuda-vmm is what this machine needs, and it works")


def test_the_doctor_sees_that_no_gpu_is_visible(visible, monkeypatch):
    """Host memory counts then; the cause is named."""
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "-1")
    code, out, _ = run("doctor", "--json")
    found = msgspec.json.decode(out, type=Report)
    assert (code, found.needed) == (0, "host"), out
    (kind,) = [kind for kind in found.kinds if kind.kind == "cuda-vmm"]
    assert (kind.state, kind.code) == ("does not", "no_gpu"), kind.why
    assert found.facts.visible["CUDA_VISIBLE_DEVICES"] == "-1"


@contextmanager
def holding(directory: Path, **plan):
    """A keeper that holds the model of `digesting_loader` on the first GPU."""
    short = Path(tempfile.mkdtemp(prefix="wk", dir="/tmp"))  # a GPU's UUID has to fit into a socket's path
    (directory / "kept").symlink_to(short)
    one = KeeperProcess(short, cuda=True, **plan).start(loader=LOADER)
    try:
        wait_for(lambda: (now := one.status()) and now.state == "ready", "weights on the GPU", seconds=120)
        yield one
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe keeper's log:\n{one.text()}") from error
    finally:
        one.kill()


def test_verify_reads_through_a_mapping_of_its_own(visible, tmp_path):
    """Digests that the loader took on the GPU fit what the keeper holds, and the keeper has no CUDA in it.

    Two parameters that were views of one storage are two on the GPU, where each was moved by itself.
    """
    with holding(tmp_path) as one:
        maps = Path(f"/proc/{one.process.pid}/maps").read_text()
        assert "libcuda" not in maps
        code, out, err = run("verify", "--socket-dir", one.socket_dir)
        assert (code, err) == (0, ""), out
        pattern = rf"{visible[0].uuid}: as it was loaded \(154\.8 kB in 5 storages, \d+\.\d\d s, [\d.]+ [kMG]B/s\)\n"
        assert re.fullmatch(pattern, out), out


def test_verify_finds_a_spoiled_byte_on_the_gpu(visible, tmp_path, monkeypatch):
    """The tensors are named; where that GPU is hidden, this is said, and nothing is verified."""
    with holding(tmp_path, spoil="embed.weight") as one:
        code, out, _ = run("verify", "--socket-dir", one.socket_dir, "--json")
        (device,) = json.loads(out)["devices"]
        assert (code, device["device"], device["kind"]) == (1, visible[0].uuid, "cuda-vmm")
        assert device["nbytes"] == MODEL_BYTES
        assert [found["paths"] for found in device["differences"]] == [["embed.weight", "head.weight"]]
        monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "-1")
        code, out, err = run("verify", "--socket-dir", one.socket_dir)
        assert (code, out) == (1, "")
        assert "no CUDA-capable device" in err or "is not visible in this process" in err, err
