"""Shared memory of the host: who may write it, and when; what is refused; what is given back."""

import ctypes
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weightkeeper.errors import MemoryKindError
from weightkeeper.memory import of_kind
from weightkeeper.memory.available import Available, available
from weightkeeper.memory.host import HostMemory

MEGABYTE = 1 << 20


@pytest.fixture
def memory():
    return HostMemory()


@pytest.fixture
def sealed(memory):
    """A sealed arena of 1 MiB, every byte 7."""
    arena = memory.create(MEGABYTE)
    ctypes.memset(arena.region.address, 7, MEGABYTE)
    arena.seal()
    yield arena
    arena.close()


@pytest.fixture
def descriptor(sealed):
    (descriptor,) = sealed.export()
    yield descriptor
    os.close(descriptor)


def mapped_bytes(region, nbytes=16):
    return ctypes.string_at(region.address, nbytes)


def in_child(action) -> int:
    """Run `action` in a forked child; the status that it ended with, as wait(2) gives it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        try:
            action()
        finally:
            os._exit(77)
    _, status = os.waitpid(child, 0)
    return status


def test_new_memory_is_zero_and_writable_by_its_creator(memory):
    """An arena starts as zeroes and holds at least what was asked for."""
    arena = memory.create(5000)
    assert arena.sizes == (2 * mmap.PAGESIZE,)
    assert arena.region.nbytes == 2 * mmap.PAGESIZE
    assert arena.region.writable is True
    assert mapped_bytes(arena.region, 5000) == bytes(5000)
    (ctypes.c_char * 5000).from_address(arena.region.address)[4999] = b"x"
    assert mapped_bytes(arena.region, 5000) == bytes(4999) + b"x"
    arena.close()


def test_a_mapping_has_the_creators_bytes(memory, sealed, descriptor):
    """What was written before the seal is what everybody maps."""
    region = memory.map([descriptor], sealed.sizes)
    assert region.writable is False
    assert ctypes.string_at(region.address, MEGABYTE) == b"\x07" * MEGABYTE
    region.close()


def test_a_stray_write_ends_the_writer_and_nobody_else(memory, sealed, descriptor):
    """The child that writes dies of SIGSEGV; a second mapping still has the old bytes."""
    region = memory.map([descriptor], sealed.sizes)
    other = memory.map([descriptor], sealed.sizes)

    def write() -> None:
        ctypes.memset(region.address, 9, 1)

    assert os.WTERMSIG(in_child(write)) == signal.SIGSEGV
    assert mapped_bytes(region) == b"\x07" * 16
    assert mapped_bytes(other) == b"\x07" * 16
    region.close()
    other.close()


def test_a_mapping_cannot_be_made_writable(memory, sealed, descriptor):
    """mprotect on mapped weights is refused by the kernel."""
    region = memory.map([descriptor], sealed.sizes)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mprotect(ctypes.c_void_p(region.address), ctypes.c_size_t(MEGABYTE), mmap.PROT_READ | mmap.PROT_WRITE)
    assert (result, os.strerror(ctypes.get_errno())) == (-1, "Permission denied")
    region.close()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, MEGABYTE // 2),
        lambda fd: os.ftruncate(fd, MEGABYTE * 2),
        lambda fd: mmap.mmap(fd, MEGABYTE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda fd: os.posix_fallocate(fd, MEGABYTE, MEGABYTE),
    ],
    ids=["write", "shrink", "grow", "map writable", "seal again", "allocate"],
)
@pytest.mark.parametrize("reopened", [False, True], ids=["as exported", "opened again for writing"])
def test_sealed_memory_cannot_be_changed(descriptor, attempt, reopened):
    """Not by the descriptor that is handed out, and not by opening it again with more rights."""
    used = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR) if reopened else os.dup(descriptor)
    with pytest.raises(OSError, match=r"not permitted|Permission denied|Bad file descriptor|Invalid argument"):
        attempt(used)
    assert os.pread(used, 16, 0) == b"\x07" * 16
    assert os.fstat(used).st_size == MEGABYTE
    os.close(used)


def test_a_handed_out_descriptor_is_read_only_and_ends_at_exec(descriptor):
    """No program that an engine starts inherits the weights by accident."""
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_sealing_names_a_mapping_that_is_still_writable(memory):
    """A second writable mapping keeps the seal away, and the error says so."""
    arena = memory.create(4096)
    second = mmap.mmap(arena._descriptor, 4096)
    with pytest.raises(
        MemoryKindError, match=r"4096 bytes .* could not be sealed: it is still mapped writable somewhere"
    ):
        arena.seal()
    second.close()
    arena.close()


def test_segments_are_mapped_one_behind_the_other(memory):
    """The order of the descriptors is the order in memory."""
    descriptors, sizes = [], []
    for value, nbytes in ((1, 4096), (2, 12288), (3, 8192)):
        arena = memory.create(nbytes)
        ctypes.memset(arena.region.address, value, nbytes)
        arena.seal()
        descriptors += arena.export()
        sizes += arena.sizes
        arena.close()
    region = memory.map(descriptors, sizes)
    assert region.nbytes == 24576
    assert ctypes.string_at(region.address, 24576) == b"\x01" * 4096 + b"\x02" * 12288 + b"\x03" * 8192
    region.close()
    for each in descriptors:
        os.close(each)


def test_nothing_stays_mapped_when_one_segment_is_refused(memory, sealed, descriptor):
    """All segments are checked before the first is mapped."""
    before = Path("/proc/self/maps").read_text().count("weightkeeper")
    with pytest.raises(MemoryKindError, match="holds 1048576 bytes, expected 4096"):
        memory.map([descriptor, descriptor], [MEGABYTE, 4096])
    with pytest.raises(MemoryKindError, match=r"1 descriptor\(s\) for 2 segment\(s\)"):
        memory.map([descriptor], [MEGABYTE, MEGABYTE])
    with pytest.raises(MemoryKindError, match=r"0 descriptor\(s\) for 0 segment\(s\)"):
        memory.map([], [])
    assert Path("/proc/self/maps").read_text().count("weightkeeper") == before


def test_two_hundred_cycles_leave_no_descriptor_and_no_mapping(memory):
    """Create, fill, seal, export, map, close, and all is as before."""

    def cycle() -> None:
        arena = memory.create(64 * 1024)
        ctypes.memset(arena.region.address, 1, 64 * 1024)
        arena.seal()
        descriptors = arena.export()
        region = memory.map(descriptors, arena.sizes)
        for each in descriptors:
            os.close(each)
        arena.close()
        arena.close()
        assert mapped_bytes(region) == b"\x01" * 16
        region.close()
        region.close()

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:weightkeeper")

    gc.collect()  # what other tests of this process have left goes now, not meanwhile
    cycle()
    descriptors, before = sorted(os.listdir("/proc/self/fd")), mappings()
    for _ in range(200):
        cycle()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() <= before


def test_a_mapping_outlives_its_descriptors_and_its_creator(memory):
    """Memory lives as long as somebody maps it."""
    script = (
        "import ctypes, socket, sys\n"
        "from weightkeeper.memory.host import HostMemory\n"
        "arena = HostMemory().create(4096); ctypes.memset(arena.region.address, 5, 4096); arena.seal()\n"
        "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'x'], arena.export())\n"
    )
    ours, theirs = socket.socketpair()
    subprocess.run(
        [sys.executable, "-c", script, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    region = memory.map(descriptors, [4096])
    os.close(descriptors[0])
    assert ctypes.string_at(region.address, 4096) == b"\x05" * 4096
    region.close()
    ours.close()
    theirs.close()


def unsealed(nbytes=4096):
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def half_sealed():
    descriptor = unsealed()
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def file_in(directory):
    descriptor, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    os.ftruncate(descriptor, 4096)
    return descriptor


REFUSED = {
    "unsealed": (unsealed, "is shared memory that can still be written or resized"),
    "half sealed": (half_sealed, "is shared memory that can still be written or resized"),
    "file on tmpfs": (lambda: file_in("/dev/shm"), "is shared memory that can still be written or resized"),
    "file on disk": (lambda: file_in(Path(__file__).parent), "is a regular file, expected sealed shared memory"),
    "pipe": (lambda: os.pipe()[0], "is a pipe, expected sealed shared memory"),
    "socket": (lambda: socket.socket().detach(), "is a socket, expected sealed shared memory"),
    "directory": (lambda: os.open("/", os.O_RDONLY), "is a directory, expected sealed shared memory"),
    "device": (lambda: os.open("/dev/zero", os.O_RDONLY), "is a character device, expected sealed shared memory"),
    "event": (lambda: os.eventfd(0), "is a descriptor of another kind, expected sealed shared memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_no_sealed_memory_is_refused_by_name(memory, name):
    """The message says what the descriptor is instead."""
    make, message = REFUSED[name]
    descriptor = make()
    with pytest.raises(MemoryKindError, match=f"descriptor {descriptor} {message}"):
        memory.check(descriptor, 4096)
    with pytest.raises(MemoryKindError, match=message):
        memory.map([descriptor], [4096])
    os.close(descriptor)


def test_another_size_is_refused_with_both_sizes(memory, descriptor):
    """A segment has exactly its size."""
    memory.check(descriptor, MEGABYTE)
    with pytest.raises(MemoryKindError, match=f"holds {MEGABYTE} bytes, expected {MEGABYTE + 4096}"):
        memory.check(descriptor, MEGABYTE + 4096)


def test_a_closed_descriptor_is_refused(memory):
    """A number that is no descriptor is an error of ours, not of Python."""
    with pytest.raises(MemoryKindError, match="descriptor 999999 is not usable: Bad file descriptor"):
        memory.check(999999, 4096)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_a_size_that_cannot_be_is_refused(memory, nbytes):
    """Before anything is allocated."""
    with pytest.raises(MemoryKindError, match=f"an arena of {nbytes} bytes cannot be made"):
        memory.create(nbytes)


def test_more_than_is_available_is_refused_with_both_numbers(memory, monkeypatch):
    """The user learns how much was wanted, how much there is and what sets the bound."""
    monkeypatch.setattr("weightkeeper.memory.host.available", lambda: Available(10_000_000, "the memory limit in /x"))
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryKindError, match=r"^10002432 bytes of shared memory wanted, 10000000 available"):
        memory.create(10_002_432)
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    HostMemory(freed_while_filling=10_000).create(10_002_432).close()


def test_this_machine_says_how_much_is_available():
    """The bound that is found here is a number of bytes below the machine's memory, and named."""
    found = available()
    assert 0 < found.nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.bound.startswith(("the machine's available memory", "the memory limit in /sys/fs/cgroup"))


