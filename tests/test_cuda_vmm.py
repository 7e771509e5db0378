"""GPU memory through a stand-in for the driver's calls; tests/gpu has the same rules on a real GPU."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fake_cuda import GRANULARITY, CUresult, FakeCuda
from keepers import KeeperProcess, inodes_of, wait_for
from torch import nn

from weightkeeper import client, mapping
from weightkeeper.capture import pack
from weightkeeper.errors import MemoryKindError
from weightkeeper.layout import Layout, Tensor
from weightkeeper.memory import cuda_vmm
from weightkeeper.memory.cuda_driver import Driver
from weightkeeper.memory.cuda_vmm import CudaMemory
from weightkeeper.offering import Source
from weightkeeper.protocol import Publish
from weightkeeper.restore import bind
from weightkeeper.tensors import bytes_of

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def cuda(monkeypatch):
    """A device whose memory is this machine's; its descriptors are memfds, which the real check would refuse."""
    monkeypatch.setattr(cuda_vmm, "check_descriptor", lambda descriptor, nbytes: None)
    monkeypatch.setattr(cuda_vmm, "SEGMENT_BYTES", 4 * GRANULARITY)
    return FakeCuda()


def memory(cuda: FakeCuda, **options) -> CudaMemory:
    driver = Driver(cuda, 0)
    driver.torch_device = "cpu"
    return CudaMemory(driver, **options)


def filled(cuda: FakeCuda, nbytes: int):
    """A sealed arena whose first `nbytes` bytes count up, and its descriptors."""
    arena = memory(cuda).create(nbytes)
    arena.back(nbytes)
    whole = bytes_of(arena.region)
    whole[:nbytes] = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    del whole
    arena.seal()
    return arena, arena.export()


def test_an_arena_is_segments_behind_one_another(cuda):
    """One contiguous range over several allocations, all but the last of full size."""
    nbytes = 9 * GRANULARITY + 1
    arena, descriptors = filled(cuda, nbytes)
    assert arena.sizes == (4 * GRANULARITY, 4 * GRANULARITY, 2 * GRANULARITY)
    region = memory(cuda).map(descriptors, arena.sizes)
    whole = bytes_of(region)
    assert whole.numel() == 10 * GRANULARITY
    assert torch.equal(whole[:nbytes], torch.arange(nbytes, dtype=torch.int64).to(torch.uint8))


def test_memory_outlives_its_maker(cuda):
    """A descriptor keeps the bytes when the arena is closed."""
    arena, descriptors = filled(cuda, 100)
    arena.close()
    assert cuda.handles == 0
    whole = bytes_of(memory(cuda).map(descriptors, arena.sizes))
    assert whole[99] == 99


def test_nothing_is_left_after_closing(cuda):
    """Handles, mappings, ranges and descriptors, over many cycles."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        arena, descriptors = filled(cuda, 5 * GRANULARITY)
        region = memory(cuda).map(descriptors, arena.sizes)
        region.close()
        arena.close()
        for descriptor in descriptors:
            os.close(descriptor)
    assert (cuda.handles, cuda.mappings, cuda.ranges) == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_segments_are_made_only_as_they_are_needed(cuda):
    """So that what is packed can be freed before the next one is allocated."""
    asked = []
    arena = memory(cuda, before_allocation=lambda: asked.append(cuda.allocated)).create(10 * GRANULARITY)
    assert cuda.allocated == 0
    arena.back(1)
    assert cuda.allocated == 4 * GRANULARITY
    arena.back(4 * GRANULARITY)
    assert cuda.allocated == 4 * GRANULARITY
    arena.back(10 * GRANULARITY)
    assert asked == [0, 4 * GRANULARITY, 8 * GRANULARITY]


@pytest.mark.parametrize(
    "call",
    ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"],
)
def test_a_refused_call_names_the_call_and_the_device_and_leaves_nothing(cuda, call):
    """Every return code is checked."""
    keeper = memory(cuda)
    cuda.fail[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    arena = None
    with pytest.raises(MemoryKindError) as caught:  # noqa: PT012  which of the steps refuses is the point
        arena = keeper.create(GRANULARITY)
        arena.back(GRANULARITY)
        arena.seal()
        arena.export()
    assert call in str(caught.value)
    assert UUID in str(caught.value)
    assert "out_of_memory (CUDA error 2)" in str(caught.value)
    if arena is not None:
        arena.close()
    assert (cuda.handles, cuda.mappings, cuda.ranges) == (0, 0, 0)


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_refused_mapping_leaves_nothing_mapped(cuda, call):
    """Also when the second segment is the one that fails."""
    arena, descriptors = filled(cuda, 5 * GRANULARITY)
    arena.close()
    cuda.fail[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MemoryKindError, match=call):
        memory(cuda).map(descriptors, arena.sizes)
    assert (cuda.handles, cuda.mappings, cuda.ranges) == (0, 0, 0)


def test_too_little_memory_says_how_much_was_wanted():
    """The driver's own refusal, with the bytes."""
    keeper = memory(FakeCuda(total=GRANULARITY))
    arena = keeper.create(2 * GRANULARITY)
    with pytest.raises(MemoryKindError, match=f"cuMemCreate for {2 * GRANULARITY} bytes failed on {UUID}"):
        arena.back(1)


def test_a_model_goes_through_gpu_memory_and_comes_back(cuda):
    """Pack, seal, export, map, bind: the whole way of a weight."""
    model = nn.Linear(3000, 1000)
    expected = model.weight.detach().clone()
    layout, arena = pack(model, memory(cuda), {})
    arena.seal()
    region = memory(cuda).map(arena.export(), arena.sizes)
    with torch.device("meta"):
        again = nn.Linear(3000, 1000)
    bind(again, layout, bytes_of(region), share=True)
    assert torch.equal(again.weight, expected)
    assert region.address <= again.weight.data_ptr() < region.address + region.nbytes


@pytest.fixture
def keeper(tmp_path):
    """A keeper that takes the stand-in's memory for a GPU's."""
    program = tmp_path / "program.py"
    program.write_text(
        "from weightkeeper.memory import cuda_vmm\n"
        "cuda_vmm.check_descriptor = lambda descriptor, nbytes: None\n"
        "from weightkeeper.cli import main\n"
        "main()\n"
    )
    running = KeeperProcess(tmp_path, program=(str(program),)).start(with_config=False)
    running.wait_for_state("empty")
    yield running
    running.kill()


def test_a_mapping_and_its_memory_outlive_the_keeper(cuda, keeper, monkeypatch):
    """Published, mapped by an engine, offered by it to the next keepers, and mapped from those: one memory."""
    nbytes = 9 * GRANULARITY
    arena, descriptors = filled(cuda, nbytes)
    monkeypatch.setattr(mapping.memory, "of_kind", lambda kind, ordinal: memory(cuda))
    layout = Layout((Tensor("w", "parameter", "uint8", (nbytes,), (1,), 0),), {}, {}, nbytes)
    message = Publish("GPU-a", 0, 1, "m", {"dtype": "x"}, (), "cuda-vmm", arena.sizes, layout)
    client.publish(keeper.socket_dir, message, descriptors).close()
    arena.close()
    for descriptor in descriptors:
        os.close(descriptor)
    model, before = nn.Module(), memory_of(keeper)
    assert len(set(before)) == len(before) == 3
    source = Source(keeper.socket_dir, "GPU-a", 0, 1, "m", (), "vllm-a", 30.0)
    for number in range(3):
        with client.open_session(keeper.socket_dir, "GPU-a") as session:
            looked = mapping.open_mapping(session, {"dtype": "x"}, "copy")
            assert torch.equal(looked.whole[:nbytes], torch.arange(nbytes, dtype=torch.int64).to(torch.uint8))
            looked.close()
        if number == 0:
            session = client.open_session(keeper.socket_dir, "GPU-a", name="vllm-a")
            mapping.open_mapping(session, {"dtype": "x"}, "zero_copy", source=source).attach(model, release=False)
        # An engine that has mapped from a keeper offers it the same memory: a moment later nothing is held twice.
        wait_for(lambda: memory_of(keeper) == before, "one descriptor for each segment")
        keeper.kill()
        keeper.start(with_config=False)
        wait_for(lambda: (now := keeper.status()) and now.held and now.leases, "the adoption")
        assert keeper.status().held.adopted_from == "vllm-a"
    del model
    gc.collect()
    wait_for(lambda: keeper.status().leases == (), "the end of the lease with the model")


def memory_of(keeper) -> list[int]:
    """Inodes of the stand-in's memory that a keeper holds."""
    return inodes_of(keeper.process.pid, "fake GPU")


def test_a_write_through_a_mapping_ends_the_writer():
    """The access that a mapping asks the driver for is read."""
    script = """
        from fake_cuda import FakeCuda
        from test_cuda_vmm import filled, memory
        from weightkeeper.memory import cuda_vmm
        from weightkeeper.tensors import bytes_of
        cuda_vmm.check_descriptor = lambda descriptor, nbytes: None
        cuda = FakeCuda()
        arena, descriptors = filled(cuda, 100)
        whole = bytes_of(memory(cuda).map(descriptors, arena.sizes))
        print("read", int(whole[7]), flush=True)
        whole.fill_(1)
        print("written", flush=True)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert (result.stdout, result.returncode) == ("read 7\n", -11), result.stderr


@pytest.mark.parametrize(
    ("make", "words"), [(lambda: os.pipe()[0], "pipe"), (lambda: os.open("/", os.O_RDONLY), "file")]
)
def test_a_descriptor_of_something_else_is_refused(make, words):
    """What a keeper without CUDA can see."""
    with pytest.raises(MemoryKindError, match=words):
        cuda_vmm.check_descriptor(make(), GRANULARITY)


def test_without_a_driver_the_message_says_what_is_missing(monkeypatch):
    """No libcuda in a container without the NVIDIA runtime."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MemoryKindError, match=r"is libcuda\.so\.1 in this container\?"):
        cuda_vmm.open_device(0)