def fake_system(directory, cgroup, files, meminfo_kib=1000):
    proc, groups = directory / "proc", directory / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {meminfo_kib} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = groups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, groups


def test_a_control_group_above_the_process_sets_the_bound(tmp_path):
    """Version 2: a limit of a parent counts, and cache that can be dropped is not counted as used."""
    proc, groups = fake_system(
        tmp_path,
        "0::/docker/inner\n",
        {
            "docker/inner/memory.max": "max\n",
            "docker/memory.max": "600000\n",
            "docker/memory.current": "500000\n",
            "docker/memory.stat": "anon 1\ninactive_file 50000\n",
        },
    )
    assert available(proc, groups) == Available(150_000, f"the memory limit in {groups}/docker/memory.max")


def test_a_version_1_limit_sets_the_bound(tmp_path):
    """Version 1 has other file names and says "no limit" with a large number."""
    files = {
        "memory/a/memory.limit_in_bytes": "700000\n",
        "memory/a/memory.usage_in_bytes": "650000\n",
        "memory/a/memory.stat": "cache 5\ntotal_inactive_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    proc, groups = fake_system(tmp_path, "4:memory:/a\n3:cpu,cpuacct:/a\n", files)
    assert available(proc, groups) == Available(50_000, f"the memory limit in {groups}/memory/a/memory.limit_in_bytes")


def test_without_limits_the_machine_is_the_bound(tmp_path):
    """No control group, or one outside the namespace, leaves the machine's own number."""
    proc, groups = fake_system(tmp_path, "0::/../../other\n", {})
    assert available(proc, groups) == Available(1_024_000, "the machine's available memory")


def test_the_kind_is_found_by_its_name():
    """`host` in a Grant leads to this memory."""
    assert of_kind("host").kind == "host"
